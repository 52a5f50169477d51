"""The error of an op if the driver or the build cannot run its launch; needs no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (REPOSITORY / "csrc").is_dir(), reason="needs the source tree")
sys.path.insert(0, str(REPOSITORY / "tools/build"))

import preflight  # noqa: E402

PROGRAM = """
#include "binding_cuda.h"
#include <cstdio>
#include <cstdlib>

int main(int, char** arguments) {
  try {
    my_ops::check_launch(static_cast<cudaError_t>(std::atoi(arguments[1])), "add_one");
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
  }
}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """What check_launch() says about a status."""
    try:
        home = preflight.find_toolkit().home
    except preflight.Unfit as unfit:
        pytest.skip(str(unfit))
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "main.cpp").write_text(PROGRAM)
    libraries = Path(torch.__file__).parent / "lib"
    includes = [REPOSITORY / name for name in ("csrc", "include", "kernels")] + [home / "include"]
    includes.append(libraries.parent / "include")
    command = ["c++", "-std=c++20", *(f"-I{path}" for path in includes)]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", "-DMY_OPS_WITH_CUDA"]
    command += ['-DMY_OPS_ARCHITECTURES="7.5, 9.0a"', "main.cpp", "-o", "main"]
    command += [f"-L{path}" for path in (libraries, home / "lib64", home / "lib")]
    command += ["-ltorch_cpu", "-lc10", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    subprocess.run([*command, f"-Wl,-rpath,{libraries}"], cwd=folder, check=True)

    def run(status):
        # No driver is found, so the device in the message is 0.0.
        done = subprocess.run(
            [folder / "main", str(status)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    return run


NO_CODE = "add_one: this GPU has compute capability 0.0, and this build of my_ops has code for "


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, ""),
        (35, "add_one: the NVIDIA driver is too old for CUDA "),  # cudaErrorInsufficientDriver
        (209, NO_CODE),
        (98, NO_CODE),
        (700, "add_one: CUDA launch failed: an illegal memory access was encountered (cudaError"),
    ],
)
def test_launch_that_this_machine_does_not_take(launch, status, said):
    text = launch(status)
    assert text.startswith(said)
    if status in (35, 98, 209):
        assert "`python -m my_ops` says which build to install" in text
    assert bool(text) == bool(said)
