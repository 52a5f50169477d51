# make demo    train a small language model with my_ops beside plain PyTorch; writes demo.png
# make test    build the wheel, install it into a clean environment, test it from outside this folder
# Both do all of their own set-up: Python >= 3.10, a C++ compiler and the network are enough.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := build/venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
SOURCES := setup.py tools/check_wheel.py pyproject.toml MANIFEST.in README.md \
  $(wildcard csrc/* kernels/* include/* tools/build/* my_ops/*.py my_ops/*/*.py) \
  $(shell find my_ops/include my_ops/share -type f)

.PHONY: demo test examples docs lint wheel gpu-check clean

demo: build/installed
	cd build && venv/bin/python ../examples/char_lm.py --output ../demo.png

test: build/installed
	cd build && venv/bin/python -m pytest ../tests -c ../pyproject.toml --rootdir .. \
	  -p no:cacheprovider -q $(PYTEST)

# The programs of examples/, built and run as their READMEs say.
examples: build/installed
	cd build && PATH=$(CURDIR)/$(VENV)/bin:$$PATH venv/bin/python -m pytest ../examples \
	  -c ../pyproject.toml --rootdir .. -p no:cacheprovider -q

# The guide, into build/site: its Python is run, its links are checked, a warning is an error.
docs: build/installed
	$(PIP) install -q 'mkdocs-material>=9.7' 'mkdocstrings[python]>=1' 'sybil>=9'
	cd build && TORCH_EXTENSIONS_DIR=$(CURDIR)/build/extensions PATH=$(CURDIR)/$(VENV)/bin:$$PATH \
	  venv/bin/python -m pytest ../docs -c ../pyproject.toml --rootdir .. -p no:cacheprovider -q \
	  -W default
	cd build && NO_MKDOCS_2_WARNING=1 venv/bin/python -m mkdocs build -q -f ../mkdocs.yml

wheel: build/wheel

# The environment of both: torch, the tools of tests and demo, and the wheel as a user installs it.
build/installed: build/wheel
	$(PIP) install -q --force-reinstall --no-deps dist/*.whl
	cd build && venv/bin/python -c 'import my_ops; print("installed my_ops", my_ops.__version__)'
	touch $@

# Built against the torch of the environment and the CUDA toolkit of the machine, or pip's; then
# checked as users' machines will meet it.
build/wheel: $(SOURCES) build/environment
	rm -rf dist
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist .
	$(VENV)/bin/python tools/check_wheel.py dist/*.whl
	touch $@

build/environment: pyproject.toml tools/requirements/audit.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q '$(TORCH)' 'setuptools>=77' wheel ninja numpy \
	  'pytest>=8' 'hypothesis>=6.100' expecttest 'matplotlib>=3.8' 'tqdm>=4.66' \
	  cmake pybind11 copier 'mypy>=1.15' 'ruff>=0.14' 'clang-format==23.1.*'
	$(PIP) install -q -r tools/requirements/audit.txt
	test -x "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || \
	  $(PIP) install -q 'cuda-toolkit[nvcc,cudart,cccl]'  # of the release that torch pins
	touch $@

lint: build/environment
	$(PIP) install -q check-jsonschema zizmor
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/readme_tables.py --check
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard csrc/*.cpp csrc/*.h kernels/* include/*) \
	  $(wildcard my_ops/include/my_ops/*)
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-actions .github/actions/*/action.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*
	$(VENV)/bin/zizmor -q --offline --min-severity medium .github

gpu-check:
	tools/gpu_check.sh

clean:
	rm -rf build dist
