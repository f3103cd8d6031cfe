# The two commands of the README, and what developers use beside them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint bench bench-gpu bench-bubble bench-checkpoint bench-compression chaos clean

.venv/rung: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[examples]"
	touch $@

.venv/dev: .venv/rung
	$(BIN)/pip install --quiet --editable ".[dev,examples,models]"
	touch $@

.venv/bench: .venv/rung
	$(BIN)/pip install --quiet --editable ".[bench,examples]"
	touch $@

demo: .venv/rung
	$(BIN)/rung train examples/babycnn/task.py --strategy ddp --nproc 2

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Ranks of a test are many and small: a thread each.
test test-all: export OMP_NUM_THREADS = 1

test: lint
	$(BIN)/pytest -m "not slow and not gpu"

test-all: lint
	$(BIN)/pytest

bench: .venv/bench
	$(BIN)/python -m benchmarks.speed --device cpu

bench-gpu: .venv/bench
	$(BIN)/python -m benchmarks.speed --device cuda

bench-bubble: .venv/rung
	$(BIN)/python -m benchmarks.bubble

# Makes network namespaces, so it needs root: half an hour.
bench-compression: .venv/rung
	$(BIN)/python -m benchmarks.compression

bench-checkpoint: .venv/rung
	$(BIN)/python -m benchmarks.saving
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.recovery

# 200 faults at random moments over seven strategies, and 50 kills in the middle of saves: a quarter of an hour.
chaos: export OMP_NUM_THREADS = 1
chaos: .venv/dev
	$(BIN)/python -m tests.faults.chaos --faults 200 --out benchmarks/results/chaos.json
	$(BIN)/pytest -s -q tests/faults/test_saving.py

clean:
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
