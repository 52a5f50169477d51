#!/usr/bin/env bash
# In a manylinux_2_28 image, installs the CUDA 12 compiler that MY_OPS_CUDA names, 12.9 for the plain
# wheel, and a g++ that it supports (CC and CXX name it). CUDA 13 comes from PyPI and needs nothing here.
set -euo pipefail
cuda=${MY_OPS_CUDA:-12.9}
case $cuda in
  12.*) ;;
  *) exit 0 ;;
esac
repository=$([ "$(uname -m)" = aarch64 ] && echo sbsa || echo x86_64)
release=${cuda/./-}
dnf config-manager --add-repo \
  "https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$repository/cuda-rhel8.repo"
dnf install -y --setopt=obsoletes=0 "cuda-nvcc-$release" "cuda-cudart-devel-$release" \
  "cuda-cccl-$release" gcc-toolset-13-gcc-c++
