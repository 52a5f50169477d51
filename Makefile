# make demo    train a small language model with my_ops and with plain PyTorch; writes demo.png
# make test    build the wheel, install it into a clean environment, test it from outside this folder
# Both set up everything they need, and name what the machine lacks before they download anything.
#
# make docs      the guide, its code run and its links checked, into build/site
# make examples  the programs of examples/, built and run as their READMEs say
# make fuzz      a minute of random calls, compared with specifications in float64
# make lint      style, types, and what is generated from measurements
# make wheel     the wheel for users, into dist/
# make clean     remove build/ and dist/
# MY_OPS_WITH_CUDA=0 before any of them leaves out the CUDA kernels, which take most of the time.
# CONTRIBUTING.md lists the rest.

PYTHON ?= python3
VENV := build/venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Names each large file that it downloads; the rest of what pip says goes into a log.
INSTALL := $(PY) tools/build/progress.py build/install.log $(PIP) install
SAY := @printf '\n%s\n'
IN_BUILD := cd build && PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PYTEST_HERE := python -m pytest -c ../pyproject.toml --rootdir .. -p no:cacheprovider -q
# On two cores three quarters of the time that one test at a time takes with both.
TWO_AT_A_TIME := OMP_NUM_THREADS=1 $(PYTEST_HERE) -n 2 --dist

# What a build is made from: build/*.inputs change when any of it does (tools/build/source.py).
STEERING := PYTHON TORCH MY_OPS_WITH_CUDA MY_OPS_CUDA MY_OPS_HOME TORCH_CUDA_ARCH_LIST CUDA_HOME CUDA_PATH \
  CC CXX CFLAGS CPPFLAGS CXXFLAGS LDFLAGS NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS PYTORCH_NVCC SOURCE_DATE_EPOCH
SETTINGS := $(foreach name,$(STEERING),$(if $(filter-out undefined default,$(origin $(name))),\
  '$(name)=$(subst ','\'',$($(name)))'))
NEEDS_PYTHON := command -v $(PYTHON) >/dev/null || \
  { echo 'my_ops: there is no $(PYTHON) (Debian: apt install python3-venv)' >&2; exit 1; }
WRITE_INPUTS := $(PYTHON) tools/build/source.py build $(SETTINGS)
$(shell $(WRITE_INPUTS) 2>/dev/null)

# Compiles a wheel against the environment's torch. Installs pip's CUDA compiler first, if the wheel
# has the CUDA kernels and the machine has no toolkit. Removes build/lib*, because the wheel would
# include what an earlier build copied there.
WHEEL = toolkit=$$($(PY) tools/build/preflight.py toolkit) && \
  { test -z "$$toolkit" || $(INSTALL) "$$toolkit"; } && rm -rf build/lib* && \
  $(PY) tools/build/progress.py build/compile.log \
  $(PIP) wheel -v --no-build-isolation --no-deps .

.PHONY: help demo test fuzz examples docs lint wheel aarch64 gpu-check asan tsan coverage mutants clean

help:
	@sed -n '1,/^$$/s/^#$$\|^# //p' Makefile

demo: build/runnable
	$(SAY) 'Training two models side by side: 1 to 2 minutes'
	@$(PY) examples/char_lm.py --output demo.png

test: build/installed
	$(SAY) 'Testing: 15 to 25 minutes on two cores'
	@$(IN_BUILD) $(TWO_AT_A_TIME) loadfile --no-loadscope-reorder ../tests $(PYTEST)

# Compares random calls of every op and layer with their specifications in float64, on the CPU and on
# a GPU if there is one: make fuzz SECONDS=3600 SEED=7 OUTPUT=benchmarks/results/fuzz-NAME.json
# PROCESSES=8 runs as many at a time.
SECONDS := 60
fuzz: build/installed
	$(IN_BUILD) python ../tests/fuzz.py --seconds $(SECONDS) $(addprefix --seed ,$(SEED)) \
	  $(addprefix --processes ,$(PROCESSES)) $(addprefix --output ,$(abspath $(OUTPUT)))

# The programs of examples/, built and run as their READMEs say.
examples: build/installed
	$(IN_BUILD) $(TWO_AT_A_TIME) worksteal ../examples

# The guide, into build/site. Runs its Python and checks its links; a warning is an error.
docs: build/installed
	$(IN_BUILD) TORCH_EXTENSIONS_DIR="$(CURDIR)/build/extensions" $(PYTEST_HERE) ../docs -W default
	cd build && NO_MKDOCS_2_WARNING=1 venv/bin/python -m mkdocs build -q -f ../mkdocs.yml
	$(SAY) "The guide: open file://$(CURDIR)/build/site/index.html in a browser."

wheel: build/wheel

# What the demo needs: my_ops with kernels for this machine's GPUs, or for the CPU if there are none.
# If the wheel of `make test` is installed, that is enough.
build/runnable: build/environment build/wheel.inputs
	@rm -rf build/installed build/demo
	@if test "$$MY_OPS_WITH_CUDA" != 0 && \
	  $(PY) -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; \
	then export TORCH_CUDA_ARCH_LIST=$${TORCH_CUDA_ARCH_LIST:-native}; \
	  printf '\nCompiling for the GPUs of this machine: about 3 minutes on two cores\n'; \
	else export MY_OPS_WITH_CUDA=0; \
	  printf '\nCompiling for the CPU: about 1 minute on two cores\n'; \
	fi; $(WHEEL) -w build/demo
	@$(PIP) install -q --force-reinstall --no-deps build/demo/*.whl
	@touch $@

# Installs the wheel as a user would.
build/installed: build/wheel
	@$(PIP) install -q --force-reinstall --no-deps dist/*.whl
	@cd build && venv/bin/python -c 'import my_ops; print("installed my_ops", my_ops.__version__)'
	@touch $@ build/runnable

# Builds the wheel for users, and checks it.
build/wheel: build/tools build/wheel.inputs
	@rm -rf dist
	@if test "$$MY_OPS_WITH_CUDA" = 0; \
	then printf '\nCompiling for the CPU: about 1 minute on two cores\n'; \
	else printf '\nCompiling for the CPU and all GPUs: 5 to 10 minutes on two cores\n'; \
	fi; $(WHEEL) -w dist
	$(PY) tools/release/check_wheel.py dist/*.whl
	@touch $@

build/tools: build/environment tools/requirements/audit.txt tools/requirements/make.txt
	$(SAY) 'Downloading what the tests and the checks use: 250 MB, half a minute'
	@$(INSTALL) -r tools/requirements/audit.txt
	@$(INSTALL) -r tools/requirements/make.txt
	@touch $@

build/environment: build/environment.inputs
	@$(NEEDS_PYTHON)
	@$(PYTHON) tools/build/preflight.py
	$(SAY) 'Downloading torch: 2.8 GB with its CUDA libraries, 2 minutes'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) "$${TORCH:-$$($(PY) tools/build/preflight.py torch)}" 'setuptools>=77' ninja \
	  numpy 'matplotlib>=3.8' 'tqdm>=4.66'
	@touch $@

# They are written before make looks at a target, so this runs only where that failed, and says why.
build/%.inputs:
	@$(NEEDS_PYTHON)
	@$(WRITE_INPUTS)

lint: build/tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/docs/measured.py --check
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard csrc/*.cpp csrc/*.h csrc/*/* kernels/*/*.* kernels/*/*/*.* include/*) \
	  $(wildcard my_ops/include/my_ops/*)
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-actions .github/actions/*/action.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*
	$(VENV)/bin/zizmor -q --offline --min-severity medium .github

gpu-check:
	tools/testing/gpu_check.sh

# The CPU kernels and their bindings under GCC's sanitizers: of addresses and undefined behaviour, and
# of threads, which watches what is compiled for it alone: not torch.
asan: SANITIZE := address,undefined -fno-sanitize-recover=undefined
asan: PRELOAD = $$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)
tsan: SANITIZE := thread
tsan: PRELOAD = $$(gcc -print-file-name=libtsan.so) $(CURDIR)/build/tsan/parallel_for.so
asan tsan: CFLAGS = -fsanitize=$(SANITIZE)
BUILD_WITH_CFLAGS = rm -rf build/$@ build/temp* && MY_OPS_WITH_CUDA=0 CFLAGS="$(CFLAGS)" LDFLAGS="$(LDFLAGS)" \
  $(PIP) install -q --no-build-isolation --no-deps --no-cache-dir --target build/$@ .
