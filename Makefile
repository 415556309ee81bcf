# Two commands on a machine with python3, pip and make:
#   make demo   train, evaluate and explain a small model on handwritten digits; writes demo/report.html
#   make test   install the dependencies and run the tests; under 10 minutes on two cores
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Newer than the files that list the dependencies, so a second run installs nothing.
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.installed-extras

.PHONY: demo test test-all test-cpus test-lowest lint format bench docs notebooks release-check clean

demo: $(STAMP)
	$(BIN)/vtok demo --out demo

# Two processes of one thread each: most tensors in the tests are too small to share between threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-all: $(EXTRAS)
	$(PYTEST)

# The numerical tests with the kernels that the libraries choose on other processors.
# CPU="avx2 threads-3" selects combinations.
test-cpus: $(STAMP)
	$(BIN)/python -m tests.cpu_matrix $(CPU) -- --numprocesses 2

# The lowest versions that pyproject.toml allows, in an environment of their own. uv takes pip's package index.
LOWEST := .venv-lowest
test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -m "not slow" $(TESTS)

$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(RETRY) $(LOWEST)/bin/python -m pip install --quiet --upgrade pip uv
	index=$${PIP_INDEX_URL:-$$($(LOWEST)/bin/python -m pip config get global.index-url 2> /dev/null)}; \
	$(RETRY) $(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct \
		$${index:+--default-index "$$index"} --editable ".[dev,explain]"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks docs
	$(BIN)/ruff format src tests benchmarks docs

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_ops.py --save results/bench_ops.json

# The site of the documentation in site/; a broken link or reference is an error.
docs: $(EXTRAS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

# The notebooks with new outputs.
notebooks: $(EXTRAS)
	$(BIN)/python docs/run_notebooks.py

# The packages in dist/, checked and tried. EMPTY=1 installs all dependencies into an empty environment.
release-check: $(EXTRAS)
	$(BIN)/python -m tests.release_check $(if $(EMPTY),--empty)

# Gigabytes are downloaded over connections that may break: a new pip resumes, and the retries do the rest.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RETRY := retry() { "$$@" || { sleep 5; "$$@"; } || { sleep 30; "$$@"; }; }; retry

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RETRY) $(PIP) --upgrade pip
	$(RETRY) $(PIP) --constraint constraints.txt --editable ".[dev,explain]"
	touch $@

# What only the site, the packages and the slow tests of both need.
$(EXTRAS): $(STAMP)
	$(RETRY) $(PIP) --constraint constraints.txt --editable ".[docs,release]"
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) demo build dist site
