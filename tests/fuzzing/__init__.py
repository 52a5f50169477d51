"""Random calls of every op and layer, compared with the float64 specifications: tests/fuzz.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "layers"))  # which has own_cells
