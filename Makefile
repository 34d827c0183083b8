# SPDX-License-Identifier: Apache-2.0
# Any Python from 3.11 on and a C++ compiler are enough: each target makes the virtual environment it needs.

PYTHON ?= python3
# One JAX version, for instance JAX=0.8.2; otherwise the newest one for this Python.
JAX ?=
VENV ?= .venv$(if $(JAX),-jax$(subst *,x,$(JAX)))
# The suite runs once for each value of GRAFTAX_DIRECT_DISPATCH named here.
DISPATCH ?= 1
# More words for the command behind a target, for instance: make test ARGS='-k cycles'
ARGS ?=

BIN := $(VENV)/bin
# Byte code is left to the imports: pip would compile every module of every package, a minute for the few that run.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
SOURCES := pyproject.toml CMakeLists.txt $(wildcard README.md LICENSE) \
           $(shell find core python -name __pycache__ -prune -o -print)

define suite
@for dispatch in $(DISPATCH); do \
  echo "GRAFTAX_DIRECT_DISPATCH=$$dispatch python $(PYTEST) $(ARGS)"; \
  GRAFTAX_DIRECT_DISPATCH=$$dispatch $(BIN)/python $(PYTEST) $(ARGS) || exit; \
done
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all coverage asan tsan debug fuzz supply soak threads sessions scale mutants names matrix tested ecosystem suites bench docs lint format types stub stub-check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

demo: $(VENV)/.demo ## build, install and train three models on real data
	$(BIN)/python -m graftax demo $(ARGS)

test: PYTEST = -m pytest -n 2 --quick
test: $(VENV)/.test ## a sample of the test suite, on the installed wheel: four minutes on two cores
	$(suite)

test-all: PYTEST = -m pytest -n 2
test-all: $(VENV)/.test ## the whole test suite
	$(suite)

# The lines of Python and of the core that the tests reach; COVER= for those of the whole suite. A static is made without
# the compiler's lock, which has branches that only two threads at one moment take: the interpreter's lock is held there.
COVER ?= --quick
COVERAGE := build/coverage
coverage: $(VENV)/.test $(VENV)/.dev ## how many lines of Python and C++ `make test` reaches
	rm -rf $(COVERAGE)/site $(COVERAGE)/data
	$(PIP) --no-deps --no-build-isolation --target $(COVERAGE)/site -C build-dir=$(COVERAGE)/core \
	  -C cmake.define.GRAFTAX_COVERAGE=ON -C cmake.define.CMAKE_CXX_FLAGS=-fno-threadsafe-statics .
	find $(COVERAGE)/core -name '*.gcda' -delete
	@# A tracer keeps code alive, so a test of what is let go may fail here: what counts is which lines ran.
	-PYTHONPATH=$(CURDIR)/$(COVERAGE)/site COVERAGE_CORE=sysmon $(BIN)/coverage run -m pytest -n 2 $(COVER) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=miss
	$(BIN)/coverage json --quiet -o $(COVERAGE)/python.json
	@# Branches that only an exception takes are none: nearly every call has one. Nor are those of a line without code, as
	@# of a brace: they are the compiler's, of what it destroys there. Nor the test for null in a macro of the interpreter.
	$(BIN)/gcovr --root . --filter core/ --exclude-throw-branches --exclude-unreachable-branches --merge-lines \
	  --exclude-branches-by-pattern '\s*Py_(VISIT|CLEAR|XSETREF)\(' --sort uncovered-number \
	  --txt $(COVERAGE)/core.txt --json $(COVERAGE)/core-lines.json --json-summary $(COVERAGE)/core.json \
	  --print-summary $(COVERAGE)/core

# The core that watches itself, built in a folder of its own, and the tests that walk the most objects; deliberate faults
# have to be found first. WHOLE= runs all cases of the tests, TESTS= says which files, ALSO= is another program with its
# words. ThreadSanitizer gets the tests of threads: it sees when a thread of Python has the interpreter's lock, but not
# what XLA's threads do among themselves (tests/support/tsan.supp), so tests without threads of Python have nothing to show it.
WHOLE ?= --quick
TESTS ?= $(addprefix tests/,$(or $(TESTED),hazards tree graph/test_commit.py graph/test_failure_points.py graph/test_flatten.py \
  graph/test_graphdef.py graph/test_kept.py jit/test_outcome.py graph/test_partition.py graph/test_path.py graph/test_recording.py jit/test_weakrefs.py \
  jit/test_writeback.py record/test_recorder.py record/test_threads.py))
define watched
$(PIP) --no-deps --no-build-isolation --upgrade --target build/$@/site -C build-dir=build/$@/core \
  -C install.strip=false $(BUILT) .
CXX=$(CXX) $(BIN)/python tests/support/sanitized.py $@ build/$@ --also="$(ALSO)" $(WHOLE) $(TESTS) $(ARGS)
endef
asan: BUILT = -C cmake.define.GRAFTAX_SANITIZE=address,undefined
asan: $(VENV)/.test ## the core's tests with AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer
	$(watched)

tsan: BUILT = -C cmake.define.GRAFTAX_SANITIZE=thread
tsan: TESTED = jit/test_threads.py record/test_threads.py
tsan: ALSO = tests/support/threads.py $(THREADS)
tsan: $(VENV)/.test ## the tests of threads with ThreadSanitizer, then a minute of sixteen threads
	$(watched)

debug: BUILT = -C cmake.define.GRAFTAX_DEBUG=ON -C cmake.build-type=Debug
debug: $(VENV)/.test ## the core's tests with all assertions of the standard library and of nanobind
	$(watched)

