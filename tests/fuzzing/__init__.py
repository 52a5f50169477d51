"""Random calls of every op and layer, compared with the float64 specifications: tests/fuzz.py."""
