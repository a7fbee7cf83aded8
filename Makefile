# make demo       train a small ResNet on four local workers, plain DDP and DeAR side by side
# make test       lint, types and every test that is not slow
# make test-slow  slow tests but for long ones; continuous integration runs them after make test
# make test-all   all slow tests: before a release, and when what they are about has changed
# make docs       the documentation, in docs/_build/html
#
# PYTHON      which Python makes the environment:  make test PYTHON=python3.12
# VENV        where the environment is kept:       make test VENV=/scratch/venv
# PIP_ARGS    more arguments for pip install:      make demo PIP_ARGS="--extra-index-url URL"

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
# Ranks wait for each other, and mostly leave a core idle.
PARALLEL := -n 2 --dist worksteal

.PHONY: demo test test-slow test-all docs

demo: $(VENV)/.installed-recipes
	$(BIN)/python -m recipes.demo

test: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/mypy --num-workers 2
	$(BIN)/pytest -m "not slow" $(PARALLEL)

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -m "slow and not long" $(PARALLEL)

test-all: $(VENV)/.installed-test
	$(BIN)/pytest -m slow $(PARALLEL)

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# One stamp per extra: a second call installs nothing unless the versions changed.
$(VENV)/.installed-%: setup.cfg pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install $(PIP_ARGS) --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
		echo "error: $(PYTHON) not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: the tested versions need Python 3.11 or newer, $(PYTHON) is `$(PYTHON) -V 2>&1`. Name another one: make PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make environments. Install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
