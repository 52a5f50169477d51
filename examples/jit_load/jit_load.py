"""Builds the package's own sources just in time, with CUDA where there is a toolkit and a GPU."""

import argparse
from pathlib import Path

import torch
from torch.utils import cpp_extension

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--verbose", action="store_true", help="show every compiler call")
parser.add_argument(
    "--build-directory", type=Path, help="default: torch's cache, kept between runs"
)
arguments = parser.parse_args()

root = Path(__file__).resolve().parents[2]
with_cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
sources = sorted([*root.glob("csrc/*.cpp"), *root.glob("kernels/**/*_cpu.cpp")])
flags = ["-O3", "-std=c++20", "-fno-trapping-math", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
if with_cuda:
    sources += sorted(root.glob("kernels/**/*.cu"))
    flags += ["-DMY_OPS_WITH_CUDA", "-DUSE_CUDA"]
else:
    sources = [source for source in sources if not source.stem.endswith("_cuda")]

# load() puts all objects into one folder, under the names of their sources, and csrc/ and kernels/
# have files of one name: it gets one line that includes each.
build = arguments.build_directory or Path(cpp_extension.get_default_build_root(), "my_ops_jit")
build.mkdir(parents=True, exist_ok=True)
units = []
for source in sources:
    units.append(build / f"{source.parent.name}_{source.name}")
    line = f'#include "{source}"\n'
    if not units[-1].exists() or units[-1].read_text() != line:
        units[-1].write_text(line)

cpp_extension.load(
    name="my_ops_jit",
    sources=[str(unit) for unit in units],
    extra_include_paths=[str(root / "include"), str(root / "kernels")],
    extra_cflags=flags,
    extra_cuda_cflags=[*flags[:2], *flags[3:], "-lineinfo"] if with_cuda else None,
    with_cuda=with_cuda,
    is_python_module=False,
    build_directory=str(build),
    verbose=arguments.verbose,
)

x = torch.tensor([-1.0, 0.0, 2.0], device="cuda" if with_cuda else "cpu")
print("d_sigmoid:", [round(value, 4) for value in torch.ops.my_ops.d_sigmoid(x).tolist()])
print("gemm:", torch.ops.my_ops.gemm(torch.ones(2, 3), torch.ones(3, 2)).tolist())
