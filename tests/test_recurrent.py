"""What my_ops.recurrent makes of a cell's description, for cells unlike LLTM."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_another_cell_fits(name):
    """In a process of its own: its ops are no ops of my_ops."""
    command = [sys.executable, Path(__file__).with_name("recurrent_cells.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("fits"), done.stderr
