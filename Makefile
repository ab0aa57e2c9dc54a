# One command each; every target does its own set-up.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
RUNS   ?= runs
SEED   ?= 0
FILES  ?= *
SECONDS ?= 600
SAMPLE ?= 150
BIN    := $(VENV)/bin
# LeRobot and Isaac Lab need Python 3.12 and an older torch, hence environments of their own for the tests against them.
LEROBOT_VENV   ?= .venv-lerobot
ISAACLAB_VENV  ?= .venv-isaaclab
TOOLS_VENV     ?= .venv-tools
TORCH312       ?= torch==2.11.0
PYTHON312      ?= $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),\
  $(shell $(python) -c 'import sys; print(sys.executable)' 2>/dev/null)))
TEST    := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal
NUMERIC := $(addprefix tests/,core nets policies critics rollout algorithms evaluation worldmodel)
export OMP_NUM_THREADS ?= 2

.PHONY: demo test test-product test-all test-portable mutants test-lerobot test-isaaclab test-ros fuzz audit sbom gpu lint types format docs check setup setup-dev clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

demo: $(VENV)/.setup  ## demonstrations -> flow policy -> RL fine-tuning -> report, plot and video in runs/demo
	$(BIN)/python -m examples.demo --out $(RUNS)/demo --seed $(SEED)

test: $(VENV)/.setup-dev  ## the product's tests that are not slow, and the rules that contrib obeys (no network, no GPU)
	$(TEST) -m "not gpu and not slow and (rules or not contrib)"

test-product: $(VENV)/.setup-dev  ## the same as if robopolicy/contrib were deleted
	$(TEST) -m "not gpu and not slow" --hide-contrib

test-all: $(VENV)/.setup-dev  ## the whole test suite, contrib and slow tests included (no network, no GPU)
	$(TEST) -m "not gpu"

test-portable: $(VENV)/.setup-dev  ## the tests of numbers with the instructions of older processors: without AVX, and with AVX2
	ATEN_CPU_CAPABILITY=default $(TEST) -m "not gpu and not slow" $(NUMERIC)
	ATEN_CPU_CAPABILITY=avx2 $(TEST) -m "not gpu and not slow" $(NUMERIC)

mutants: $(VENV)/.setup-dev  ## change one thing at a time in losses, targets and rewards; which changes does no test notice? (FILES, SAMPLE, SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py --files '$(FILES)' --sample $(SAMPLE) --seed $(SEED)

test-lerobot:  ## policies, datasets and robots against LeRobot itself, in an environment with Python 3.12
	@test -n "$(PYTHON312)" || { echo "No Python 3.12 found; run: make test-lerobot PYTHON312=PATH"; exit 2; }
	@$(MAKE) --no-print-directory VENV=$(LEROBOT_VENV) PYTHON=$(PYTHON312) TORCH=$(TORCH312) $(LEROBOT_VENV)/.setup-lerobot
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(LEROBOT_VENV)/bin/python -m pytest -q tests/interop/test_lerobot_*.py tests/data/test_lerobot_package.py tests/real_robot/test_lerobot.py

test-isaaclab:  ## its environments under our contract, on the CPU, in an environment with Python 3.12 (8 GB)
	@test -n "$(PYTHON312)" || { echo "No Python 3.12 found; run: make test-isaaclab PYTHON312=PATH"; exit 2; }
	@$(MAKE) --no-print-directory VENV=$(ISAACLAB_VENV) PYTHON=$(PYTHON312) TORCH=$(TORCH312) $(ISAACLAB_VENV)/.setup-isaaclab
	OMP_NUM_THREADS=1 $(ISAACLAB_VENV)/bin/python -m pytest -q tests/sim/test_isaaclab.py

test-ros: $(VENV)/.setup-dev  ## the ROS bridge against Fast DDS, Cyclone DDS, rospy and roslibpy; says which Debian packages are missing
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rsP tests/real_robot/test_peers.py

fuzz: $(VENV)/.setup-dev  ## search for crashes of all that reads foreign bytes (SECONDS, default 600)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --seconds $(SECONDS)

audit: $(VENV)/.setup-dev $(TOOLS_VENV)/.setup  ## known vulnerabilities of the installed packages, where pypi.org can be reached
	@$(BIN)/python -c 'import urllib.request as u; u.urlopen("https://pypi.org/pypi/pip/json", timeout=10)' 2>/dev/null \
	  || { echo "pypi.org cannot be reached: no audit"; exit 0; }; \
	  $(TOOLS_VENV)/bin/pip-audit --progress-spinner off --skip-editable --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

sbom: $(VENV)/.setup $(TOOLS_VENV)/.setup  ## list of all installed packages and licenses in sbom.json (CycloneDX)
	$(TOOLS_VENV)/bin/cyclonedx-py environment $(BIN)/python --of JSON -o sbom.json

gpu: $(VENV)/.setup-dev  ## all measurements of a machine with a GPU, in 40 minutes: benchmarks/results/gpu.md
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu

lint: $(VENV)/.setup-dev  ## ruff: rules and format
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.setup-dev  ## pyright
	$(BIN)/pyright

format: $(VENV)/.setup-dev  ## let ruff rewrite the files
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(VENV)/.setup-dev  ## generate the pages of methods, references and benchmarks, and measured numbers in other pages
	$(BIN)/python -m docs.references
	$(BIN)/python -m docs.generate_methods
	$(BIN)/python -m docs.generate_benchmarks
	$(BIN)/python -m docs.generate_numbers

check: test lint types  ## what continuous integration runs, but for test-all where that is due

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
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,envpool,warp,ogbench,dmcontrol,gymnasiumrobotics,robosuite,pusht,sb3,tensorboard,wandb,trackio,viewer,diffusers,onnx,remote,ros,record,hdf5,zarr,zarr-images,minari,gamepad,spacemouse,rslrl,mjlab,joblib,evolution,known-dynamics,offline,quality-diversity,text]'
	@# rsl-rl-lib asks for torchvision and never imports it; one for another build of torch breaks what does.
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/python -m pip uninstall -q -y torchvision
	$(BIN)/python tests/helpers/simulated/build.py  # the simulated device, where there is a compiler
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps metaworld==3.1.1 robosuite==1.5.2 openpi-client==0.1.2  # their metadata ask for an older MuJoCo or numpy than they need
	@touch $@

$(VENV)/.setup-lerobot: $(VENV)/.setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[lerobot]' 'pytest>=8.3,<10'
	@touch $@

$(VENV)/.setup-isaaclab: $(VENV)/.setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[isaaclab]' 'pytest>=8.3,<10'
	@touch $@

$(TOOLS_VENV)/.setup: pyproject.toml
	$(BIN)/python -m venv $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/pip install -q --disable-pip-version-check 'pip-audit>=2.9,<3' 'cyclonedx-bom>=7,<8'
	@touch $@

clean:  ## remove the environments and caches
	rm -rf $(VENV) $(LEROBOT_VENV) $(ISAACLAB_VENV) $(TOOLS_VENV) .pytest_cache .ruff_cache
