PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
MODELS_VENV := .venv-models
DOCS_VENV := .venv-docs
RELEASE_VENV := .venv-release
OLDEST_VENV := .venv-oldest
OLDEST_TORCH := $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).0
BIN := $(VENV)/bin

# One thread per test worker: with more threads than cores, workers slow each other down. Python's compiled modules are
# written to disk whatever the environment says: tests start many processes, each of which would compile them again.
TEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Each worker runs the tests of its own files, which share fixtures; a worker that is done takes tests from the others.
WORKERS := -n logical --dist worksteal
ONLY ?= *
DEMO := --seeds 5 --jobs 2 --evaluation.no-pruning --overwrite
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-models test-oldest lint format bench experiments docs release-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(VENV)/.stamp ## three methods and five seeds on a regression with a gap and on handwritten digits: two reports in 3 minutes
	OMP_WAIT_POLICY=passive $(BIN)/leanbayes compare --data gap $(DEMO)
	OMP_WAIT_POLICY=passive $(BIN)/leanbayes compare --evaluation.shift-examples 200 $(DEMO)

test: $(VENV)/.stamp ## run the tests
	$(TEST) $(BIN)/python -m pytest $(WORKERS)

# The addopts of pyproject.toml, without the one that excludes this folder.
test-models: $(MODELS_VENV)/.stamp ## run the tests on networks of torchvision and timm
	$(TEST) $(MODELS_VENV)/bin/python -m pytest -o addopts="--strict-markers --strict-config" -m "not slow" $(WORKERS) tests/models

test-oldest: $(OLDEST_VENV)/.stamp ## run the tests with the oldest supported torch, which pip installs with CUDA: several gigabytes
	$(TEST) $(OLDEST_VENV)/bin/python -m pytest $(WORKERS)

lint: $(VENV)/.stamp ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.stamp ## format all code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.stamp ## measure a training step relative to the deterministic network
	$(BIN)/python benchmarks/step.py

experiments: $(VENV)/.stamp ## make the experiments' results that are missing (ONLY=PATTERN chooses), then the pages
	$(BIN)/python experiments/reproduce.py --only '$(ONLY)'

docs: $(VENV)/.stamp $(DOCS_VENV)/.stamp $(MODELS_VENV)/.stamp ## run the tutorials, and write the documentation site to site/
	rm -rf build/pages
	$(BIN)/python tools/reference_pages.py build/pages
	$(TEST) $(BIN)/python tools/tutorial_pages.py build/pages
	$(TEST) $(MODELS_VENV)/bin/python tools/tutorial_pages.py build/pages images_timm
	NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/$(DOCS_VENV)/bin:$$PATH mkdocs build

release-check: $(RELEASE_VENV)/.stamp ## build the package, install it into clean environments, and use it there
	$(RELEASE_VENV)/bin/python tools/release_check.py

clean: ## remove the environments, caches and build outputs
	rm -rf $(VENV) $(MODELS_VENV) $(DOCS_VENV) $(RELEASE_VENV) $(OLDEST_VENV) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks experiments tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# torch is installed first and pinned, so that packages that depend on it do not install another build.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch
	$(BIN)/python $(PIP_INSTALL) -e '.[cli,compress,explain,export,dev]'
	touch $@

# torchvision and timm are installed without dependencies, which would bring another build of torch.
$(MODELS_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MODELS_VENV)
	$(MODELS_VENV)/bin/python $(PIP_INSTALL) torch
	$(MODELS_VENV)/bin/python $(PIP_INSTALL) -e . pytest pytest-xdist hypothesis pyyaml huggingface_hub pillow
	$(MODELS_VENV)/bin/python $(PIP_INSTALL) --no-deps torchvision timm
	touch $@

# The site is written from the source of the package, which need not be installed.
$(DOCS_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

# Without constraints.txt, which pins a newer torch.
$(OLDEST_VENV)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet -e '.[all,dev]' torch==$(OLDEST_TORCH)
	touch $@

$(RELEASE_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python $(PIP_INSTALL) build
	touch $@
