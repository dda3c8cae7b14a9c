# Targets explain themselves: `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test slow lint bench clean

help:  ## show what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-7s %s\n", $$1, $$2}'

run: $(VENV)/.run  ## install, fetch the embedded model, open the demo (without a terminal: run it headless)
	@$(BIN)/workbench demo

test: $(VENV)/.test  ## install what the tests need and run the quick suite
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m "not slow"

slow: $(VENV)/.test  ## the slow suite: real models, whole runs, the built wheel
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m slow

lint: $(VENV)/.test  ## ruff, pyright, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --warnings
	@$(BIN)/lint-imports

bench: $(VENV)/.test  ## the figures that README and CHANGELOG claim
	@for script in lanes engines fidelity llama_perplexity check_kl overhead memory trace_size seek ui; do $(BIN)/python benchmarks/$$script.py || exit 1; done

clean:  ## remove what make created here (models and traces stay: workbench models, workbench paths)
	rm -rf $(VENV) build dist *.egg-info .ruff_cache .import_linter_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit("workbench needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[transformers]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "llama.cpp is built from source the first time (a C++ compiler; 5 to 15 minutes on two cores, pip says nothing)"
	$(INSTALL) --editable '.[transformers,llamacpp,dev]'
	@touch $@
