"""Fills in what the pages of the guide do not type.

<!-- operators -->             what every op does (op_table.py)
<!-- call NAME -->             one call of an op, drawn from the names in the code
<!-- measured SECTION -->      a table of performance.md
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from svg import Drawing  # noqa: E402

PICTURE = re.compile(
    r'<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="(.*)">\n'
    r'  <img src="(.*)" alt="(.*)">\n</picture>'
)
REFERENCE = re.compile(r"<!-- reference ([\w.]+) -->\n(.*?)<!-- end -->", re.DOTALL)
PERFORMANCE = (ROOT / "docs/performance.md").read_text()


def find(path: str, pattern: str) -> str:
    """The file and line of the only match."""
    lines = (ROOT / path).read_text().splitlines()
    hits = [f"{path}:{number}" for number, line in enumerate(lines, 1) if re.search(pattern, line)]
    if len(hits) != 1:
        raise ValueError(f"{path}: {len(hits)} lines match {pattern!r}, the drawing needs one")
    return hits[0]


def call(op: str) -> str:
    """The call of an elementwise op with one argument."""
    functor = "".join(part.capitalize() for part in op.split("_"))
    python, binding = "my_ops/ops/elementwise.py", "csrc/elementwise"
    cpu, cuda = "kernels/elementwise/elementwise_cpu.cpp", "kernels/elementwise/elementwise.cu"
    nodes = {
        "public": (f"my_ops.{op}", "public function", find(python, rf"^def {op}\(")),
        "gradient": (
            f"_{op}",
            "gradient, on the Autograd key",
            find(python, rf"^_{op} = register_gradient"),
        ),
        "schema": (f"my_ops::{op}", "schema", find("csrc/bindings.cpp", rf'm\.def\("{op}\(')),
        "cpu": (op, "binding: check, allocate", find(f"{binding}_cpu.cpp", rf"^Tensor {op}\(")),
        "cuda": (
            op,
            "binding: check, allocate, device, stream",
            find(f"{binding}_cuda.cpp", rf"^Tensor {op}\("),
        ),
        "cpu_launcher": (f"cpu::{op}", "launcher", find(cpu, rf"void {op}\(")),
        "cuda_launcher": (f"cuda::{op}", "launcher", find(cuda, rf"^\S+ my_ops::cuda::{op}\(")),
        "cpu_kernel": (functor, "what map does to an element", find(cpu, rf"^struct {functor} {{")),
        "cuda_kernel": (
            functor,
            "what map_kernel does to an element",
            find(cuda, rf"^struct {functor} {{"),
        ),
    }
    drawing = Drawing(720, 500, f"How a call of my_ops.{op} travels")
    places = {
        **{"public": (210, 0), "gradient": (210, 85), "schema": (210, 170)},
        **{"cpu": (0, 270), "cpu_launcher": (0, 355), "cpu_kernel": (0, 440)},
        **{"cuda": (420, 270), "cuda_launcher": (420, 355), "cuda_kernel": (420, 440)},
    }
    for key, (name, what, at) in nodes.items():
        x, y = places[key]
        drawing.rect(x, y, 300, 60, "grey", "line")
        for row, (words, look) in enumerate(
            ((name, {"bold": True}), (what, {"size": 12}), (at, {"size": 11, "color": "faint"}))
        ):
            drawing.text(x + 150, y + 17 + 18 * row, words, **look)
    for x, y in ((360, 60), (360, 145), (150, 330), (150, 415), (570, 330), (570, 415)):
        drawing.arrow((x, y), (x, y + 25))
    for side, label in ((150, "CPU"), (570, "CUDA")):
        drawing.arrow((360, 230), (360, 250), (side, 250), (side, 270))
        drawing.text((side + 360) / 2, 245, label, size=12)
    return f"<div>\n{drawing.inline()}</div>"


def measured(section: str) -> str:
    """The table in performance.md, which measured.py writes."""
    match = re.search(rf"<!-- {section} -->\n(.*?)<!-- end -->", PERFORMANCE, re.DOTALL)
    if match is None:
        raise ValueError(f"performance.md has no table {section}")
    return match[1]


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
    sys.path.insert(0, str(ROOT / "tools"))  # MkDocs removes the first one again
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
    markdown = re.sub("<!-- operators -->", lambda _: operators(), markdown)
    markdown = re.sub(r"<!-- call (\w+) -->", lambda match: call(match[1]), markdown)
    return re.sub(r"<!-- measured (\w+) -->", lambda match: measured(match[1]), markdown)
