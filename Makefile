# The two commands of the README, and what developers use beside them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo system test test-all lint docs ladder bench bench-gpu bench-images bench-bubble bench-checkpoint bench-compression bench-strategies bench-faults bench-endurance bench-load chaos clean

# Modules are compiled when they are first imported, and kept: pip would take minutes to compile all of them, and without
# keeping them every process of a test would compile its own.
INSTALL := $(BIN)/pip install --quiet --no-compile --editable
unexport PYTHONDONTWRITEBYTECODE

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/rung: pyproject.toml | .venv/pyvenv.cfg
	$(INSTALL) ".[examples]"
	touch $@

# In as few calls as pip can decide on: it takes a minute for each, and does not remember versions.
.venv/dev: pyproject.toml | .venv/pyvenv.cfg
	$(INSTALL) ".[dev,examples,models]"
	$(INSTALL) ".[store-tests]"
	touch .venv/rung $@

.venv/bench: .venv/rung
	$(INSTALL) ".[bench,examples]"
	touch $@

.venv/docs: .venv/rung
	$(INSTALL) ".[docs,examples]"
	touch $@

demo: .venv/rung
	$(BIN)/rung train examples/babycnn/task.py --strategy ddp --nproc 2
	$(BIN)/rung compare examples/babycnn/task.py --nproc 2 --out runs/demo.html \
		--strategies single ddp zero1 zero2 zero3 tp2

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What the tests take from the system: a browser for the page of `rung compare`, a Slurm for `rung submit slurm`. Where
# it cannot be installed, pytest says what it leaves out.
system: export DEBIAN_FRONTEND = noninteractive
system:
	@run() { if [ "$$(id -u)" = 0 ]; then "$$@"; else sudo -n "$$@"; fi; }; \
	has() { PATH="$$PATH:/usr/sbin:/sbin" command -v "$$1" > /dev/null; }; \
	get() { run apt-get install -y -qq --no-install-recommends "$$@"; }; \
	need() { \
		echo "installing $$*"; \
		get "$$@" > /dev/null 2>&1 || { run apt-get update -qq && get "$$@" > /dev/null; } || \
		echo "$$* could not be installed: tests that need it are left out"; }; \
	has chromium || has google-chrome || need chromium fonts-liberation; \
	{ has slurmctld && has slurmd && has munged; } || need slurm-wlm munge

# Ranks of a test are many and small: a thread each.
test test-all: export OMP_NUM_THREADS = 1
# In the order of the files: those with few tests, which take long, would otherwise come last and let one core wait.
# Three at a time on two cores: many tests wait, for a scheduler, a timeout or a rank that was stopped.
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder --durations 20

test: lint system
	$(BIN)/pytest $(SPREAD) -m "not slow and not gpu"

test-all: lint system .venv/docs
	$(BIN)/pytest $(SPREAD)

# The site, in site/: open site/index.html. A link that leads nowhere, or a page that no other names, is an error.
docs: .venv/docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs -d build/docs . site
	@echo "site/index.html"

# The figures of docs/ladder.md, measured again on this machine, which should have nothing else to do; needs root.
ladder: .venv/rung
	$(BIN)/python -m benchmarks.ladder

bench: .venv/bench
	$(BIN)/python -m benchmarks.speed --device cpu

bench-gpu: .venv/bench
	$(BIN)/python -m benchmarks.speed --device cuda

# torchvision's models, which the tests need, too.
bench-images: .venv/dev
	$(BIN)/python -m benchmarks.imagenet --device cuda

bench-bubble: .venv/rung
	$(BIN)/python -m benchmarks.bubble

# Makes network namespaces, so it needs root: half an hour.
bench-compression: .venv/rung
	$(BIN)/python -m benchmarks.compression

# The tables of docs/strategies.md, measured again on this machine, which should have nothing else to do: half an hour.
bench-strategies: .venv/rung
	$(BIN)/python -m benchmarks.strategies

bench-checkpoint: .venv/rung
	$(BIN)/python -m benchmarks.saving
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.recovery

# Beside torchrun, with ranks that are killed: half an hour on an idle machine.
bench-faults: .venv/rung
	$(BIN)/python -m benchmarks.faults

# 100,000 steps under each of four strategies: an hour on an idle machine.
bench-endurance: .venv/rung
	$(BIN)/python -m benchmarks.endurance

# Many ranks, checkpoints, lines, parameters, samples; makes network namespaces, so it needs root.
bench-load: .venv/rung
	$(BIN)/python -m benchmarks.load

# 1,000 faults over every strategy, and 50 kills in the middle of saves: about an hour on a machine with nothing else to
# do. As root with gcc, or some kinds are left out, which it says.
chaos: export OMP_NUM_THREADS = 1
chaos: .venv/dev
	$(BIN)/python -m tests.faults.chaos --faults 1000 --out benchmarks/results/chaos.json
	$(BIN)/pytest -s -q tests/faults/test_saving.py

clean:
	rm -rf .venv runs build dist site .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
