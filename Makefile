# `make parity` and `make test` need Python 3.11 or later, git and make; they build .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORLD_SIZE ?= 2
FAULTS ?= 200
# Many tests wait for processes that they start: two processors have time for a third worker.
WORKERS ?= 3

.PHONY: parity test slow slow-list exhaustive jax-defaults gpu gpu-tests gpu-jax gpu-parity gpu-bench check docs spec mutate where format clean
.DEFAULT_GOAL := help

help:
	@echo "make parity   train a GPT in torch and in JAX, sharded, and say whether they agree (WORLD_SIZE=$(WORLD_SIZE))"
	@echo "make test     the test suite without slow tests, in $(WORKERS) processes"
	@echo "make slow     the slow tests, which tests/slow.txt lists; make slow-list measures them"
	@echo "make exhaustive   the whole suite with every combination: hours"
	@echo "make jax-defaults   tests/on_jax without jax_enable_x64 and with XLA's default flags, in $(WORKERS) processes"
	@echo "make gpu      tests, parity and benchmarks on a GPU, with the packages of PYTHON; each of its four parts has a target"
	@echo "make check    formatting, lint, types and import rules"
	@echo "make docs     the documentation site, in site/"
	@echo "make spec     every rule of sharding against torch, the reference and closed forms, all cases"
	@echo "make mutate   put $(FAULTS) small faults into the core, and see which of them no test sees"
	@echo "make where    the files, functions and rules about WORD=, such as WORD=padding or WORD='freeze|frozen'"
	@echo "make format   format the code"
	@echo "make clean    remove .venv and what was generated"

# torch goes first and by itself: where a CPU build is on offer under that version, nothing else asks for another.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "crossframe needs Python 3.11 or later: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

parity: $(INSTALLED)
	$(BIN)/python -m experiments parity gpt --world-size $(WORLD_SIZE)
	$(BIN)/python -m experiments goldens --parity

# Ranks and commands are hundreds of processes: without bytecode on disk each would compile the project again.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --slow without

slow: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --slow only

slow-list: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -p tests.cpu_time

exhaustive: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --exhaustive

jax-defaults: $(INSTALLED)
	CROSSFRAME_TESTS_OF_JAX_DEFAULTS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal tests/on_jax

# A machine with a GPU has its own builds of torch and JAX: nothing is installed. Each part takes less than 10 minutes.
gpu: gpu-tests gpu-jax gpu-parity gpu-bench

gpu-tests:
	$(PYTHON) -m pytest -q -m gpu tests/on_torch
	CROSSFRAME_TESTS_DEVICE=cuda $(PYTHON) -m pytest -q -n $(WORKERS) tests/on_torch/fsdp1/test_scripts.py tests/on_torch/fsdp2/test_scripts.py

# On GPUs, what needs no more devices than there are; then all of it on the CPU, with the JAX of that machine.
gpu-jax:
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal tests/on_jax
	JAX_PLATFORMS=cpu $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal tests/on_jax

gpu-parity:
	$(PYTHON) -m experiments parity gpt --device cuda --world-size 1

gpu-bench:
	$(PYTHON) -m experiments bench torch --section gpu --section host --output runs/gpu.md --json runs/gpu.json

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/core/test_imports.py

spec: $(INSTALLED)
	$(BIN)/python -m experiments spec

mutate: $(INSTALLED)
	$(BIN)/python -m tests.mutate --sample $(FAULTS) --seed 1

# The first line of a module or of a name's docstring that has the word, the rules, and the map of folders.
SOURCES := 'crossframe/*.py' 'torch_backend/*.py' 'jax_backend/*.py' 'experiments/*.py' ':(glob)tests/*.py' 'tests/**/helpers/*.py'

where:
	@git ls-files -- $(SOURCES) 'tests/*.py' | grep -iE '/[^/]*($(or $(WORD),$(error make where WORD=padding)))[^/]*$$' || true
	@git grep -inE '^(class |def |""").*($(WORD))' -- $(SOURCES) | cut -c1-200 || true
	@grep -inHE '$(WORD)' docs/reference/architecture.md docs/rules.md | cut -c1-200

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis dist

docs: $(INSTALLED)
	$(BIN)/mkdocs build --quiet
	@echo "$(BIN)/python -m http.server -d site shows it on port 8000"
