# moecomm: the commands of the project. `make help` lists them.
#
# Each command makes what it needs first: a virtual environment in .venv, torch, the build tools, the extension.
# Stamp files remember what is done, so a second call starts at once; a change in csrc/, CMakeLists.txt or
# pyproject.toml rebuilds. The output of quiet steps goes to build/logs/ and is shown when a step fails.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON     ?= python3#  interpreter that .venv is made from (3.10 or newer)
VENV       ?= .venv#    where the environment lives
VENV_ARGS  ?=#          e.g. --system-site-packages, to use a torch that is installed already
TORCH      ?=#          torch requirement to install, e.g. TORCH='torch==2.12.0'; empty: chosen below
TORCH_CPU  ?= torch==2.13.0
CMAKE_ARGS ?=#          extra CMake settings of the extension, e.g. CMAKE_ARGS=-DMOECOMM_CUDA=ON
ARGS       ?=#          passed on to the program that a target runs
JOBS       ?= $(shell nproc 2>/dev/null || echo 2)
CXX        := $(if $(filter default,$(origin CXX)),c++,$(CXX))
export CXX CMAKE_ARGS
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What Python compiles as it imports it has to be kept (containers often say no): else each start of torch takes longer
# by seconds.
unexport PYTHONDONTWRITEBYTECODE

PY         := $(VENV)/bin/python
# Python compiles what is imported: to compile all of torch while it is installed costs half a minute.
PIP        := $(PY) -m pip install --quiet --no-compile
LOGS       := build/logs
VENV_DONE  := $(VENV)/.done-venv
TORCH_DONE := $(VENV)/.done-torch
TOOLS_DONE := $(VENV)/.done-tools
DEV_DONE   := $(VENV)/.done-dev
FINETUNE_DONE := $(VENV)/.done-finetune
BUILT      := build/.done-extension

