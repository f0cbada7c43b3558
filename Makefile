# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRITON := $(VENV)/.triton
# Triton is not in the constraints, because a CUDA build of torch pins its own version.
TRITON_VERSION := triton==3.9.0
TORCH_VERSION := $(patsubst torch==%,%,$(filter torch==%,$(file < constraints.txt)))
# A module stays in one process, because its tests share fixtures. A process takes 1 GB of memory.
PARALLEL := -n auto --maxprocesses 4 --dist loadscope
# Every process of a test run would compile all modules again without their bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo federation-demo test test-slow coverage lint types bench docs figures examples dist dist-lowest clean

demo: $(INSTALLED)
	$(BIN)/fedgmm demo --out demo

# One server and four clients as processes on this machine, with TLS and keys.
federation-demo: $(INSTALLED)
	$(BIN)/python -m fedgmm.federation.demo --out federation-demo

test: lint types $(TRITON)
	$(BIN)/pytest -m "not slow" $(PARALLEL)

# The slow tests, and all tests that draw examples with fifteen times as many.
test-slow: $(TRITON)
	$(BIN)/pytest -m "slow or hypothesis" --hypothesis-profile=thorough $(PARALLEL)

# Lines that the tests run. Counting them takes a third of the time of testing.
coverage: $(TRITON)
	$(BIN)/pytest -m "not slow" --cov --cov-report=term $(PARALLEL)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/federated_gmm.py
	$(BIN)/python benchmarks/rounds.py

# The documentation site, offline: warnings are errors, links are checked. Open build/site/index.html.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/site
	$(BIN)/python docs/check_site.py build/site

# The pictures of the documentation, and the numbers of docs/aggregation.md.
figures: $(INSTALLED)
	$(BIN)/python docs/make_figures.py

# All examples, and their pictures in the gallery.
examples: $(INSTALLED)
	for script in examples/*.py; do echo $$script; MPLBACKEND=Agg $(BIN)/python $$script \
	  --out docs/images/examples/$$(basename $$script .py).png || exit 1; done

# Wheel and source archive, built in isolation, then tried in a fresh environment as a user would.
# `make dist PYTHON=python3.13` tries another Python.
dist: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .
	$(call try,dist/trial,--constraint constraints.txt)

# The same wheel with the lowest versions that pyproject.toml allows.
dist-lowest: dist
	$(call try,dist/trial-lowest,--constraint packaging/lowest.txt "torch==$(TORCH_VERSION)")

# $(call try,FOLDER,OPTIONS): install the wheel and nothing else into a new environment, and run the commands.
define try
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet $(2) dist/*.whl
	cd $(1) && bin/python $(CURDIR)/packaging/smoke.py
	du -sh $(1) | sed 's/^/installed size: /'
endef

clean:
	rm -rf $(VENV) demo federation-demo build dist docs/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# Installs again only when the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# GPU kernels are tested on the CPU with Triton's interpreter. A CUDA build of torch brings its own Triton;
# if Triton cannot be installed, these tests are skipped.
$(TRITON): $(INSTALLED)
	if $(BIN)/python -c "import triton" 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet $(TRITON_VERSION); then touch $@; \
	else echo "Triton could not be installed: the tests of kernels will be skipped."; fi
