PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
MODELS_VENV := .venv-models
BIN := $(VENV)/bin

# One thread per test worker: more workers than threads to run them on only slow each other down. Compiled modules are
# kept, whatever the environment says: tests start many processes, each of which would compile them anew.
TEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# A worker that is done takes tests from the others; until then each stays with its files, and their fixtures.
WORKERS := -n logical --dist worksteal
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-models lint format bench experiments clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(VENV)/.stamp ## train every method on handwritten digits with three seeds, compare them, and write a report
	OMP_WAIT_POLICY=passive $(BIN)/leanbayes compare --seeds 3 --jobs 2 --look.shift-examples 200 --overwrite

test: $(VENV)/.stamp ## run the tests
	$(TEST) $(BIN)/python -m pytest $(WORKERS)

# The addopts of pyproject.toml, less the one that leaves this folder out.
test-models: $(MODELS_VENV)/.stamp ## run the tests on networks of torchvision and timm
	$(TEST) $(MODELS_VENV)/bin/python -m pytest -o addopts="--strict-markers --strict-config" -m "not slow" $(WORKERS) tests/models

lint: $(VENV)/.stamp ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.stamp ## put all code in the one format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.stamp ## measure a training step beside the deterministic network's
	$(BIN)/python benchmarks/step.py

experiments: $(VENV)/.stamp ## run the long experiments (needs LEANBAYES_DATA and a GPU), and write docs/results.md
	$(BIN)/leanbayes fit mean-field --data cifar10 --model resnet-20 --epochs 60 --batch-size 256 --optimiser sgd --lr 0.1 \
	  --weight-decay 5e-4 --temperature 0.008 --precision bf16 --compile --channels-last --method.prior.scale 0.1 \
	  --method.init-std 0.001 --method.no-relative --out runs/cifar10-resnet-20
	for file in experiments/*.yaml; do name=$$(basename $$file .yaml); \
	  $(BIN)/leanbayes compare --config $$file --out runs/$$name --json experiments/results/$$name.json || exit 1; done
	$(BIN)/python experiments/tables.py

clean: ## remove the environments, caches and build outputs
	rm -rf $(VENV) $(MODELS_VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks experiments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# torch goes first and pinned: whatever asks for it later is then content, and pulls no other build of it.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch
	$(BIN)/python $(PIP_INSTALL) -e '.[cli,compress,explain,export,dev]'
	touch $@

# torchvision and timm go in without what they ask for: their torch would be another build than ours.
$(MODELS_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MODELS_VENV)
	$(MODELS_VENV)/bin/python $(PIP_INSTALL) torch
	$(MODELS_VENV)/bin/python $(PIP_INSTALL) -e . pytest pytest-xdist hypothesis pyyaml huggingface_hub pillow
	$(MODELS_VENV)/bin/python $(PIP_INSTALL) --no-deps torchvision timm
	touch $@
