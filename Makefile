# `make demo` and `make test` on a machine that has Python 3.11, g++ and make: everything else comes into .venv and build/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/demo
# Processes that run the tests; each takes up to 4 GB. 0: in the process itself, so that pytest -s and --pdb work.
JOBS ?= 2

# A file is rebuilt when one of these changes. PLUGIN_SOURCES and PYTHON_SOURCES are what the installed package is made of.
PLUGIN_SOURCES := $(shell find plugins -type f -not -name '*.pyc')
PYTHON_SOURCES := $(shell find export -type f -not -name '*.pyc')
CXX_SOURCES := $(shell find benchmarks plugins tests -type f \( -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

.PHONY: help install demo test lint unit browser format clean families docs accuracy budget traffic mapping-benchmark gpu-check

help:
	@echo "make demo     install into .venv, build the plugin library, take a DeepSeek-V3-architecture model to an engine"
	@echo "make test     install what is missing, lint, type-check and run the tests"
	@echo "make families each MoE family through every step, into docs/families.md; takes minutes"
	@echo "make docs     docs/operator.md, from the operators' definition"
	@echo "make accuracy the kernel's error against float64, beside eager PyTorch's and a bf16 sum's"
	@echo "make budget   what each kernel takes of a multiprocessor, read from its machine code"
	@echo "make traffic  the bytes a tail must move; ARGS='--model gpt-oss --tokens 64 --bandwidth 4.8'"
	@echo "make mapping-benchmark  time and memory of 'moetrt map' for models of 94 and 61 layers"
	@echo "make gpu-check on an NVIDIA GPU: the tests that need one, then times, into benchmarks/results"
	@echo "make install  only install into .venv and build the plugin library"
	@echo "make lint     ruff, mypy and clang-format, changing nothing"
	@echo "make unit     the tests alone; ARGS='-k name' chooses"
	@echo "make browser  see to it that there is a Chromium, in which the report's page is tested"
	@echo "make format   let ruff and clang-format rewrite the sources"
	@echo "make clean    remove .venv, build and out"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("moetrt needs Python 3.11 or later; this is " + sys.version.split()[0] + " (set PYTHON=...)" if sys.version_info < (3, 11) else 0)'
	@command -v g++ >/dev/null || { echo "moetrt needs g++ to build its plugin library (Debian: apt-get install g++)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The packages: everything that pyproject.toml names, at the versions of constraints.txt.
$(VENV)/.packages: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing packages into $(VENV) (torch is the large one)"
	@$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python .ci/requirements.py | xargs -d '\n' $(BIN)/pip install --quiet --constraint constraints.txt
	@touch $@

# The package itself, as a user gets it: a normal install, built by CMake with its objects cached under build/.
$(VENV)/.installed: $(VENV)/.packages $(PLUGIN_SOURCES) $(PYTHON_SOURCES) README.md LICENSE
	@echo "Building the plugin library and installing moetrt"
	@$(BIN)/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

install: $(VENV)/.installed

demo: install
	@$(BIN)/moetrt demo -o $(OUT)

lint: $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

# The tests look at the report's page in Chromium: Debian's package, which this installs as root.
browser:
	@.ci/browser

# A process a core, files whole, so that what a file's tests share is made once; tests/conftest.py orders them.
unit: install browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test: lint unit

families: install
	@$(BIN)/moetrt families --page docs/families.md $(ARGS)

docs: install
	@$(BIN)/python -m moetrt.operator_page docs/operator.md

accuracy: install
	@$(BIN)/python -m benchmarks.accuracy $(ARGS)

budget: install
	@$(BIN)/python -m benchmarks.budget $(ARGS)

traffic: install
	@$(BIN)/python -m benchmarks.traffic $(ARGS)

mapping-benchmark: install
	@$(BIN)/python -m benchmarks.mapping $(ARGS)

gpu-check: install
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

format: $(VENV)/.packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf $(VENV) build out