# What the build is told and what it looks for on this machine are part of what is built: another CMAKE_ARGS or CXX,
# libfabric's headers, nvcc or a GPU that came since configure it again. Objects that are still right are kept.
FLAGS       := build/.flags
FOUND_HERE   = $(wildcard /usr/include/rdma/fabric.h /dev/nvidia[0-9]*) $(shell command -v nvcc) $(CUDACXX)
BUILD_DEPS  := pyproject.toml CMakeLists.txt $(FLAGS) $(wildcard bench/*.cpp) $(shell find csrc -type f 2>/dev/null)

# $(call quiet,what it says,log name,shell commands): one line when it works, the log's end when it does not.
define quiet
@mkdir -p $(LOGS); printf '==> %s\n' $(1); \
if ! ( set -euo pipefail; $(3) ) >$(LOGS)/$(2).log 2>&1; then \
  tail -n 60 $(LOGS)/$(2).log; \
  printf 'make: failed: %s (whole log: %s)\n' $(1) $(LOGS)/$(2).log >&2; exit 1; fi
endef

.PHONY: help train finetune test bench lint format build venv cpptest sanitize cuda12 clean distclean FORCE

help:
	@echo 'make train      train a mixture-of-experts language model on text found on this machine, on all GPUs if any'
	@echo 'make finetune   fine-tune a model of Hugging Face: ARGS="MODEL_FOLDER TEXT..."; else a small one of its own'
	@echo 'make test       C++ tests, then pytest; ARGS="-k router" runs pytest alone, narrowed'
	@echo 'make bench      dispatch and combine against memcpy and gloo, in one run'
	@echo 'make lint       ruff, mypy, clang-format; changes nothing (make format does)'
	@echo 'make build      the extension, into .venv'
	@echo 'make cpptest    the C++ tests alone;  make sanitize: under ASAN/UBSAN and under TSAN'
	@echo 'make cuda12     the CUDA part once more, with a CUDA 12 compiler that it fetches'
	@echo 'make venv       the environment with every tool, without the extension'
	@echo 'make wheel      a wheel for other machines, in dist/, with kernels where nvcc is'
	@echo 'make clean      removes builds and caches;  make distclean: .venv too'
	@echo 'Each takes ARGS="..."; PYTHON=, TORCH=, VENV_ARGS=, CMAKE_ARGS= are described in the Makefile.'

# ---- what the system must have: said at once, with the command that installs it ------------------------------

define system_check
@command -v $(PYTHON) >/dev/null || { \
  echo 'make: $(PYTHON) not found; on Debian/Ubuntu: apt-get install -y python3 python3-venv python3-dev' >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
  echo "make: moecomm needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
    'name another one: make PYTHON=python3.11 ...' >&2; exit 1; }; \
version=$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); missing=(); \
$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing+=("$$version-venv"); \
$(PYTHON) -c 'import os, sys, sysconfig as s; \
  sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || missing+=("$$version-dev"); \
if ! command -v $(firstword $(CXX)) >/dev/null; then missing+=(g++); \
elif ! echo '#include <semaphore>' | $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then \
  echo "make: $(CXX) has no C++20 library (g++ 11 or newer is needed: apt-get install -y g++)" >&2; exit 1; fi; \
if (( $${#missing[@]} )); then \
  echo "make: missing system packages; on Debian/Ubuntu:" \
    "$$( (( EUID )) && echo 'sudo ' )apt-get install -y $${missing[*]}" >&2; exit 1; fi
endef

# ---- environment ---------------------------------------------------------------------------------------------

$(VENV_DONE):
	$(system_check)
	$(call quiet,"virtual environment in $(VENV)",venv,\
	  $(PY) -m pip --version || $(PYTHON) -m venv --clear $(VENV_ARGS) $(VENV))
	@touch $@

# A torch that is there and new enough stays as it is, unless TORCH= asks for another. Without an NVIDIA GPU the
# CPU build is tried first; an installer that does not offer one gives the default build, which is larger.
$(TORCH_DONE): $(VENV_DONE) $(if $(strip $(TORCH)),FORCE)
	@mkdir -p $(LOGS); want=$(if $(strip $(TORCH)),'$(strip $(TORCH))'); \
	have=$$($(PY) -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); \
	  print(torch.__version__ if v >= (2, 11) else "")' 2>/dev/null || true); \
	install() { $(PIP) "$$@" >>$(LOGS)/torch.log 2>&1; }; : >$(LOGS)/torch.log; \
	if [[ -n $$want ]]; then echo "==> torch: $$want"; install "$$want"; \
	elif [[ -n $$have ]]; then echo "==> torch: $$have is here"; \
	elif nvidia-smi -L >/dev/null 2>&1 || [[ -e /dev/nvidia0 ]]; then \
	  echo '==> torch: newest build (an NVIDIA GPU is here; this download is large)'; install 'torch>=2.11'; \
	else \
	  echo '==> torch: CPU build of $(TORCH_CPU)'; \
	  install '$(TORCH_CPU)+cpu' || { \
	    echo '    the installer offers no CPU build: taking $(TORCH_CPU) as it comes (larger)'; \
	    install '$(TORCH_CPU)'; }; \
	fi || { tail -n 40 $(LOGS)/torch.log; \
	  echo "make: torch could not be installed (TORCH='torch==VERSION' chooses another build)" >&2; exit 1; }
	@touch $@

# The requirements stand in pyproject.toml alone; this prints those of the groups named after it.
define REQUIREMENTS
$(PY) -c 'import sys; \
  toml = __import__("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli", fromlist=["loads"]); \
  p = toml.loads(open("pyproject.toml").read()); \
  groups = p["project"]["optional-dependencies"] | {"build": p["build-system"]["requires"], \
    "run": p["project"]["dependencies"]}; \
  print("\n".join(r for g in sys.argv[1:] for r in groups[g]))'
endef

$(TOOLS_DONE): $(TORCH_DONE) pyproject.toml
	$(call quiet,"build tools and libraries",tools,\
	  $(REQUIREMENTS) build run train $(if $(wildcard /dev/nvidiactl),cuda) >$(VENV)/requirements.txt && \
	  $(PIP) -r $(VENV)/requirements.txt cmake ninja)
	@touch $@

$(DEV_DONE): $(TOOLS_DONE) pyproject.toml
	$(call quiet,"test and lint tools",dev,\
	  $(REQUIREMENTS) dev transformers finetune >$(VENV)/requirements-dev.txt && $(PIP) -r $(VENV)/requirements-dev.txt)
	@touch $@

$(FINETUNE_DONE): $(TOOLS_DONE) pyproject.toml
	$(call quiet,"transformers and what fine-tuning needs",finetune,\
	  $(REQUIREMENTS) transformers finetune >$(VENV)/requirements-finetune.txt && \
	  $(PIP) -r $(VENV)/requirements-finetune.txt)
	@touch $@

venv: $(DEV_DONE)

# ---- extension -----------------------------------------------------------------------------------------------

$(FLAGS): FORCE
	@mkdir -p build; printf '%s\n' '$(CXX)' '$(CMAKE_ARGS)' '$(VENV)' '$(FOUND_HERE)' >$@.new; \
	if cmp -s $@ $@.new; then rm $@.new; else mv $@.new $@; rm -f build/*/CMakeCache.txt; fi

$(BUILT): $(BUILD_DEPS) $(TOOLS_DONE)
	$(system_check)
	$(call quiet,"moecomm with its extension (editable install)",build,\
	  PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pip install -v --no-build-isolation --no-deps -e .)
	@grep -h -o -E 'moecomm: (CUDA kernels|links between nodes): .*' $(LOGS)/build.log | sed 's/^moecomm:/   /' || true
	@touch $@

build: $(BUILT)

# ---- wheel ---------------------------------------------------------------------------------------------------

# For the Python of .venv (PYTHON= chooses another), and, where there is a CUDA compiler, for every GPU that moecomm
# serves. It is tried in an environment that has torch alone.
.PHONY: wheel wheel-file
wheel:
	@$(MAKE) wheel-file $(if $(strip $(CMAKE_ARGS)),,$(if $(shell command -v nvcc)$(CUDACXX),CMAKE_ARGS=-DMOECOMM_CUDA=ON))

wheel-file: $(BUILT)
	$(call quiet,"tools for wheels",wheel-tools,\
	  $(REQUIREMENTS) wheel >$(VENV)/requirements-wheel.txt && $(PIP) -r $(VENV)/requirements-wheel.txt)
	$(call quiet,"wheel",wheel,\
	  rm -rf build/wheel dist; PATH="$(abspath $(VENV))/bin:$$PATH"; \
	  $(PY) -m pip wheel -v --no-build-isolation --no-deps -w build/wheel .; \
	  $(PY) -m auditwheel repair -w dist build/wheel/*.whl)
	$(call quiet,"the wheel in an environment of its own",wheel-try,.ci/try_wheel $(PY) dist/*.whl)
	@ls -sh1 dist/*.whl

# ---- commands ------------------------------------------------------------------------------------------------

train: $(BUILT)
	@$(PY) examples/train_lm.py --note "$$($(PY) -m moecomm --left-out)" $(ARGS)

# ARGS="MODEL_FOLDER TEXT..." names a model and text; without them a small one is made.
finetune: $(BUILT) $(FINETUNE_DONE)
	@$(PY) examples/finetune_hf.py --note "$$($(PY) -m moecomm --left-out)" $(ARGS)

# The cases of docs/results.md, each next to its baselines (memcpy and gloo) in the same run.
bench: $(BUILT)
	@$(PY) bench/run_all.py $(ARGS)

# Without ARGS everything runs, in three processes beside each other: the tests that start ranks; those of them that mostly
# wait, for deadlines and for processes, with the tests of pages; all others. The output of the last two comes at the end.
# With ARGS it is pytest alone, narrowed by them.
RANKS    := tests/multirank tests/gpu
WAITING  := $(patsubst %,tests/multirank/test_%.py,absence bench ends faults fd_exchange harness hosts main \
              node_construction node_errors) tests/docs
OTHERS   := $(filter-out $(RANKS:%=%/) tests/docs/ %__pycache__/,$(wildcard tests/*/))
test: $(if $(strip $(ARGS)),,cpptest) $(BUILT) $(DEV_DONE)
ifneq ($(strip $(ARGS)),)
	@echo '==> pytest $(ARGS)'
	@$(PY) -m pytest $(ARGS)
