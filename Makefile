# `make help` lists what there is. Everything sets up .venv by itself; a second time that costs nothing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup compile engines test check check-unit lint test-long demo bench docs wheel clean

PY := .venv/bin/python
ENGINE ?= llamacpp
# More for pytest: make test ARGS='-k reload -x'
ARGS ?=
# Files of tests that run at the same time; JOBS=0 runs them in this process, for a debugger.
JOBS ?= 2

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */make \1\t/' | expand -t 20

setup:  ## make .venv with everything that is needed
	@bin/setup

compile: setup  ## the request path as extension modules, until a source changes: less CPU, never needed
	@$(PY) -m bin.compiled

test: check  ## everything a change must pass: format, lint, types, imports, all tests

check: lint engines  ## the same as `make test`
	@$(PY) -m bin.compiled --optional
	@echo "== tests of what is compiled, in that form"
	@$(PY) -m pytest -q -n $(JOBS) -o pythonpath="$$($(PY) -m bin.compiled.form) ." tests/unit/gateway tests/unit/shm tests/property
	@echo "== tests"
	@$(PY) -m pytest -m "not long" -n $(JOBS) --dist loadfile $(ARGS)

lint: setup  ## format, lint, types, import rules; no tests
	@echo "== format" && $(PY) -m ruff format --check --quiet . || { echo "run: .venv/bin/ruff format ."; exit 1; }
	@echo "== lint" && $(PY) -m ruff check --quiet .
	@echo "== types" && $(PY) -m mypy --no-error-summary
	@echo "== import rules" && .venv/bin/lint-imports --no-logo >.cache/imports.log || { cat .cache/imports.log; exit 1; }

check-unit: setup  ## the inner loop: unit tests alone
	@$(PY) -m pytest -q -x tests/unit $(ARGS)

test-long: setup  ## the tests that take minutes
	@$(PY) -m bin.compiled --optional
	@$(PY) -m bin.engines llamacpp vllm
	@$(PY) -m pytest -m long $(ARGS)

engines: setup  ## llama.cpp with a tiny and a small real model, into .cache (0.7 GB)
	@$(PY) -m bin.engines llamacpp gemma

demo: setup  ## a gateway in front of a real model (ENGINE=llamacpp) or of simulated engines (ENGINE=sim)
	@$(PY) -m bin.compiled || true
	@exec $(PY) -m bin.engines.demo --engine $(ENGINE) $(ARGS)

bench: setup  ## what a request and an event cost
	@$(PY) -m bin.compiled || true
	@$(PY) -m bench.run $(ARGS)

docs: setup  ## make the generated pages of docs/ anew
	@$(PY) -m conf.reference >docs/configuration.md
	@$(PY) -m coordinator.admin.reference >docs/metrics.md
	@$(PY) -m coordinator.ctl.reference >docs/ctl.md

wheel: setup  ## build dist/llmgw-*.whl
	@$(PY) -m pip wheel -q --no-deps --wheel-dir dist .

clean:  ## remove what was made, .venv and .cache included
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
