"""The claims of SECURITY.md: no file, network or process at import and call; checkpoints of
tensors."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_package import MODULE, PACKAGE, Elf

import my_ops

HERE = Path(__file__).parents[1]
CALLS = """
import samples

def call_all(which):
    for op in samples.DIFFERENTIABLE:
        for dtype in op.dtypes:
            tensors = samples.leaves(op.tensors(5, dtype, "cpu"))
            results = samples.as_tuple(getattr(op, which)(*tensors))
            used = [r for r in results if r.requires_grad]
            if used:
                inputs = [t for t in tensors if t.requires_grad]
                torch.autograd.grad(used, inputs, used, allow_unused=True)

call_all("reference")  # torch loads parts of itself when they are first used
"""

# For Python, its libraries, and what they do through Python's functions.
AUDITED = """
import json, sys
import torch
seen = []
def audit(event, arguments):
    if stage and event.split(".")[0] in ("open", "socket", "subprocess", "os", "shutil", "ctypes",
                                         "urllib", "http", "ftplib", "tempfile", "mmap"):
        seen.append([stage, event, *map(str, arguments)])
sys.addaudithook(audit)
stage = "import"
import my_ops
stage = ""
{calls}
stage = "call"
call_all("call")
stage = ""
print(json.dumps(seen))
"""

# For every library in the process, by system call.
TRACED = """
import os
import torch
torch.zeros(1).sigmoid()  # at its first computation torch reads what the processor can do
os.path.exists("/stage-import")
import my_ops
os.path.exists("/stage-between")
{calls}
os.path.exists("/stage-call")
call_all("call")
os.path.exists("/stage-end")
"""
SYSTEM_CALLS = "%file,%network,execve,fork,vfork"
READING = ["openat", "open", "newfstatat", "stat", "statx", "lstat", "access", "getcwd"]
READING += ["readlink", "readlinkat"]


def run(script, *before):
    done = subprocess.run(
        [*before, sys.executable, "-B", "-c", script.format(calls=CALLS)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(HERE)]),
            "MY_OPS_CACHE": str(HERE / "nothing"),  # no GPU was tuned
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_the_packages(path):
    """A file of Python, torch or my_ops, or the record of what is installed."""
    roots = {PACKAGE, Path(torch.__file__).parent.parent, Path(sys.prefix), Path(sys.base_prefix)}
    roots.add(PACKAGE.parent / "my_ops.egg-info")  # for a package that was built in place
    return any(Path(path).resolve().is_relative_to(root.resolve()) for root in roots)


def test_no_access_by_python():
    seen = json.loads(run(AUDITED))
    assert [event for event in seen if event[0] == "call"] == []
    imported = [event[1:] for event in seen]
    assert {event for event, *_ in imported} <= {
        "open",
        "os.listdir",
        "os.scandir",
        "ctypes.dlopen",
        "ctypes.dlsym",
    }
    for event, path, *mode in imported:
        if event == "ctypes.dlsym":  # in a library that is open
            continue
        listed = event in ("os.listdir", "os.scandir")  # by the import system, for all of sys.path
        assert listed or of_the_packages(path), (event, path)
        assert event != "open" or mode[0] in ("r", "rb", "None"), (path, mode)
    assert any(path == str(MODULE) for _, path, *_ in imported)  # shows that the hook sees it


def can_trace():
    strace = shutil.which("strace")
    return (
        strace and subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode == 0
    )


@pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")
def test_no_access_by_any_library(tmp_path):
    run(TRACED, "strace", "-f", "-o", str(tmp_path / "trace"), "-e", f"trace={SYSTEM_CALLS}")
    stages = re.split(r".*/stage-(\w+)\".*\n", (tmp_path / "trace").read_text())
    calls = dict(zip(stages[1::2], stages[2::2], strict=True))
    assert calls["call"] == ""
    imported = calls["import"].splitlines()
    assert any(f'"{MODULE}"' in line for line in imported)
    for line in imported:
        found = re.match(r"\d+ +(\w+)\(.*?\"(.*?)\"(.*)", line)
        assert found, line
        name, path, rest = found.groups()
        assert name in READING, line
        assert "O_WRONLY" not in rest and "O_RDWR" not in rest, line
        opened = name.startswith("open") and not re.search("ENOENT|O_DIRECTORY", rest)
        assert not opened or of_the_packages(path), line


FOR_CUDA = json.loads((PACKAGE / "_build.json").read_text())["nvcc"] is not None
HARMLESS = r"mem(cmp|cpy|move|set)|str(cmp|len)|dlsym|__(cxa|gmon|gxx|stack_chk)_\w+"
HARMLESS += r"|_(ITM|Unwind)_\w+|__libc_single_threaded|pthread_mutex_(un)?lock"
HARMLESS += r"|_Z(?!.*(fstream|filebuf))\w+"


@pytest.mark.skipif(FOR_CUDA, reason="the module holds NVIDIA's runtime, which opens the driver")
def test_the_module_knows_no_function_of_files_or_networks():
    wanted = [s.name for s in Elf(MODULE).symbols() if not s.defined]
    others = [name for name in wanted if not re.match(r"aoti_torch_|torch_", name)]
    assert len(others) < len(wanted)
    assert [name for name in others if not re.fullmatch(HARMLESS, name)] == []


def layers():
    for name in my_ops.nn.__all__:
        cls = getattr(my_ops.nn, name)
        if name == "RoundSTE":
            yield cls()
        elif name == "LinearActivation":
            yield cls(3, 4, activation="gelu")
        else:
            yield cls(3, 4)


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: type(layer).__name__)
def test_checkpoints_load_without_running_code(layer, tmp_path):
    optimizer = torch.optim.AdamW([*layer.parameters(), torch.nn.Parameter(torch.zeros(1))])
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for name, value in layer.state_dict().items():
        assert torch.equal(loaded["layer"][name], value)
    layer.load_state_dict(loaded["layer"])
    optimizer.load_state_dict(loaded["optimizer"])
