"""The programs that count what the suite reaches and what a long run costs."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
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


# Two releases of cuobjdump.
@pytest.mark.parametrize("prefixes", [("", ""), ("STT_", "STO_")])
def test_kernels_never_launched_are_named(prefixes, tmp_path, monkeypatch):
    tool, names, output = (tmp_path / name for name in ("cuobjdump", "names", "found.json"))
    symbols = SYMBOLS.replace("FUNC", f"{prefixes[0]}FUNC").replace("ENTRY", f"{prefixes[1]}ENTRY")
    tool.write_text(symbols)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    # As the profiler writes them; and one of torch's.
    names.write_text("void add<float>(float*)\n(anonymous namespace)::fill(int*)\ncublas\n")
    command = [sys.executable, str(ROOT / "tools/testing/kernel_coverage.py"), "_C.so", str(names)]
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True)
    found = json.loads(output.read_text())
    assert (found["compiled"], found["launched"]) == (3, 2)
    assert found["never launched"] == ["void add<double>(double*)"]
    assert found["kernels"] == [
        {"kernel": "add", "compiled": 2, "launched": 1},
        {"kernel": "fill", "compiled": 1, "launched": 1},
    ]


def test_launched_kernels_are_recorded(cuda, run_pytest, tmp_path):
    one = (
        str(ROOT / "tests/ops/test_elementwise.py"),
        "-k",
        "test_fill_index_values and cuda and 31",
    )
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
    tool = str(ROOT / "tools/testing/line_coverage.py")
    subprocess.run([sys.executable, tool, str(python), str(tmp_path), str(output)], check=True)
    (found,) = (row for row in json.loads(output.read_text())["coverage"] if row["files"])
    assert (found["group"], found["lines"], found["lines reached"]) == ("csrc", 5, 5)
    assert found["branches"] > found["branches reached"] > 0


def test_endurance(tmp_path, device):
    output = tmp_path / "found.json"
    program = str(ROOT / "benchmarks/endurance.py")
    command = [sys.executable, program, "--device", device, "--calls", "300"]
    subprocess.run([*command, "--output", str(output)], check=True)
    found = json.loads(output.read_text())
    assert found["calls"] == 480  # whole steps of each interval
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


def test_every_family_of_kernels_is_sanitized(cuda, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools/testing"))
    sanitize = importlib.import_module("sanitize")
    _, names = sanitize.launched(tmp_path)
    assert sanitize.not_reached(names) == ["probe_kernel"]


def test_what_the_sanitizers_leave_out_is_called(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/testing"))
    without = importlib.import_module("sanitize").WITHOUT
    names = [name for name, _ in importlib.import_module("families").cases("cpu")]
    assert all(any(part in name for name in names) for parts in without.values() for part in parts)


RACECHECK = """========= COMPUTE-SANITIZER
call: gemm
========= Error: Race reported between Write access at void my_ops::cuda::a_kernel<int>(int)+0x10
=========     and Read access at void my_ops::cuda::a_kernel<int>(int)+0x20 [4 hazards]
=========
call: lstm
========= Error: Race reported between Write access at nvjet(int)+0x10
=========     and Read access at nvjet(int)+0x20 [1 hazards]
=========
calls: 2
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
CRASHED = """========= COMPUTE-SANITIZER
call: gru
========= Host API uninitialized memory access
=========
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""


def test_mutants_meet_every_test_of_the_code(monkeypatch):
    """A file that tools/testing/mutants.py does not name would let its mutants live."""
    monkeypatch.syspath_prepend(str(ROOT / "tools/testing"))
    mutants = pytest.importorskip("mutants", reason="needs cosmic-ray", exc_type=ImportError)
    named = {name for names in mutants.TESTS.values() for name in names.split()}
    folders = ("ops", "layers", "integration")
    files = {path.stem for folder in folders for path in (ROOT / "tests" / folder).glob("test_*")}
    of_other_code = {"op_table", "plan"}  # a tool, and what is not compiled for the CPU's kernels
    assert {f"test_{name}" for name in named | of_other_code} >= files
    assert [name for name in named if not mutants.test_files([name])] == []


def test_what_a_sanitizer_says_is_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/testing"))
    sanitize = importlib.import_module("sanitize")
    found = sanitize.summary("racecheck", [RACECHECK, CRASHED], 3.04)
    reports = found.pop("reports")
    assert found == {
        "tool": "racecheck",
        "calls": 2,
        "ended in": ["gru"],
        "reports in my_ops": 2,
        "reports elsewhere": 3,
        "seconds": 3.0,
    }
    assert [report["call"] for report in reports] == ["gemm", "gru", "lstm", "gru", "gru"]
    assert reports[0]["report"].endswith("[4 hazards]")


def test_digests_of_results(cuda, tmp_path):
    rows = []
    for name in ("one.json", "two.json"):
        program = str(ROOT / "benchmarks/digests.py")
        command = [sys.executable, program, "--calls", "8", "--output", str(tmp_path / name)]
        subprocess.run(command, check=True)
        rows.append(json.loads((tmp_path / name).read_text())["digests"])
    assert rows[0] == rows[1]
    assert all(row["kernels"] > 0 for row in rows[0])


def test_launches_of_each_call(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    digests = importlib.import_module("digests")
    about = {"grid": [1, 2, 1], "block": [64, 1, 1], "shared memory": 16}

    def event(at, name, **other):
        return {"cat": "kernel", "ts": at, "name": name, "args": about, **other}

    events = [event(3, "b"), event(2, "void at::spin_kernel(long)"), event(1, "a")]
    events += [event(4, "spin_kernel"), event(5, "a"), event(2.5, "copy", cat="gpu_memcpy")]
    (tmp_path / "trace").write_text(json.dumps({"traceEvents": events}))
    sizes = "[[1, 2, 1], [64, 1, 1], 16]"
    assert digests.launches(tmp_path / "trace") == [[f"a {sizes}"], [f"b {sizes}"], [f"a {sizes}"]]
    changed = torch.tensor([1.0, -0.0])
    same = digests.of_results((torch.tensor([[1.0, 0.0]]), changed))
    assert same == digests.of_results((torch.tensor([[1.0], [0.0]]).mT, changed))
    assert same != digests.of_results((torch.tensor([[1.0, 0.0]]), changed.abs()))


def test_tables_of_what_two_gpus_and_the_sanitizers_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools/docs"))
    reliability = importlib.import_module("measured_reliability")
    for name in ("coverage", "kernels-nvidia-h200"):
        shutil.copy(ROOT / f"benchmarks/results/{name}.json", tmp_path)
    assert reliability.Reliability(tmp_path).same_bits() == ""
    assert reliability.Reliability(tmp_path).sanitizers() == ""
    found = {
        "h100": [("gemm a", "1", "2"), ("gemm b", "1", "2"), ("gemm c", "1", "2")],
        "h200": [("gemm a", "1", "2"), ("gemm b", "3", "4"), ("gemm c", "3", "2")],
    }
    for gpu, cases in found.items():
        about = {"gpu": gpu.upper(), "date": "today", "commit": "abcdef01"}
        keys = "case", "results", "launches"
        digests = [dict(zip(keys, case, strict=True)) for case in cases]
        record = {"environment": about, "digests": digests}
        (tmp_path / f"digests-{gpu}.json").write_text(json.dumps(record))
    record = {"environment": about, "compute-sanitizer": "2025.3.1", "calls": 3}
    record |= {"families": 27, "not reached": ["probe_kernel"]}
    tool = {"tool": "racecheck", "calls": 2, "reports in my_ops": 0, "reports elsewhere": 1}
    record["tools"] = [tool | {"seconds": 3.2, "ended in": ["gru"]}]
    (tmp_path / "sanitizer-h200.json").write_text(json.dumps(record))
    tables = reliability.Reliability(tmp_path)
    same, sanitized = (
        [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
        for text in (tables.same_bits(), tables.sanitizers())
    )
    assert same[:6] == ["H100 and H200", "`gemm`", "3", "2", "1", "1"]
    assert sanitized[:8] == ["H200", "racecheck", "2 of 3", "26 of 27", "0", "1", "3", "gru"]


def test_what_a_run_of_the_suite_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools/testing"))
    record_tests = importlib.import_module("record_tests")
    (tmp_path / "junit.xml").write_text("""<testsuites><testsuite>
      <testcase classname="tests.test_gemm" name="test_values[cpu-3]" time="1.5"/>
      <testcase classname="tests.test_faults_cuda" name="test_a_capture[cuda]" time="60"/>
      <testcase classname="tests.test_faults_cuda" name="test_a_fork"><skipped/></testcase>
      <testcase classname="tests.test_cuda" name="test_a_refused_launch_of_a_layer[steps]"/>
      <testcase classname="tests.test_cuda" name="test_a_refused_launch_of_a_layer[grid]">
        <failure/></testcase>
      <testcase classname="tests.test_cuda" name="test_streams"><failure/></testcase>
      </testsuite></testsuites>""")
    (tmp_path / "alone.xml").write_text("""<testsuites><testsuite>
      <testcase classname="tests.test_cuda" name="test_streams" time="1"/>
      </testsuite></testsuites>""")
    found = record_tests.recorded([tmp_path / "junit.xml", tmp_path / "alone.xml"])
    assert [found[kind] for kind in ("passed", "failed", "skipped")] == [4, 1, 1]
    assert found["seconds in tests"] == 62.5
    assert found["ran again"] == ["tests.test_cuda::test_streams"]
    assert found["names of failed"] == ["tests.test_cuda::test_a_refused_launch_of_a_layer[grid]"]
    assert found["faults"] == [
        {"test": "test_cuda::test_a_refused_launch_of_a_layer", "passed": 1, "failed": 1},
        {"test": "test_faults_cuda::test_a_capture", "passed": 1, "failed": 0},
    ]