# FUZZ= is seconds for each reader, SOAK= the number of calls.
FUZZ ?= 60
SOAK ?= 1000000
fuzz: $(VENV)/.test $(VENV)/.fuzz ## damaged input for all that reads: a minute for each reader
	$(PIP) --no-deps --no-build-isolation --upgrade --target build/fuzz/site -C build-dir=build/fuzz/core \
	  -C cmake.define.GRAFTAX_FUZZ=ON .
	PYTHONPATH=build/fuzz/site $(BIN)/python tests/support/fuzz.py $(FUZZ) $(ARGS)

soak: $(VENV)/.test ## a million calls in one process: memory has to stay as it was
	$(BIN)/python tests/support/soak.py $(SOAK)

supply: $(VENV)/.build ## the sdist and the wheel: made without a network, twice the same, tested where they are installed
	$(BIN)/python tools/supply.py

# THREADS= is seconds; SESSIONS= is how many; PART= divides the sizes; MUTANTS= is how many of them run.
THREADS ?= 60
SESSIONS ?= 1000
PART ?= 1
MUTANTS ?= 10000
threads: $(VENV)/.test ## sixteen threads that share functions and objects: a minute
	$(BIN)/python tests/support/threads.py $(THREADS)

sessions: $(VENV)/.test ## random sessions of a user beside plain Python: a thousand, ten minutes and more
	$(BIN)/python tests/support/sessions.py $(SESSIONS)

scale: $(VENV)/.test ## how time and memory of each operation grow with a graph, up to a million leaves
	$(BIN)/python tests/support/scale.py --part $(PART) $(ARGS)

names: $(VENV)/.test ## a JAX that lacks one of the private names that are read: each of them in turn
	$(BIN)/python tests/support/private_names.py $(ARGS)

# A Python is named as python3.11, a JAX by its version; each pair has an environment of its own, and the pairs that pip
# has no JAX for are named.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14 python3.15
JAXES ?= 0.8.0 0.10.2
matrix: ## every Python that is there with the oldest, a middle and the newest JAX: a sample of the suite, and the names
	@mkdir -p build; for python in $(PYTHONS); do for jax in $(JAXES) newest; do \
	  command -v $$python >/dev/null || { echo "$$python: not here"; continue 2; }; \
	  jax=$${jax#newest}; venv=.venv-$$python$${jax:+-jax$$jax}; \
	  if $(MAKE) test names PYTHON=$$python JAX=$$jax VENV=$$venv ARGS= >build/matrix.log 2>&1; \
	  then echo "$$python, JAX $${jax:-newest}: passes"; else echo "$$python, JAX $${jax:-newest}: see build/matrix.log"; exit 1; fi; \
	done; done

tested: $(VENV)/.build ## the page of what the long runs found
	$(BIN)/python tools/tested.py

mutants: $(VENV)/.test ## which wrong versions of the core no test notices: hours
	$(BIN)/python tools/mutants.py --most $(MUTANTS) $(ARGS)

ecosystem: $(VENV)/.ecosystem ## programs of the libraries around, with graftax's names in place of theirs: 20 minutes
	$(BIN)/python ecosystem/run.py $(ARGS)

suites: $(VENV)/.suites ## the libraries' own tests with graftax's names, cloned at their tags: hours
	$(BIN)/python ecosystem/suites.py $(ARGS)

bench: $(VENV)/.demo ## time and calls per step, beside the neighbours
	$(BIN)/python -m graftax bench $(ARGS)

lint: $(VENV)/.dev ## ruff and clang-format: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	find core -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.dev ## ruff and clang-format: mend what they can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	find core -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

types: $(VENV)/.dev $(VENV)/.test ## pyright, strict on the public package
	$(BIN)/pyright --pythonpath $(BIN)/python $(ARGS)

docs: $(VENV)/.docs ## the site of the documentation, in build/site: warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

stub: $(VENV)/.test ## write python/graftax/_core.pyi from the built core
	$(BIN)/python tools/check_stub.py --write

stub-check: $(VENV)/.test ## fail where the committed stub is not the generated one
	$(BIN)/python tools/check_stub.py

clean: ## remove the virtual environment and the build
	rm -rf $(VENV) build

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("graftax needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.13")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@touch $@

$(VENV)/.build: $(VENV)/.python pyproject.toml
	$(PIP) --group build
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(PIP) --group dev
	@touch $@

$(VENV)/.ecosystem $(VENV)/.suites: $(VENV)/.%: $(VENV)/.test
	$(PIP) --group $*
	@touch $@

$(VENV)/.fuzz: $(VENV)/.python pyproject.toml
	@$(PIP) --only-binary atheris --group fuzz || \
	  { echo "atheris has no wheel for this Python or system: name a Python that it has one for, PYTHON= and VENV="; exit 1; }
	@touch $@

$(VENV)/.docs: $(VENV)/.python pyproject.toml
	$(PIP) --group docs
	@touch $@

# Not isolated, and one build folder for each environment: only what a change reaches is compiled again.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(VENV)/.build $(SOURCES)
	@echo "Building graftax and installing it with what '$*' needs; the first time takes a few minutes."
	$(PIP) --no-build-isolation -C build-dir=build/$(notdir $(VENV)) '.[$*]' $(JAX:%='jax==%')
	@# Flax asks for a library that has no wheel there, and runs without it.
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 15))'; then $(PIP) --no-deps --group flax-alone; fi
	@touch $@
