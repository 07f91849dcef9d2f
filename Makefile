.PHONY: demo test down lint bench soak conformance

demo: ; @bootstrap/demo/run
test: ; @bootstrap/test
down: ; @bootstrap/sandbox down
lint: ; @bootstrap/lint
bench: ; @bootstrap/bench
soak: ; @bootstrap/soak
conformance: ; @bootstrap/conformance
