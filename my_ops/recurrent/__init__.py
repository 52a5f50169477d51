"""The recurrent cells: one engine for all of them, and a module for each.

A cell's module has its description (``_cell.py``), its public functions and its layers. From the
description, ``_ops.define`` makes what the dispatcher needs for its ops. ``_calls.py`` has what
layers do around their ops. Layers that hold torch's parameters themselves are built on
``_torch_layers.py``; layers with a module per layer and direction are built on ``_layers.py``.
"""
