"""Python's view of the package, for the built reference (mkdocs.yml names this extension)."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:(?=`)|(?<=:):$", re.MULTILINE)  # Sphinx's; Markdown would print it
SEVERAL = re.compile(r"^(    )(\w+), (\w+(?:, \w+)*)(: .*(?:\n {8}.*)*)", re.MULTILINE)


def each(match: re.Match[str]) -> str:
    """Turns ``a, b: text`` into an entry for each, which then has a type."""
    indent, first, others, text = match.groups()
    rest = [f"\n{indent}{name}: as ``{first}``." for name in others.split(", ")]
    return f"{indent}{first}{text}" + "".join(rest)


class Names(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SEVERAL.sub(each, ROLE.sub("", obj.docstring.value))

    def on_alias(self, *, alias: griffe.Alias, **_: Any) -> None:
        """my_ops.gemm is the function, not the module my_ops.ops.gemm that contains it."""
        if alias.resolved and alias.target.is_module and alias.name in alias.target.members:
            alias.target = alias.target[alias.name]
