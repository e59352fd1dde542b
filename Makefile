# Everything a newcomer needs: `make serve` and `make test`. Both set up what is missing and answer in
# seconds the second time.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.kvyard-installed

PORT   ?=
HOST   ?=
SOCKET ?=
ARGS   ?=
WORKERS ?= 5

SERVE_FLAGS := $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST)) $(if $(SOCKET),--socket $(SOCKET)) $(ARGS)

.PHONY: help venv serve test test-slow mutants check format install clean gpu-check kernels-check bench-core

help:
	@echo "make serve   set up, fetch the default model, serve it in the foreground (PORT= HOST= SOCKET= ARGS=)"
	@echo "make test    set up, run all checks and tests"
	@echo "make venv    the virtual environment alone, empty, for a torch of your choice to be installed first"
	@echo "make install set up, and nothing else"
	@echo "make check   formatter, linter, types, import rules"
	@echo "make test-slow  the long proofs, whole"
	@echo "make mutants  put faults into copies of the code; the tests that name them have to fail"
	@echo "make bench-core  what the engine does between two model steps, against its limits"
	@echo "make kernels-check  compile all kernels for sm_80, sm_90, sm_100 and gfx942; needs no GPU"
	@echo "make gpu-check  kernels, tokens and speed on this machine's GPU, from the source tree, with PYTHON's"
	@echo "             torch and triton; installs nothing (ARGS=--dry, ARGS='--model FILE', ARGS=--help)"

venv: $(VENV)/bin/python

install: $(STAMP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvyard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python could not make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/pip install --quiet --upgrade 'pip>=25.1'

$(STAMP): pyproject.toml $(VENV)/bin/python
	@echo "installing kvyard and its dependencies into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --editable . --group dev
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/kvyard serve $(SERVE_FLAGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The formatter and the linter first, which take a moment; types and imports, which keep one core busy, are checked
# beside the tests. Collecting once, and starting one daemon, lets all workers find the test modules, the CPU's kernels
# and the model's weights prepared, which each would do for itself; bytecode is written wherever that is not usual.
# Many tests wait more than they work, so $(WORKERS) share two cores, those of the daemon first; what measures the
# machine runs by itself afterwards, from the files that have such tests.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/kvyard model pull smollm2-135m
	@log=$$(mktemp); ($(BIN)/mypy && $(BIN)/lint-imports --no-cache) >$$log 2>&1 & types=$$!; \
	$(BIN)/pytest --collect-only -qq >/dev/null; $(BIN)/pytest tests/e2e/test_openai.py -k test_models >/dev/null; \
	OMP_NUM_THREADS=1 KVYARD_TEST_TIME_FACTOR=4 $(BIN)/pytest -m "not alone" --timeout 300 \
	  --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30; tests=$$?; \
	wait $$types; checked=$$?; cat $$log; rm -f $$log; exit $$((tests + checked))
	$(BIN)/pytest -m alone $$(grep -rlE 'mark\.alone' tests --include='test_*.py')

test-slow: $(STAMP)
	$(BIN)/pytest --run-slow

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

kernels-check: $(STAMP)
	env -u TRITON_INTERPRET $(BIN)/python -m kvyard_kernels.compile $(ARGS)

# For a machine that is only lent: it has torch and triton, and gets nothing but this source tree.
gpu-check:
	PYTHONPATH=daemon:kernels:$$PYTHONPATH $(PYTHON) -m kvyard.engine.gpu_check $(ARGS)

bench-core: $(STAMP)
	$(BIN)/python bench/core.py $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
