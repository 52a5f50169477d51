from my_cells.units import minimal

__all__ = ["minimal"]
