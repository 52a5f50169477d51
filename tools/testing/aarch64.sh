#!/usr/bin/env bash
# Builds a wheel for aarch64 on another processor, and runs tests on it under qemu:
#
#   tools/testing/aarch64.sh [pytest arguments]   default: the elementwise ops and the C interface
#
# Needs Debian, with g++-aarch64-linux-gnu and qemu-user-static, and `make build/tools`. Python and torch
# for aarch64 come from Debian and PyPI, and are unpacked in build/aarch64; torch 2.10.0 there has no
# CUDA. With MY_OPS_WITH_CUDA=1 it also compiles the CUDA kernels, with the toolkit of CUDA_HOME
# (/usr/local/cuda). They are audited, not run.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PWD/build/venv/bin:$PATH
work=$PWD/build/aarch64
export MY_OPS_WITH_CUDA=${MY_OPS_WITH_CUDA:-0}

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get dpkg uv; do
  command -v $tool >/dev/null || { echo "aarch64.sh: there is no $tool (see its head)" >&2; exit 1; }
done

if [ ! -e "$work/unpacked" ]; then
  rm -rf "$work"
  mkdir -p "$work"/{lists,debs/archives}/partial
  touch "$work/status"
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 debian)
  keys=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -e $keys ] || { echo "aarch64.sh: there is no $keys (apt install debian-archive-keyring)" >&2; exit 1; }
  echo "deb [signed-by=$keys] $mirror bookworm main" >"$work/sources.list"
  apt=(apt-get -qq -y -o APT::Architecture=arm64 -o APT::Architectures::=arm64
    -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$work/lists" -o Dir::State::status="$work/status"
    -o Dir::Cache="$work/debs" -o APT::Sandbox::User= -o Debug::NoLocking=1)
  "${apt[@]}" update
  "${apt[@]}" install --download-only --no-install-recommends python3.11 python3-distutils libstdc++6
  for package in "$work"/debs/archives/*.deb; do dpkg -x "$package" "$work/root"; done
  touch "$work/unpacked"
fi
install=(uv pip install -q --python-platform aarch64-manylinux_2_28 --python-version 3.11
  --only-binary :all: --target "$work/site")
"${install[@]}" torch==2.10.0 numpy 'pytest>=8' 'hypothesis>=6.100' expecttest 'setuptools>=77'
libraries=-L$work/site/torch/lib
if [ "$MY_OPS_WITH_CUDA" != 0 ]; then
  toolkit=${CUDA_HOME:-/usr/local/cuda}
  release=$("$toolkit/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  "${install[@]}" --no-deps "nvidia-cuda-runtime==$release.*"
  libraries+=" -L$work/site/nvidia/cu${release%.*}/lib"
  export CUDA_HOME=$toolkit CPATH=$toolkit/include # nvcc looks in targets/aarch64-linux
fi

# Python's own builds name their target system with _PYTHON_HOST_PLATFORM.
rm -rf dist/aarch64 build/{lib,temp}.linux-aarch64*
CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ LDFLAGS=$libraries \
  _PYTHON_HOST_PLATFORM=linux-aarch64 \
  python -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps -w dist/aarch64 .
python tools/release/check_wheel.py dist/aarch64/*.whl
"${install[@]}" --no-deps --reinstall dist/aarch64/*.whl

tests=$PWD/tests config=$PWD/pyproject.toml
if (($# == 0)); then set -- "$tests"/ops/test_{elementwise,c_api}.py -k 'not cuda'; fi
cd "$work" # in the source tree, Python would import its my_ops instead of the wheel's
export PYTHONPATH=$work/site OMP_NUM_THREADS=1
python=(qemu-aarch64-static -L "$work/root" "$work/root/usr/bin/python3.11")
"${python[@]}" -m pytest -c "$config" --rootdir "$tests/.." -p no:cacheprovider -q \
  --junitxml=suite.xml "$@"
echo "for the compatibility table: PYTHONPATH=$PYTHONPATH ${python[*]} tools/testing/record_suite.py $work/suite.xml WHAT"
