"""What CONTRIBUTING.md forbids each folder of sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRINTS = r"printf|<iostream>|std::c(out|err)\b"
ALLOCATES = r"\bnew\b|malloc|std::(vector|string|map|unique_ptr|make_)|cudaMalloc"
FORBIDDEN = {
    "include": rf"torch/|<<<|\bthrow\b|{PRINTS}|{ALLOCATES}",
    "kernels": rf"torch/|\bthrow\b|{PRINTS}|{ALLOCATES}|cuda\w*Synchronize",
    "csrc": r"<<<\w",
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_sources_keep_to_their_folder(folder):
    files = sorted((ROOT / folder).iterdir())
    assert files
    found = [
        f"{file.name}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(FORBIDDEN[folder], line.split("//")[0])
    ]
    assert not found
