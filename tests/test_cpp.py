"""The C++ package: a program without Python finds it with CMake, links it and calls an op."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import my_ops

CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(consumer CXX)
find_package(my_ops 0.1 REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE my_ops::my_ops)
"""

PROGRAM = """
#include <my_ops/ops.h>

#include <iostream>

int main() {
  const at::Tensor x = at::tensor({-1.0, 0.0, 2.0});
  std::cout << my_ops::add_one(x)[2].item<double>() << ' '
            << my_ops::gemm(at::ones({2, 3}), at::ones({3, 2}))[0][0].item<double>() << ' '
            << my_ops::linear(at::ones({2, 3}), at::ones({4, 3}), {}, "relu").sum().item<double>()
            << ' ' << my_ops::fill_index(3, 4).sum().item<double>() << '\\n';
  try {
    my_ops::gemm(x, x);
  } catch (const std::exception& error) {
    std::cout << std::string(error.what()).substr(0, 5) << '\\n';
  }
}
"""


def test_paths_exist():
    assert (Path(my_ops.get_include()) / "my_ops/ops.h").is_file()
    assert (Path(my_ops.cmake_prefix_path) / "my_ops/my_opsConfig.cmake").is_file()


@pytest.mark.skipif(
    not shutil.which("cmake") or not shutil.which("c++") or torch.version.cuda is not None,
    reason="needs cmake, a C++ compiler and a CPU build of torch (others ask for a CUDA toolkit)",
)
def test_cmake_program(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    prefix = f"{my_ops.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    for command in (
        ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"],
        ["cmake", "--build", tmp_path / "build"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([tmp_path / "build/consumer"], capture_output=True, text=True, check=True)
    assert done.stdout == "3 3 24 30\ngemm:\n"
    linked = subprocess.run(
        ["ldd", tmp_path / "build/consumer"], capture_output=True, text=True, check=True
    ).stdout
    assert str(Path(my_ops.__file__).parent / "_C.abi3.so") in linked
    assert "libpython" not in linked
