"""The package as Python has it, for the built reference (mkdocs.yml names this extension)."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:(?=`)")  # of Sphinx: Markdown would print it


class Names(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub("", obj.docstring.value)

    def on_alias(self, *, alias: griffe.Alias, **_: Any) -> None:
        """my_ops.gemm is the function, not the module my_ops.ops.gemm that holds it."""
        if alias.resolved and alias.target.is_module and alias.name in alias.target.members:
            alias.target = alias.target[alias.name]
