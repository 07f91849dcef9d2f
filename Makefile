.PHONY: demo test down lint bench

demo: ; @bootstrap/demo/run
test: ; @bootstrap/test
down: ; @bootstrap/sandbox down
lint: ; @bootstrap/lint
bench: ; @bootstrap/bench
