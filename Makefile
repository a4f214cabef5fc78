PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: demo compiled mission test test-full check bench chaos clean
.DELETE_ON_ERROR:

.venv/bin/python:
	$(PYTHON) -m venv .venv

# What running needs: the package and its light dependencies.
.venv/.base: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

# What checking needs: the tools, still without any framework.
.venv/.tools: .venv/.base
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

# What the demo and the examples need. torch comes first and by its exact version: a looser requirement pulls the CUDA
# build.
.venv/.examples: .venv/.base
	$(PIP) install torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) install -c constraints.txt -e ".[examples]"
	@touch $@

# What the tests need.
.venv/.frameworks: .venv/.tools .venv/.examples
	$(PIP) install -c constraints.txt tensorflow-cpu keras jax accelerate lightning-fabric
	@touch $@

demo: .venv/.examples
	$(BIN)/python examples/demo.py

check: .venv/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compiled once: each test starts several processes, which would do it anew where nothing may be written.
compiled: .venv/.frameworks
	@$(BIN)/python -m compileall -q src tests

# Two files at a time, in their order: most tests wait for processes, and keep a core busy for half of their time only.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Tests that fork workers come first, and without the others: a process that has imported every framework takes twice as
# long to fork, and one that has started TensorFlow cannot do it.
FORKING := tests/mission tests/contract tests/process
OTHERS := tests/unit src/duoka

# What the articles show, and what must not be cut. It is part of `make test`.
mission: compiled
	$(PYTEST) --durations=20 tests/mission

test: compiled
	$(PYTEST) -m "not slow" --durations=40 $(FORKING)
	$(PYTEST) -m "not slow" --durations=20 $(OTHERS)

test-full: compiled
	$(PYTEST) $(FORKING)
	$(PYTEST) $(OTHERS)

bench: .venv/.frameworks
	$(BIN)/python benchmarks/run.py

MINUTES ?= 10
chaos: compiled
	$(BIN)/python -m tests.process.soak $(MINUTES)

clean:
	rm -rf .venv runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