else
	@echo '==> pytest $(RANKS); beside it all other tests (output below, and in $(LOGS)/pytest-*.log)'
	@mkdir -p $(LOGS); \
	  $(PY) -m pytest $(OTHERS) >$(LOGS)/pytest-others.log 2>&1 & others=$$!; \
	  $(PY) -m pytest $(WAITING) >$(LOGS)/pytest-waiting.log 2>&1 & waiting=$$!; \
	  trap "kill $$others $$waiting 2>/dev/null || true" EXIT; \
	  code=0; $(PY) -m pytest $(RANKS) $(WAITING:%=--ignore %) || code=$$?; \
	  for each in waiting others; do \
	    wait $${!each} || code=$$?; echo "==> pytest, $$each"; cat $(LOGS)/pytest-$$each.log; done; \
	  exit $$code
endif

# The C++ tests run plain, in the folder and with the libraries of the extension, and in builds of their own under ASAN
# with UBSAN and under TSAN. -g1 is enough for the lines of stacks; under ASAN -O1 compiles in half the time of -O2.
cpp_build = $(VENV)/bin/cmake -S . -B build/$(1) $(2) -DMOECOMM_TESTS=ON && \
  $(VENV)/bin/cmake --build build/$(1) --target cpp_tests
sanitized = -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='$(2) -g1 -DNDEBUG' \
  $(CMAKE_ARGS) -DMOECOMM_PYTHON=OFF -DMOECOMM_CUDA=OFF -DMOECOMM_SANITIZE=$(1)
