# make demo       a real model answers a prompt, through the ops and without them
# make test       set-up, lint, build and all quick tests; PARTS="cpu models" runs some only
# make test-long  sanitizers, static analysis and the slow tests
# make build      the C++ side, in place      make clean      remove what was built
# make format     rewrite the sources         make lint       only say what is wrong with them
#
# Everything starts from a bare machine: scripts/bootstrap.py makes .venv, or says what is missing.

PYTHON ?= python3
BIN := .venv/bin
CPP := $(shell find csrc -name '*.h' -o -name '*.hpp' -o -name '*.cc' -o -name '*.cpp')

export HF_HUB_OFFLINE := 1
export FASTTPS_TRANSFORMERS_5_12 := $(CURDIR)/.cache/transformers-5.12.1
export FASTTPS_TRANSFORMERS_4_57 := $(CURDIR)/.cache/transformers-4.57.6
# Of the shell that called; the environment must not depend on it.
unexport PYTHONPATH

.DEFAULT_GOAL := build
.PHONY: setup build demo test test-long format lint clean

setup:
	@$(PYTHON) scripts/bootstrap.py

build: setup
	@$(BIN)/python scripts/build.py

demo: build
	@$(BIN)/fasttps demo

test:
	@$(PYTHON) scripts/test.py $(PARTS)

test-long:
	@$(PYTHON) scripts/test.py --long $(PARTS)

format: setup
	$(BIN)/ruff check --quiet --fix-only
	$(BIN)/ruff format --quiet
	$(BIN)/clang-format -i $(CPP)

lint: setup
	@$(PYTHON) scripts/test.py lint
	@$(BIN)/python -m mypy

clean:
	rm -rf build dist python/*.egg-info
	rm -rf python/fasttps/_C*.so python/fasttps/lib python/fasttps/include python/fasttps/share
