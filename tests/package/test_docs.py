"""What the pages say about the plan, and their drawings, must equal what would be written now."""

import argparse
import importlib
import re
import sys
from pathlib import Path

import pytest

from my_ops import _explain

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (REPOSITORY / "docs").is_dir(), reason="needs the repository")

sys.path.insert(0, str(REPOSITORY / "tools/docs"))

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SHOWN = [
    (page.name, *shown)
    for page in PAGES
    for shown in re.findall(
        r"^( *)\$ python -m my_ops explain (.*)\n((?:\1[^$\s`].*\n|\1  .*\n)+)",
        page.read_text(),
        re.MULTILINE,
    )
]


@pytest.mark.parametrize("page, indent, asked, said", SHOWN)
def test_plans_are_those_of_the_plan(page, indent, asked, said):
    parser = argparse.ArgumentParser()
    _explain.add_arguments(parser)
    answer = _explain.explain(parser.parse_args(asked.split()))
    assert answer.splitlines() == [line.removeprefix(indent) for line in said.splitlines()]


def test_some_plans_are_shown():
    assert {page for page, *_ in SHOWN} >= {"is_it_for_me.md", "which_kernel.md"}


@pytest.mark.parametrize(
    "page, heading", [("README.md", "Fast float32 without"), ("docs/fast_fp32.md", "Fast float32")]
)
def test_pages_of_the_switch_begin_with_its_gpus(page, heading):
    """Those whose plan does not leave a large product to the library."""
    parser = argparse.ArgumentParser()
    _explain.add_arguments(parser)
    asked = "gemm 4096 4096 4096 --gpu"
    takes = [
        name
        for name in _explain.GPUS
        if "library" not in _explain.explain(parser.parse_args([*asked.split(), name]))
    ]
    assert takes
    text = (REPOSITORY / page).read_text().partition(f"# {heading}")[2].partition("```python")[0]
    assert [name for name in takes if name.upper() not in text] == []


def test_the_first_page_begins_with_what_there_is_to_gain():
    text = (REPOSITORY / "docs/index.md").read_text()
    parts = "programs_headline", "<picture>", "recurrent_headline", "```python", "`d_sigmoid`"
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("tool", ["which_kernel", "drawings"])
def test_what_tools_write_is_current(tool):
    """If this fails, run python tools/docs/which_kernel.py, or drawings.py."""
    files = importlib.import_module(tool).files()
    assert len(files) > 2
    for path, content in files.items():
        assert path.read_text() == content, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_read_in_plain_markdown(page):
    """Each picture stands once, in the form that tools/docs/hooks.py turns into the site's two
    images, and both files are there. Entries of the reference are lists. Tests that it names are
    there."""
    hooks = importlib.import_module("hooks")
    text = page.read_text()
    hooks.check_tests(page.name, text)
    pictures = hooks.PICTURE.findall(text)
    assert "#only-" not in text
    assert not re.search("^:::", text, re.MULTILINE)  # mkdocstrings' directives
    assert text.count("<picture>") == len(pictures)
    filled = r"<!-- (?:(?:reference )?[\w.]+ -->\n.+?<!-- end -->|operators -->|now .*? -->[\d.])"
    assert "<!--" not in re.sub(filled, "", text, flags=re.DOTALL)  # holes that the site fills
    for dark, light, words in pictures:
        assert words
        assert light == dark.replace("-dark.svg", "-light.svg")
        assert (page.parent / dark).is_file()
        assert (page.parent / light).is_file()


def test_every_tool_is_listed_by_its_job():
    folder = REPOSITORY / "tools"
    text = (folder / "README.md").read_text()
    parts = re.split(r"^## `(\w+)/`$", text, flags=re.MULTILINE)[1:]
    listed = {
        name: set(re.findall(r"`([\w.]+)/?`", part.partition("| for |")[2]))
        for name, part in zip(parts[::2], parts[1::2], strict=True)
    }
    written = ("__pycache__", "README")
    rooms = [path for path in folder.iterdir() if not path.name.startswith(written)]
    tools = {
        room.name: {path.name for path in room.iterdir() if not path.name.startswith(written)}
        for room in rooms
    }
    tools["requirements"] = {path.stem for path in folder.glob("requirements/*.in")}
    assert listed == tools


def test_gallery_shows_what_its_programs_draw():
    programs = (REPOSITORY / "examples").glob("*.py")
    drawing = {path.stem for path in programs if "plots.save(" in path.read_text()}
    page = (REPOSITORY / "docs/gallery.md").read_text()
    shown = re.findall(r"^!\[.+\]\(images/(.+)\.png\)$", page, re.MULTILINE)
    assert len(shown) == 5
    assert set(shown) == drawing
    for name in drawing:
        assert f"python examples/{name}.py" in page
        image = (REPOSITORY / f"docs/images/{name}.png").read_bytes()
        assert len(image) < 60_000
        assert b"tEXt" not in image  # nothing of the machine that drew it


def test_pages_explain_every_reason_of_the_report():
    header = (REPOSITORY / "csrc/fast_fp32.h").read_text()
    reasons = set(re.findall(r'^  F\(k\w+, "(.+?)"\)', header, re.MULTILINE))
    assert len(reasons) > 5
    named = set()
    for page in ("attention", "convolutions"):
        text = (REPOSITORY / f"docs/{page}.md").read_text()
        rows = text.partition("| the report says | what |\n")[2].partition("\n\n")[0]
        named |= set(re.findall(r"^\| `(.+?)` \|", rows, re.MULTILINE))
    assert named == reasons
