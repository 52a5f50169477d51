"""What the pages of the guide read instead of typing it.

<!-- operators -->             what every op does (op_table.py)
<!-- call NAME -->             one call of an op, drawn from the names in the code
<!-- measured SECTION -->      a table of performance.md

A page that names a test, as in `tests/test_x.py::test_y`, fails the build where there is none. So
does the reference where a public name has no entry, or an entry shows a role of Sphinx.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PERFORMANCE = (ROOT / "docs/performance.md").read_text()


def find(path: str, pattern: str) -> str:
    """The place of the one line that matches."""
    lines = (ROOT / path).read_text().splitlines()
    hits = [f"{path}:{number}" for number, line in enumerate(lines, 1) if re.search(pattern, line)]
    if len(hits) != 1:
        raise ValueError(f"{path}: {len(hits)} lines match {pattern!r}, the drawing needs one")
    return hits[0]


def call(op: str) -> str:
    """Of an elementwise op with one argument."""
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
    boxes = [
        f'  {key}["<b>{name}</b><br>{what}<br><small>{at}</small>"]'
        for key, (name, what, at) in nodes.items()
    ]
    arrows = [
        "  public --> gradient --> schema",
        "  schema -- CPU --> cpu --> cpu_launcher --> cpu_kernel",
        "  schema -- CUDA --> cuda --> cuda_launcher --> cuda_kernel",
    ]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```"])


def measured(section: str) -> str:
    """As in performance.md, which measured.py writes."""
    match = re.search(rf"<!-- {section} -->\n(.*?)<!-- end -->", PERFORMANCE, re.DOTALL)
    if match is None:
        raise ValueError(f"performance.md has no table {section}")
    return match[1]


def operators() -> str:
    sys.path.insert(0, str(ROOT / "tools"))
    import op_table

    return op_table.main()


def check_tests(page: str, markdown: str) -> None:
    for path, name in re.findall(r"(tests/\w+\.py)::(\w+)", markdown):
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE):
            raise ValueError(f"{page}: no test {path}::{name}")


def check_reference(html: str) -> None:
    import my_ops

    public = [
        f"{module.__name__}.{name}" for module in (my_ops, my_ops.nn) for name in module.__all__
    ]
    documented = set(re.findall(r'<h\d id="(my_ops\.[\w.]+)"', html))
    # Said on the page in words, or a section of it.
    missing = {*public} - documented - {"my_ops.cmake_prefix_path", "my_ops.nn", "my_ops.reference"}
    if missing:
        raise ValueError(f"reference.md has no entry for {', '.join(sorted(missing))}")
    if role := re.search(r":\w+:<code>.*?</code>", html):
        raise ValueError(f"reference.md shows {role[0]}")


def on_page_content(html: str, page: Any, **_: Any) -> None:
    if page.file.src_uri == "reference.md":
        check_reference(html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    check_tests(page.file.src_uri, markdown)
    markdown = re.sub("<!-- operators -->", lambda _: operators(), markdown)
    markdown = re.sub(r"<!-- call (\w+) -->", lambda match: call(match[1]), markdown)
    return re.sub(r"<!-- measured (\w+) -->", lambda match: measured(match[1]), markdown)
