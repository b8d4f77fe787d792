# Set-up and checks of Meshverse. Everything is made inside this folder: .venv/, build/, dist/.
# A fresh machine needs Python 3.10+ with venv, a C++17 compiler and access to PyPI, nothing else.

TORCH  ?= 2.13.0
PYTHON ?= python3
ARGS   ?=
FUZZ_SECONDS ?= 300
MINUTES ?= 60
REPOSITORY ?=

# What pip installs for TORCH=newest and TORCH=nightly; each time anew, as it changes.
TORCH_newest  := --upgrade torch
TORCH_nightly := --upgrade --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu

VENV  := .venv/torch-$(TORCH)
TOOLS := .venv/tools
PIP   := -m pip --quiet --disable-pip-version-check
LINTED_PYTHON := $(wildcard python tests benchmarks examples tools docs/conf.py)
LINTED_CPP    := $(shell find csrc -name '*.h' -o -name '*.cpp')
# Folders count as sources too: their time changes when a file in them is removed.
SOURCES := pyproject.toml CMakeLists.txt \
           $(shell find csrc python -name __pycache__ -prune -o -not -name '*.so' -print)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help test test-all test-long soak coverage families demo docs bench lint format typecheck sanitize fuzz wheel dist develop hooks gpu gpubench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  TORCH=$(TORCH) (or newest, nightly) PYTHON=$(PYTHON) ARGS=... (for pytest, the demo, the benchmarks)'

# Whole files to one worker, so that what costs seconds to set up is set up once. Three workers keep
# two cores busy: ranks that wait for each other, or for a timeout, leave a core to other tests. Five
# workers were no faster in the long tests.
PYTEST_ARGS := -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
PYTEST := $(VENV)/bin/python $(PYTEST_ARGS)

# Every worker and rank imports the tests' modules: the first one keeps what it compiles for the
# others, also where the environment says that Python shall keep nothing.
test test-all test-long: export PYTHONDONTWRITEBYTECODE :=

# Else each of the three workers computes on both cores, and waits for the others' threads.
test test-all test-long coverage: export OMP_NUM_THREADS := 1

# These tests are of jobs on CPUs. With a GPU, torch gives the meshes of a gloo job NCCL groups, too,
# and NCCL takes one rank for each: that is what `make gpu` tests.
test test-all test-long soak coverage: export CUDA_VISIBLE_DEVICES :=

test: $(VENV)/.wheel $(VENV)/.backend ## run the tests against the built and installed wheel, in minutes
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.wheel $(VENV)/.backend ## run these and the long ones
	$(PYTEST) -m 'not sweep' $(ARGS)

test-long: $(VENV)/.wheel $(VENV)/.backend ## run the long ones only: what test-all adds to test
	$(PYTEST) -m 'long and not sweep' $(ARGS)

soak: $(VENV)/.wheel $(VENV)/.backend ## repeat tests of processes and threads with random pauses, beside busy processes, for MINUTES=60
	$(VENV)/bin/python tools/soak.py $(MINUTES) $(ARGS)

coverage: $(VENV)/.wheel $(VENV)/.coverage $(VENV)/.backend ## say which lines of the package the short tier runs; ARGS="-m 'not sweep'" for both tiers
	@rm -rf build/coverage && mkdir -p build/coverage
	$(VENV)/bin/python -m coverage run $(PYTEST_ARGS) $(ARGS)
	$(VENV)/bin/python -m coverage combine --quiet
	$(VENV)/bin/python -m coverage report

families: export MESHVERSE_WRITE_TABLES := 1
families: $(VENV)/.wheel $(VENV)/.backend ## run what test-all leaves out, every model family and combination; write the tables of docs/huggingface_families.md
	$(VENV)/bin/python -m pytest -m sweep $(ARGS)

# The demo runs without NumPy, which torch remarks on in every process.
demo: export PYTHONWARNINGS := ignore:Failed to initialize NumPy
demo: $(VENV)/.wheel $(VENV)/.demo ## show what Meshverse does, and that it is right
	$(VENV)/bin/python examples/demo.py $(ARGS)

docs: $(VENV)/.wheel $(VENV)/.docs ## build the documentation site into build/docs
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html -d build/doctrees docs build/docs $(ARGS)
	@echo 'Open build/docs/index.html'

bench: $(VENV)/.wheel $(VENV)/.bench ## measure against stock torch, an hour on two cores; ARGS=--quick for a short form, a quarter of one or more
	$(VENV)/bin/python benchmarks/run.py $(ARGS)

lint: $(TOOLS)/.tools ## check style, format, imports, words and tests of Python, style and format of C++
	$(TOOLS)/bin/ruff check $(LINTED_PYTHON)
	$(TOOLS)/bin/ruff format --check $(LINTED_PYTHON)
	@git ls-files -z '*.py' '*.pyi' '*.h' '*.hpp' '*.cpp' '*.md' ':!CHANGELOG.md' | xargs -0 $(TOOLS)/bin/python tools/check_words.py
	@git ls-files -z 'tests/*.py' 'examples/*.py' ':!tests/helpers/test_rules_of_tests.py' | xargs -0 $(TOOLS)/bin/python tools/check_tests.py
	PYTHONPATH=python $(TOOLS)/bin/lint-imports --no-cache
	$(TOOLS)/bin/clang-format --dry-run -Werror $(LINTED_CPP)

format: $(TOOLS)/.tools ## rewrite Python and C++ in the house format
	$(TOOLS)/bin/ruff check --fix-only --quiet $(LINTED_PYTHON)
	$(TOOLS)/bin/ruff format $(LINTED_PYTHON)
	$(TOOLS)/bin/clang-format -i $(LINTED_CPP)

