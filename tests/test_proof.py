"""The programs that count what the suite reaches and what a long run costs."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "tools").is_dir() or not shutil.which("gcov") or not shutil.which("c++filt"),
    reason="needs the repository, gcov and c++filt",
)

SYMBOLS = """#!/bin/sh
echo 'arch = sm_90a'
echo 'OBJECT        WEAK    DEFAULT    -            U  .nv.reservedSmem.offset0'
echo 'FUNC          LOCAL   DEFAULT    ENTRY           _Z3addIfEvPT_'
echo 'FUNC          LOCAL   DEFAULT    ENTRY           _Z3addIdEvPT_'
echo 'FUNC          GLOBAL  DEFAULT    ENTRY           _ZN12_GLOBAL__N_14fillEPi'
echo 'FUNC          LOCAL   DEFAULT    -               _Z6insidePi'
"""


def test_kernels_never_launched_are_named(tmp_path, monkeypatch):
    tool, names, output = (tmp_path / name for name in ("cuobjdump", "names", "found.json"))
    tool.write_text(SYMBOLS)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    # As the profiler writes them; and one of torch's.
    names.write_text("void add<float>(float*)\n(anonymous namespace)::fill(int*)\ncublas\n")
    command = [sys.executable, str(ROOT / "tools/kernel_coverage.py"), "_C.so", str(names)]
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True)
    found = json.loads(output.read_text())
    assert (found["compiled"], found["launched"]) == (3, 2)
    assert found["never launched"] == ["void add<double>(double*)"]
    assert found["kernels"] == [
        {"kernel": "add", "compiled": 2, "launched": 1},
        {"kernel": "fill", "compiled": 1, "launched": 1},
    ]


def test_launched_kernels_are_recorded(cuda, run_pytest, tmp_path):
    one = str(ROOT / "tests/test_elementwise.py"), "-k", "test_fill_index_values and cuda and 31"
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    options = "-p", "record_kernels", "--kernels", str(tmp_path / "names")
    run_pytest(*options, *one, PYTHONPATH=path)
    names = (tmp_path / "names").read_text()
    assert "fill_index_kernel<float" in names
    assert "fill_index_kernel<long" in names
    assert "map_kernel" not in names


def test_lines_of_templates_are_reached_once(tmp_path):
    """In one of two instantiations; the branch that neither takes is missed."""
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc/twice.cpp"
    source.write_text(
        "template <typename T>\n"
        "int twice(T x) {\n"
        "  if (x > 5)\n"
        "    return 1;\n"
        "  return x > 9 ? 2 : 3;\n"
        "}\n"
        "int main() { return twice(1) + twice(7.0) - 4; }\n"
    )
    flags = ["--coverage", f"-ffile-prefix-map={tmp_path}/="]
    subprocess.run(["g++", *flags, str(source), "-o", "twice"], cwd=tmp_path, check=True)
    subprocess.run(["./twice"], cwd=tmp_path, check=True)
    python = tmp_path / "python.json"
    python.write_text('{"files": {}}')
    output = tmp_path / "found.json"
    tool = str(ROOT / "tools/line_coverage.py")
    subprocess.run([sys.executable, tool, str(python), str(tmp_path), str(output)], check=True)
    (found,) = (row for row in json.loads(output.read_text())["coverage"] if row["files"])
    assert (found["group"], found["lines"], found["lines reached"]) == ("csrc", 5, 5)
    assert found["branches"] > found["branches reached"] > 0


def test_endurance(tmp_path, device):
    output = tmp_path / "found.json"
    program = str(ROOT / "benchmarks/endurance.py")
    command = [sys.executable, program, "--device", device, "--calls", "100"]
    subprocess.run([*command, "--output", str(output)], check=True)
    found = json.loads(output.read_text())
    assert found["calls"] == 160  # whole steps of each interval
    assert len(found["intervals"]) == 20
    assert all(row["calls/s"] > 0 and row["process, bytes"] > 0 for row in found["intervals"])


@pytest.mark.parametrize(
    "sizes, speeds, memory, speed",
    [
        ([1000] * 20, [50] * 20, True, True),
        ([900, *[1000] * 19], [50] * 20, True, True),  # before the first quarter has ended
        ([1000] * 19 + [1015], [50] * 20, False, True),
        ([1000] * 20, [50] * 15 + [47] * 5, True, False),
    ],
)
def test_what_is_flat(sizes, speeds, memory, speed, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    endurance = importlib.import_module("endurance")
    rows = [
        {"calls/s": speed, "process, bytes": size << 20}
        for size, speed in zip(sizes, speeds, strict=True)
    ]
    assert endurance.flat(rows) == {"memory is flat": memory, "speed is flat": speed}
