# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo federation-demo test test-slow lint types bench docs clean

demo: $(INSTALLED)
	$(BIN)/fedgmm demo --out demo

# One server and four clients as processes on this machine, with TLS and keys.
federation-demo: $(INSTALLED)
	$(BIN)/python -m fedgmm.flower.demo --out federation-demo

test: lint types
	$(BIN)/pytest -m "not slow" --cov --cov-report=term

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/federated_gmm.py
	$(BIN)/python benchmarks/rounds.py

docs: $(INSTALLED)
	$(BIN)/python docs/make_figures.py

clean:
	rm -rf $(VENV) demo federation-demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# Installs again only when the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
