"""The recurrent cells: one engine for all of them, and a module for each.

A cell's module holds its description (``_cell.py``), its public functions and its layers. From the
description ``_ops.define`` makes what the dispatcher needs of its ops; the layers are built on
``_layers.py``.
"""
