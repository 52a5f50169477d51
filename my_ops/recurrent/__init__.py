"""The recurrent cells: one engine for all of them, and a module for each.

A cell's module holds its description (``_cell.py``), its public functions and its layers. From the
description ``_ops.define`` makes what the dispatcher needs of its ops. What layers do around their
ops is in ``_calls.py``; with torch's parameters on the layer itself they are built on
``_torch_layers.py``, with a module per layer and direction on ``_layers.py``.
"""