ctest = ctest="$(abspath $(VENV))/bin/ctest"; $(2) $$ctest --test-dir build/$(1) --output-on-failure --timeout 300 --parallel $(JOBS)

cpptest: $(BUILT)
	$(call quiet,"C++ tests: build",cpptest-build,$(call cpp_build,release))
	$(call quiet,"C++ tests: run",cpptest,$(call ctest,release))
	@$(call ctest_summary,cpptest)

# A thread sanitizer and a kernel with much address randomisation may not get on: it is tried on an empty program,
# also without randomisation, and where it cannot run at all this is said.
sanitize: $(TOOLS_DONE) $(FLAGS)
	$(system_check)
	$(call quiet,"C++ tests under ASAN and UBSAN: build",asan-build,\
	  $(call cpp_build,asan,$(call sanitized,address,-O1)))
	$(call quiet,"C++ tests under ASAN and UBSAN: run",asan,$(call ctest,asan))
	@$(call ctest_summary,asan)
	@mkdir -p build/tsan; echo 'int main() {}' | $(CXX) -fsanitize=thread -x c++ - -o build/tsan/probe || exit 0; \
	if build/tsan/probe 2>/dev/null; then : >build/tsan/wrapper; \
	elif setarch -R build/tsan/probe 2>/dev/null; then echo 'setarch -R' >build/tsan/wrapper; \
	else rm -f build/tsan/wrapper; fi
	@if [[ ! -e build/tsan/wrapper ]]; then \
	  echo '==> TSAN does not run on this machine (an empty program fails): those tests are left out'; \
	else $(MAKE) tsan; fi

.PHONY: tsan
tsan:
	$(call quiet,"C++ tests under TSAN: build",tsan-build,\
	  $(call cpp_build,tsan,$(call sanitized,thread,-O2)))
	$(call quiet,"C++ tests under TSAN: run",tsan,$(call ctest,tsan,$(shell cat build/tsan/wrapper 2>/dev/null)))
	@$(call ctest_summary,tsan)

# Architectures are its arguments: 90a alone without any.
cuda12: $(VENV_DONE)
	@PYTHON=$(abspath $(PY)) .ci/cuda12 $(ARGS)

ctest_summary = grep -h -E 'tests passed|No tests were found|\(Skipped\)|\(Not Run\)' $(LOGS)/$(1).log | sed 's/^/    /'

PY_TREES    := $(wildcard moecomm compat bench tests examples)
CPP_FORMAT   = find csrc tests bench -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' \)

# The types of the extension, from the extension as it was last built. Built without its CUDA part, other names are Any.
STUB := moecomm/_C.pyi
.PHONY: stub
stub: $(DEV_DONE) $(if $(wildcard $(BUILT)),,$(BUILT))
	$(call quiet,"types of the extension",stub,[[ $(STUB) -nt $(BUILT) ]] || { \
	  $(PY) -m pybind11_stubgen moecomm._C --output-dir build/stubs; made=build/stubs/$(STUB); \
	  grep -q '^class DeviceCommunicator' $$made || echo 'def __getattr__(name: str) -> typing.Any: ...' >>$$made; \
	  cp $$made $(STUB); })

lint: $(DEV_DONE) stub
	@echo '==> ruff check';          $(VENV)/bin/ruff check $(ARGS) $(PY_TREES)
	@echo '==> ruff format --check'; $(VENV)/bin/ruff format --check $(PY_TREES)
	@echo '==> mypy';                $(VENV)/bin/mypy
	@echo '==> clang-format';        $(CPP_FORMAT) -exec $(VENV)/bin/clang-format --dry-run -Werror {} +

format: $(DEV_DONE)
	@$(VENV)/bin/ruff check --fix $(PY_TREES) && $(VENV)/bin/ruff format $(PY_TREES)
	@$(CPP_FORMAT) -exec $(VENV)/bin/clang-format -i {} +

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find moecomm bench tests examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	@rm -rf $(VENV)

FORCE:
