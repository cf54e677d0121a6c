# make demo   a real model answers real prompts, every finished rollout on disk (light environment)
# make test   everything the tests need, then the tests
# make env    the environment of the tests in .venv
# make check  formatting, lint, types (what .ci/run checks besides the tests)
# make bench-quick  every benchmark, small
# make demo-model   trains and exports the demo model anew (about half an hour)

PYTHON ?= python3
PIP = -m pip --disable-pip-version-check install -q -c constraints.txt
DEMO_ARGS ?=

.PHONY: env demo test check bench-quick demo-model clean

env: .venv/.done
demo: .venv-demo/.done
	.venv-demo/bin/rollstream demo $(DEMO_ARGS)
test: .venv/.done
	.venv/bin/python -m pytest $(TEST_ARGS)
check: .venv/.done
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
bench-quick: .venv/.done
	for name in overhead resume agent; do .venv/bin/python -m bench.$$name --quick || exit 1; done
demo-model: .venv/.done
	.venv/bin/python -m demo_model.make

# torch first and alone: its CPU build is asked for by exact version.
.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) torch
	.venv/bin/python $(PIP) -e '.[openvino,hf,tasks,mcp,images,dev]'
	touch $@

.venv-demo/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(PIP) -e '.[openvino,tasks]'
	touch $@

clean:
	rm -rf .venv .venv-demo build
