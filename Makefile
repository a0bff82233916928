# One command each: setup, demo, serve, test, lint, bench. Everything installs first when it must.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= configs/pipeline.yaml
# Address of PyTorch's own index of CPU wheels, where pip's default index does not offer torch's +cpu build.
TORCH_INDEX ?=
BIN := .venv/bin
STAMP := .venv/.installed
# Errors only: pip names every place it looks at otherwise.
PIP_FLAGS := --quiet --quiet --no-input
PYTEST := $(BIN)/python -m pytest

# Ray starts workers at nice 15, where engines lose against anything else that runs on the machine.
export RAY_worker_niceness := 0
export RAY_USAGE_STATS_ENABLED := 0
# Serve's HTTP proxy gets answers over gRPC, as the ingress does: half the CPU time a request.
export RAY_SERVE_PROXY_USE_GRPC := 1
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH := 1073741824
# Keeps the ports of a local Ray on loopback; the name tells on which systems that is Ray's default.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER := 0

.PHONY: help setup demo serve check test test-fault test-parity lint bench lock docs clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## install the CPU set-up into .venv

$(STAMP): pyproject.toml requirements-cpu.lock
	@command -v "$(PYTHON)" > /dev/null || { echo "Python 3.11 is needed; name it with PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@echo "installing the pinned packages (about 4 GB, minutes)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) $(addprefix --extra-index-url ,$(TORCH_INDEX)) -r requirements-cpu.lock || { \
	  echo "pip failed. If it found no torch +cpu wheel: run 'make setup TORCH_INDEX=URL' with the address of PyTorch's" >&2; \
	  echo "own index of CPU wheels, which pytorch's installation page shows for the choice pip / CPU." >&2; exit 1; }
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	@touch $@

check: $(STAMP) ## judge a configuration: make check CONFIG=FILE
	$(BIN)/python -m configs.check $(CONFIG)

demo: check ## start the pipeline, send it a picture, show what each stage did, stop it
	$(BIN)/python -m serving.demo --config $(CONFIG)

serve: check ## serve CONFIG until Ctrl-C
	env -u RAY_ADDRESS $(BIN)/serve run $(CONFIG)

test: $(STAMP) ## all tests but the fault tests; each kind in a process of its own, so that no engine outlives its tests
	$(PYTEST) tests/unit
	$(PYTEST) tests/engine
	$(PYTEST) -m "not raw_vllm" tests/pipeline

test-fault: $(STAMP) ## kills, stalls and disconnects on real processes; minutes each
	$(PYTEST) tests/fault

test-parity: $(STAMP) ## every route and feature against vLLM's own server with one engine; minutes, not in CI
	$(PYTEST) tests/parity

lint: $(STAMP) ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q tests/unit/test_import_rules.py

bench: $(STAMP) ## the benchmarks; options with ARGS=...
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: $(STAMP) ## write the generated reference
	$(BIN)/python -m configs.document > docs/configuration.md

lock: $(STAMP) ## pin what .venv holds now
	head -2 requirements-cpu.lock > .venv/lock
	$(BIN)/python -m pip freeze --exclude-editable >> .venv/lock
	mv .venv/lock requirements-cpu.lock

clean: ## remove caches and build outputs, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
