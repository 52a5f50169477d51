"""Fills in what the pages of the guide do not type.

<!-- operators -->             what every op does (op_table.py)
<!-- reference MODULE -->     the entries of the names in the list that follows
<picture> ... </picture>      both of its images, of which the site shows that of its own scheme

If a page names a test, as in `tests/test_x.py::test_y`, and there is none, the build fails. It also
fails if a public name in the reference lacks its entry, signature, a section of its docstring or a
type, if an entry shows markup of Sphinx, or if a page loads a script from the network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/docs"))

PICTURE = re.compile(
    r'<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="(.*)">\n'
    r'  <img src="(.*)" alt="(.*)">\n</picture>'
)
REFERENCE = re.compile(r"<!-- reference ([\w.]+) -->\n(.*?)<!-- end -->", re.DOTALL)


# Modules have one entry, of their docstring or of everything in them.
MODULES = {
    "distributed": "\n      members: []",
    "reference": "\n      show_if_no_docstring: true",
}


def entries(match: re.Match[str]) -> str:
    """mkdocstrings' directive for each name in a list of the reference."""
    module, listed = match.groups()
    directives = []
    for name in re.findall(r"^- `(\w+)`: ", listed, re.MULTILINE):
        directive = f"::: {module}.{name}\n"
        if name in MODULES:
            directive += "    options:\n      show_root_heading: false\n"
            directive += f"      show_root_toc_entry: false{MODULES[name]}\n"
        directives.append(directive)
    return "\n".join(directives)


def operators() -> str:
    sys.path.insert(0, str(ROOT / "tools/docs"))  # MkDocs removes the first one again
    import op_table

    return op_table.main()


def check_tests(page: str, markdown: str) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", markdown):
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE):
            raise ValueError(f"{page}: no test {path}::{name}")


SECTIONS = {"Args": "Parameters", "Returns": "Returns", "Raises": "Raises"}  # their headings


def check_reference(html: str) -> None:
    import my_ops
    from my_ops import reference

    public = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (my_ops, my_ops.nn)
        for name in module.__all__
    }
    public |= {f"my_ops.{kind.__name__}": kind for kind in (my_ops.Conversion, my_ops.PackedWeight)}
    public |= {
        f"my_ops.reference.{name}": thing
        for name, thing in vars(reference).items()
        if getattr(thing, "__module__", "") == reference.__name__ and not name.startswith("_")
    }
    # These are described on the page, or have a section of it.
    for name in ("my_ops.cmake_prefix_path", "my_ops.nn", "my_ops.reference"):
        del public[name]
    parts = re.split(r'<h\d id="(my_ops\.[\w.]+)"', html)
    documented = dict(zip(parts[1::2], parts[2::2], strict=True))
    missing = public.keys() - documented.keys()
    if missing:
        raise ValueError(f"reference.md has no entry for {', '.join(sorted(missing))}")
    for name, thing in public.items():
        entry = documented[name]
        called = not isinstance(thing, type) or "__init__" in vars(thing)
        if called and "doc-signature" not in entry:
            raise ValueError(f"reference.md shows no signature of {name}")
        for word, heading in SECTIONS.items():
            said = re.search(rf"^ *{word}:$", thing.__doc__ or "", re.MULTILINE)
            if said and f'<span class="doc-section-title">{heading}:' not in entry:
                raise ValueError(f"reference.md shows no {heading} of {name}")
        for row in re.findall(r'<tr class="doc-section-item">(.*?)</tr>', entry, re.DOTALL):
            cells = [re.sub("<.*?>", "", cell).strip() for cell in re.split("<td>", row)[1:]]
            if len(cells) == 4 and not cells[1]:
                raise ValueError(f"reference.md has no type for {cells[0]} of {name}")
    if markup := re.search(r":\w+:<code>.*?</code>|::\s*</p>", html):
        raise ValueError(f"reference.md shows {markup[0]}")


def on_page_content(html: str, page: Any, **_: Any) -> None:
    if page.file.src_uri == "reference.md":
        check_reference(html)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    if script := re.search(r'<script[^>]+src="https?:[^"]+"', output):
        raise ValueError(f"{page.file.src_uri} needs the network for {script[0]}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    check_tests(page.file.src_uri, markdown)
    markdown = REFERENCE.sub(entries, markdown)
    markdown = PICTURE.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", markdown)
    return re.sub("<!-- operators -->", lambda _: operators(), markdown)
