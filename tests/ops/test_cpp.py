"""The C++ package: CMake finds it for a program without Python, which links it and calls an op."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import my_ops

pytestmark = pytest.mark.slow

CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(consumer CXX)
{before}
find_package(my_ops 0.1 REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE my_ops::my_ops)
"""

PROGRAM = """
#include <my_ops/ops.h>

#include <iostream>

int main() {
  const at::Tensor x = at::tensor({-1.0, 0.0, 2.0});
  const at::Tensor a = at::ones({2, 3}), state = at::zeros({1, 4});
  const at::Tensor weights = at::zeros({12, 7}), bias = at::zeros({12});
  const auto [h, cell] = my_ops::lltm_cell(at::ones({1, 3}), weights, bias, state, state);
  const auto [output, h_n, c_n] =
      my_ops::lltm(at::ones({2, 1, 3}), state, state, weights, bias);
  const auto ih = [](int64_t gates) { return at::full({gates * 4, 3}, 0.5); };
  const auto hh = [](int64_t gates) { return at::full({gates * 4, 4}, 0.25); };
  const at::Tensor one = at::ones({1, 3}), two = at::ones({2, 1, 3});
  const at::Tensor reset = at::ones({2, 1}, at::kBool);
  const auto [lstm_h, lstm_cell] =
      my_ops::lstm_cell(one, ih(4), hh(4), at::ones({16}), {}, state, state);
  const auto [lstm, lstm_h_n, lstm_c_n] =
      my_ops::lstm(two, state, state, ih(4), hh(4), at::ones({16}), {}, {}, reset);
  const at::Tensor gru_h = my_ops::gru_cell(one, ih(3), hh(3), {}, at::ones({12}), state);
  const auto [gru, gru_h_n] = my_ops::gru(two, state, ih(3), hh(3));
  for (const at::Tensor& result :
       {my_ops::add_one(x), my_ops::custom_add(x, x), my_ops::d_sigmoid(x), my_ops::round_ste(x),
        my_ops::fill_index(3, 4), my_ops::gemm(a, a.t()),
        my_ops::gemm(a.to(at::kBFloat16), a.t()),
        my_ops::linear(a, at::ones({4, 3}), {}, "relu"), h, cell, output, h_n, c_n, lstm_h,
        lstm_cell, lstm, lstm_h_n, lstm_c_n, gru_h, gru, gru_h_n}) {
    std::cout << result.sum().item<double>() << ' ';
  }
  std::cout << '\\n';
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


NEEDS_CMAKE = pytest.mark.skipif(
    not shutil.which("cmake") or not shutil.which("c++"), reason="needs cmake and a C++ compiler"
)


def build(folder, program, *prefixes, before=""):
    """Compiles the program with the package, and returns the command that runs it."""
    (folder / "CMakeLists.txt").write_text(CMAKE.format(before=before))
    (folder / "main.cpp").write_text(program)
    prefix = ";".join(map(str, (my_ops.cmake_prefix_path, *prefixes)))
    for command in (
        ["cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}"],
        ["cmake", "--build", folder / "build"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return [folder / "build/consumer"]


@NEEDS_CMAKE
@pytest.mark.parametrize("layout", ["share/cmake", "."])  # pip's torch, and libtorch's archive
def test_cmake_needs_no_cuda_toolkit(tmp_path, layout):
    """torch's own package, in CUDA builds, stops if there is no toolkit."""
    for name in ("include", "lib"):
        (tmp_path / "torch" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "torch" / name).symlink_to(Path(torch.__file__).parent / name)
    config = tmp_path / "torch/share/cmake/Torch/TorchConfig.cmake"
    config.parent.mkdir(parents=True)
    config.write_text('message(FATAL_ERROR "there is no CUDA toolkit")')
    command = build(tmp_path, "int main() {}", tmp_path / "torch" / layout)
    subprocess.run(command, check=True)


TORCH_CONFIG = """
add_library(torch SHARED IMPORTED)
set_target_properties(torch PROPERTIES IMPORTED_LOCATION "{torch}/lib/libtorch.so"
  INTERFACE_INCLUDE_DIRECTORIES "{torch}/include"
  INTERFACE_LINK_LIBRARIES "{torch}/lib/libtorch_cpu.so;{torch}/lib/libc10.so")
"""


@NEEDS_CMAKE
def test_cmake_program_that_finds_torch_itself(tmp_path):
    """With a stand-in for the package of a CUDA build of torch, which asks for a toolkit."""
    prefix = Path(torch.utils.cmake_prefix_path)
    if torch.version.cuda is not None:
        prefix = tmp_path
        config = TORCH_CONFIG.format(torch=Path(torch.__file__).parent)
        (prefix / "TorchConfig.cmake").write_text(config)
    before = "find_package(Torch REQUIRED)"
    command = build(tmp_path, "int main() {}", prefix, before=before)
    subprocess.run(command, check=True)


@NEEDS_CMAKE
def test_cmake_program(tmp_path):
    command = build(tmp_path, PROGRAM, torch.utils.cmake_prefix_path)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sums, error = done.stdout.splitlines()
    x = torch.tensor([-1.0, 0.0, 2.0])
    a, state, weights = torch.ones(2, 3), torch.zeros(1, 4), torch.zeros(12, 7)
    cell = my_ops.lltm_cell(torch.ones(1, 3), weights, torch.zeros(12), state, state)
    sequence = my_ops.lltm(torch.ones(2, 1, 3), state, state, weights, torch.zeros(12))
    one, two, reset = torch.ones(1, 3), torch.ones(2, 1, 3), torch.ones(2, 1, dtype=torch.bool)

    def weights_of(gates):
        return torch.full((gates * 4, 3), 0.5), torch.full((gates * 4, 4), 0.25)

    expected = [
        my_ops.add_one(x),
        my_ops.custom_add(x, x),
        my_ops.d_sigmoid(x),
        my_ops.round_ste(x),
        my_ops.fill_index(3, 4),
        my_ops.gemm(a, a.T),
        my_ops.gemm(a.bfloat16(), a.T),
        my_ops.linear(a, torch.ones(4, 3), activation="relu"),
        *cell,
        *sequence,
        *my_ops.lstm_cell(one, *weights_of(4), torch.ones(16), None, state, state),
        *my_ops.lstm(two, state, state, *weights_of(4), torch.ones(16), reset=reset),
        my_ops.gru_cell(one, *weights_of(3), None, torch.ones(12), state),
        *my_ops.gru(two, state, *weights_of(3)),
    ]
    values = torch.tensor([float(value) for value in sums.split()])
    want = torch.stack([e.sum() for e in expected])
    torch.testing.assert_close(values, want, rtol=1e-5, atol=0)  # six digits are printed
    assert error == "gemm:"
    linked = subprocess.run(
        ["ldd", tmp_path / "build/consumer"], capture_output=True, text=True, check=True
    ).stdout
    assert str(Path(my_ops.__file__).parent / "_C.so") in linked
    assert "libpython" not in linked


@NEEDS_CMAKE
def test_cmake_program_moves(tmp_path):
    """It looks for the module by name, so it also runs on a machine that has it elsewhere."""
    command = build(tmp_path, "int main() {}", torch.utils.cmake_prefix_path)
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", *command], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\) .*\[(.*)\]", dynamic)
    assert "_C.so" in needed
    assert [name for name in needed if "/" in name] == []
