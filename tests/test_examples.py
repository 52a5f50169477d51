"""The programs of examples/, run as their READMEs say."""

import subprocess
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def output_of(program, *arguments, timeout=300):
    command = [sys.executable, EXAMPLES / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ctypes_call():
    lines = output_of("ctypes_call/ctypes_call.py").splitlines()
    assert lines[:2] == [
        "NumPy: [0.1966 0.25   0.105 ]",
        "error: a size is below 0, or an array is null where the size is not 0",
    ]
    assert lines[2:] == ["CUDA: [0.1966 0.25   0.105 ]"] * torch.cuda.is_available()
