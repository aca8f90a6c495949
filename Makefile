# Each target builds what it needs in a virtual environment of its own: `make VENV=... PYTHON=...` to choose others.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart check test lint
# Test files that hardly train: `make check` takes under two minutes on two cores.
FAST = architecture cliques datasets docs mixing partitions plotting reports results topologies

quickstart: $(VENV)/demo
	$(BIN)/python examples/quickstart.py

check: lint
	$(BIN)/python -m pytest --numprocesses=2 -m 'not slow' $(FAST:%=tests/test_%.py)

test: lint
	$(BIN)/python -m pytest --numprocesses=2

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A stamp file for every extra: installed again only when pyproject.toml changes.
$(VENV)/demo $(VENV)/test: $(VENV)/%: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
