# Two commands on a machine with python3, pip and make:
#   make demo   train, evaluate and explain a small model on real digits; writes demo/report.html
#   make test   install what is missing, then run the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp is newer than the files that decide what is installed, so a second run installs nothing.
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint format bench clean

demo: $(STAMP)
	$(BIN)/vtok demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_ops.py --save results/bench_ops.json

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo build dist
