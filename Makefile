# make demo | make test | make check. All three share one environment in .venv, made on first use.
PYTHON ?= python3
PROMPT ?= The history of computing
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check

help:
	@echo "make demo    install if needed, then generate 48 tokens with the small default model"
	@echo "make test    install if needed, then lint, types and the whole test-suite"
	@echo "make check   install if needed, then lint and types only"
	@echo "PYTHON=...   interpreter for the environment, 3.11 or newer (now: $(PYTHON))"

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON): Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	@if [ ! -x $(BIN)/pip ]; then echo "== new environment in $(VENV)"; $(PYTHON) -m venv $(VENV); fi
	@echo "== installing the pinned packages (the first time takes minutes: torch is large)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP)
	@echo "== the small model has random weights: its text has no meaning"
	$(BIN)/leadline generate "$(PROMPT)" --max-tokens 48

check: $(STAMP)
	@echo "== lint and format"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== types"
	$(BIN)/mypy

test: check
	@echo "== tests, two processes of one thread each (more threads than cores wait for each other, docs/log.md)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