SANITIZED = PYTHONPATH=$@ ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
  LD_PRELOAD="$(PRELOAD)"

# Not the tests that compile, that start processes with libraries of their own or exhaust the memory,
# nor those of the package and its pages.
OF_CALLS := autocast autograd c_api convert elementwise fake_kernels gemm gemm_mixed gemm_options integration linear \
  lltm lltm_layer lltm_regularisers nn overrides recurrent recurrent_kernels registration reset torch_layers vmap zoneout

asan: build/tools
	$(BUILD_WITH_CFLAGS)
	$(IN_BUILD) $(SANITIZED) $(PYTEST_HERE) \
	  $(patsubst %,../tests/*/test_%.py,$(OF_CALLS))
	$(IN_BUILD) $(SANITIZED) python ../tests/fuzz.py --seconds $(SECONDS) $(addprefix --seed ,$(SEED))

tsan: build/tools
	$(BUILD_WITH_CFLAGS)
	g++ -shared -fPIC -std=c++20 -g $(CFLAGS) tests/parallel_for.cpp -o build/tsan/parallel_for.so
	$(IN_BUILD) $(SANITIZED) $(PYTEST_HERE) --capture=sys \
	  -k 'thread or test_elementwise or test_lltm or test_recurrent' $(addprefix ../tests/*/test_,\
	  $(addsuffix .py,elementwise lltm recurrent registration integration autocast))

# Which lines and branches of Python and of the CPU build's C++ the suite reaches, into
# benchmarks/results/coverage.json. Without the tests of what the module opens and holds, which is
# more here.
COVERAGE := python -m coverage
ABOUT_THE_MODULE := package/test_security.py package/test_wheel.py
coverage: CFLAGS := --coverage -fprofile-update=atomic
coverage: LDFLAGS := --coverage
coverage: build/tools
	$(BUILD_WITH_CFLAGS) && rm -f build/.coverage*
	$(IN_BUILD) PYTHONPATH=$(CURDIR)/build/coverage $(COVERAGE) run --rcfile=../tools/testing/coverage.toml \
	  -m $(subst python -m ,,$(PYTEST_HERE)) ../tests \
	  $(addprefix --deselect ../tests/,$(ABOUT_THE_MODULE)) $(PYTEST)
	$(IN_BUILD) $(COVERAGE) combine -q && \
	  $(COVERAGE) json -q --include='coverage/my_ops/*' -o coverage/python.json
	PYTHONPATH=build/coverage $(PY) tools/testing/line_coverage.py build/coverage/python.json build/temp.* \
	  benchmarks/results/coverage.json

# Makes random mistakes, one at a time, and lists those that no test notices:
# make mutants MUTANTS='--python 100 --cpp 40 --seed 7'
mutants: build/tools
	$(PY) tools/testing/mutants.py $(MUTANTS)

# Cross-compiles a wheel for aarch64, and tests it under qemu.
aarch64: build/tools
	tools/testing/aarch64.sh $(PYTEST)

clean:
	rm -rf build dist
