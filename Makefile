.PHONY: demo test down lint bench conformance

demo: ; @bootstrap/demo/run
test: ; @bootstrap/test
down: ; @bootstrap/sandbox down
lint: ; @bootstrap/lint
bench: ; @bootstrap/bench
conformance: ; @bootstrap/conformance