typecheck: $(VENV)/.wheel $(VENV)/.typecheck ## mypy --strict, and the stub against the compiled core
	$(VENV)/bin/python -m mypy
	@# Only the stub: stubtest keeps no cache, and would read all that the package imports once more.
	rm -rf build/stubs && mkdir -p build/stubs/meshverse && touch build/stubs/meshverse/__init__.pyi
	cp python/meshverse/_core.pyi build/stubs/meshverse
	MYPYPATH=build/stubs $(VENV)/bin/python -m mypy.stubtest meshverse._core

sanitize: export PATH := $(CURDIR)/$(TOOLS)/bin:$(PATH)
sanitize: $(TOOLS)/.tools ## run the C++ tests under address and undefined-behavior sanitizers
	cmake -S . -B build/sanitize -G Ninja -DMESHVERSE_SANITIZE=ON -DMESHVERSE_PYTHON=OFF
	cmake --build build/sanitize
	ctest --test-dir build/sanitize --output-on-failure --no-tests=error

# On a machine with a GPU and a torch of its own: nothing is installed, nothing comes from a network.
# Gloo's own choice of a network needs a host name that resolves.
gpu gpubench: export PYTHONPATH := $(CURDIR)/build/gpu
gpu gpubench: export GLOO_SOCKET_IFNAME ?= lo
gpu: ## run the tests that need a GPU, built from source beside the torch that PYTHON has; ARGS="-m gpu" for the long ones too
	$(PYTHON) tools/build_beside_torch.py build/gpu
	$(PYTHON) -m pytest tests/gpu -m 'gpu and not long' $(ARGS)

gpubench: ## measure NCCL communicators in the same way; results in benchmarks/results
	$(PYTHON) tools/build_beside_torch.py build/gpu
	$(PYTHON) benchmarks/run.py gpu $(ARGS)

fuzz: $(VENV)/.wheel $(VENV)/.test $(TOOLS)/.tools ## search for inputs that break a law, FUZZ_SECONDS=300 for the core and as long for meshes
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" tools/fuzz_core $(FUZZ_SECONDS)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(VENV)/bin/python -m pytest tests/device_mesh/test_programs.py -m '' --timeout=0 -p no:cacheprovider $(ARGS)

wheel: dist/.wheel ## build the wheel into dist/
	@ls dist/*.whl

dist: export REPOSITORY := $(REPOSITORY)
dist: $(TOOLS)/.dist ## build and check what is published, in dist/release: the sdist, and a wheel for every Python there is; REPOSITORY=https://HOST/OWNER/NAME for its links
	$(TOOLS)/bin/python tools/make_dist.py

develop: $(VENV)/.test $(VENV)/.build ## install in place instead: Python edits need no rebuild, C++ edits a small one
	$(VENV)/bin/python $(PIP) install --no-deps --no-build-isolation -Cbuild-dir=build/develop --editable .
	@rm -f $(VENV)/.wheel
	@touch $(VENV)/.develop
	@echo 'Now run $(VENV)/bin/python -m pytest; make test goes back to the wheel.'

hooks: $(TOOLS)/.tools ## check each commit with pre-commit
	$(TOOLS)/bin/pre-commit install

clean: ## remove what was built, keep the environments
	rm -rf build dist .venv/*/.backend docs/results .mypy_cache .ruff_cache .pytest_cache .hypothesis

distclean: clean ## remove the environments too
	rm -rf .venv

# --- environments: a stamp each, so that a second call redoes only what changed -------------------

.venv/%/bin/python:
	$(PYTHON) -m venv .venv/$*
	$@ $(PIP) install --upgrade 'pip>=25.1'

$(TOOLS)/.tools: pyproject.toml | $(TOOLS)/bin/python
	$(TOOLS)/bin/python $(PIP) install --group tools
	@touch $@

$(TOOLS)/.dist: pyproject.toml | $(TOOLS)/bin/python
	$(TOOLS)/bin/python $(PIP) install --group dist
	@touch $@

$(VENV)/.torch: | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP) install $(or $(TORCH_$(TORCH)),torch==$(TORCH))
	@touch $@

ifneq ($(TORCH_$(TORCH)),)
.PHONY: $(VENV)/.torch
endif

$(VENV)/.coverage $(VENV)/.demo $(VENV)/.docs $(VENV)/.test $(VENV)/.bench $(VENV)/.typecheck $(VENV)/.build: $(VENV)/.%: pyproject.toml $(VENV)/.torch
	$(VENV)/bin/python $(PIP) install --group $*
	@touch $@

# Compiled before the tests: in one of them, a busy machine's compiler could take longer than a test may.
$(VENV)/.backend: $(wildcard tests/backends/*) tests/helpers/via_store.py $(VENV)/.test
	PYTHONPATH=tests $(VENV)/bin/python -m helpers.via_store build/backends
	@touch $@

# The wheel does not depend on torch's version: one is built, and installed beside each torch.
dist/.wheel: $(SOURCES) | $(VENV)/bin/python
	rm -f dist/*.whl
	$(VENV)/bin/python $(PIP) wheel --no-deps --wheel-dir dist .
	@touch $@

$(VENV)/.wheel: dist/.wheel $(VENV)/.torch
	@! test -f $(VENV)/.develop || echo 'The wheel takes the place of what make develop installed; make develop goes back to it.'
	@rm -f $(VENV)/.develop
	$(VENV)/bin/python $(PIP) install --no-deps --force-reinstall dist/*.whl
	@touch $@
