# One command each; every target does its own set-up.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
RUNS   ?= runs
SEED   ?= 0
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 2

.PHONY: demo test test-fast lint types format docs check setup setup-dev clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

demo: $(VENV)/.setup  ## demonstrations -> flow policy -> RL fine-tuning -> report, plot and video in runs/demo
	$(BIN)/python -m recipes.demo --out $(RUNS)/demo --seed $(SEED)

test: $(VENV)/.setup-dev  ## the whole test suite (no network, no GPU)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" -n 2 --dist loadfile

test-fast: $(VENV)/.setup-dev  ## without the slow tests
	$(BIN)/python -m pytest -q -m "not gpu and not slow"

lint: $(VENV)/.setup-dev  ## ruff: rules and format
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.setup-dev  ## pyright
	$(BIN)/pyright

format: $(VENV)/.setup-dev  ## let ruff rewrite the files
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(VENV)/.setup-dev  ## generate docs/methods.md from docs/methods.toml
	$(BIN)/python -m docs.generate_methods

check: test lint types  ## what continuous integration runs

setup: $(VENV)/.setup  ## environment for users
setup-dev: $(VENV)/.setup-dev  ## environment for contributors

# Debian ships python3 without the venv module's pip; virtualenv then makes the same environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("robopolicy needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install -q --target $(VENV)-tool virtualenv && \
	  PYTHONPATH=$(VENV)-tool $(PYTHON) -m virtualenv -q $(VENV) && rm -rf $(VENV)-tool; }

$(VENV)/.setup: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@sh sim_assets/install_gl.sh
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,envpool,ogbench,push_t,sb3,tensorboard,wandb,diffusers]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps metaworld==3.1.1  # its metadata asks for an older MuJoCo than it needs
	@touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache
