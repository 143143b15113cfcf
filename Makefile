# `make demo` and `make test` set everything up on a machine that has Python 3.11 or newer and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEER := $(VENV)/peer

.PHONY: demo test test-slow test-peer lint types imports check format clean

demo: $(READY)  ## draw a corpus, convert it, stream it
	$(BIN)/python -m examples.demo

test: $(READY)  ## the suite, but for its slow tests
	$(BIN)/python -m pytest -n auto -m "not slow and not peer"

test-slow: $(READY)  ## runs that are killed again and again, and benchmarks that must run
	$(BIN)/python -m pytest -n auto -m slow

test-peer: $(PEER)/.ready  ## beside NeMo AutoModel itself: its loader, its model, its recipe
	PYTHONPATH=$(PEER) $(BIN)/python -m pytest -m peer tests/peer

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)  ## which room may import which
	$(BIN)/lint-imports

check: lint types imports test test-slow test-peer  ## everything that CI runs

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "bagel-wds needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(READY)

$(PEER)/.ready: $(READY) tests/peer/requirements.txt
	rm -rf $(PEER)
	$(BIN)/python -m pip install --quiet --no-deps --target $(PEER) --requirement tests/peer/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-data
