"""Random calls of every op and layer, judged by the float64 specifications: tests/fuzz.py."""
