VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter that is new enough; PYTHON=/path/to/python on the command line goes before.
PYTHON ?= $(shell for name in python3.12 python3.13 python3.14 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$name && break; done)

.PHONY: help env quickstart test-fast test test-all wheel docs notebooks lint lines format clean reproduce study study-smoke

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

env: $(STAMP)  ## make .venv with the versions of constraints.txt, unless it is up to date

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { \
	echo "No Python >= 3.12 was found (looked for python3.12, python3.13, python3.14, python3, python)." >&2; \
	echo "Install one, for example with 'pyenv install 3.12' or 'uv python install 3.12', or name it:" >&2; \
	echo "make $(or $(MAKECMDGOALS),env) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing JAX and what else is needed: a few minutes the first time"
	$(BIN)/python -m pip install --editable '.[test,dev]' --constraint constraints.txt
	@touch $@

quickstart: env  ## train the tiny base that ships with the package, on the CPU
	JAX_PLATFORMS=cpu $(BIN)/qerl train configs/quickstart.toml

# Options of scripts/reproduce.py in ARGS, such as ARGS="--plan-only --device H100".
MODEL ?= 7b
reproduce: env  ## QeRL's GSM8K experiment on one card, from download to table: MODEL=3b, 7b, 14b or 32b
	@if command -v nvidia-smi > /dev/null; then $(MAKE) --no-print-directory $(VENV)/.cuda; fi
	$(BIN)/python -m scripts.reproduce $(MODEL) $(ARGS)

# Tests of one file share compiled programs, so a worker takes whole files.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Arithmetic, text and files, and one whole run: what an editor waits for. The run comes first, as the longest.
FAST := tests/test_tiny_run.py::test_completions_are_logged_with_their_rewards_and_what_rewards_log \
	tests/test_layering.py tests/qerl_jax/config/test_sections.py tests/qerl_jax/system/test_files.py \
	$(addprefix tests/pallas_kernels/test_, nvfp4.py mxfp4.py nf4.py rounding.py runtime.py) \
	$(addprefix tests/qerl_jax/checkpoint/test_, safetensors.py packed_formats.py) \
	$(addprefix tests/qerl_jax/data/test_, answers.py datasets.py) \
	tests/qerl_jax/evaluation/test_intervals.py \
	$(addprefix tests/qerl_jax/generation/test_, page_pool.py scheduler.py stop_strings.py) \
	tests/qerl_jax/model/test_kv_cache.py \
	$(addprefix tests/qerl_jax/rewards/test_, scoring.py stock.py) \
	$(addprefix tests/qerl_jax/rl/test_, aqn.py grpo.py masked.py microbatches.py) \
	tests/qerl_jax/tracking

test-fast: env  ## run the quick tests, in less than a minute
	$(PYTEST) -m 'not process' $(FAST)

test: env  ## run the tests, without those marked slow
	$(PYTEST)

test-all: env  ## run the slow tests too
	$(PYTEST) --runslow

# BASE is a GGUF file or folder of that model; options of scripts/gsm8k_study.py in ARGS, such as ARGS="--stage 0 1 --cards 2".
study: env  ## the study on a real Qwen2.5 (docs/results.md), as far as it is not done: MODEL=1.5b BASE=file.gguf
	@test -n "$(BASE)" || { echo "Name the weights: make study MODEL=1.5b BASE=file.gguf" >&2; exit 1; }
	@if command -v nvidia-smi > /dev/null; then $(MAKE) --no-print-directory $(VENV)/.cuda; fi
	$(BIN)/python -m scripts.gsm8k_study $(BASE) --out runs/study-$(MODEL) --work runs/study-$(MODEL)-work $(ARGS)

study-smoke: env  ## two steps of an arm of the study (docs/results.md), on the tiny base
	$(BIN)/python -m pytest -n 0 --runslow tests/test_study.py -k its_metrics

wheel: env  ## build the wheel into dist/, install it elsewhere, and run the quickstart from it
	$(BIN)/python -m scripts.check_wheel --keep dist

docs: $(VENV)/.docs  ## run the examples of docs/, and build the site into build/site; a link that leads nowhere fails
	$(BIN)/python -m scripts.make_reference --check
	$(BIN)/python -m pytest -q -n 0 --runslow tests/test_doc_examples.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site in build/site/index.html"

notebooks: $(VENV)/.notebooks  ## run the notebooks from top to bottom on the CPU: some five minutes
	JAX_PLATFORMS=cpu $(BIN)/python -m scripts.run_notebooks

$(VENV)/.docs $(VENV)/.notebooks $(VENV)/.cuda: $(VENV)/.%: pyproject.toml constraints.txt | $(STAMP)
	@echo "Installing the packages of .[$*]$(if $(filter cuda,$*),: CUDA has several gigabytes)"
	$(BIN)/python -m pip install --editable '.[$*]' --constraint constraints.txt
	@touch $@

lint: env  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m mypy

lines: env  ## count the lines of Python of each tree, beside the budget
	$(BIN)/python -m tests.test_budget

format: env  ## mend what the formatter and the linter can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove caches and build products; runs/ and .venv stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache ./*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
