"""Runs the Python of the pages. `--8<-- "file"` stands for the file, as in the built pages."""

import os
import re
from pathlib import Path

from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).resolve().parents[1]


def expand(match):
    return (ROOT / match[1]).read_text()


class Page(Document):
    @classmethod
    def parse(cls, path, *parsers, encoding="utf-8"):
        text = re.sub(r'--8<-- "(.*)"\n', expand, Path(path).read_text(encoding))
        page = cls(text, path)
        for parser in parsers:
            for region in parser(page):
                page.add(region)
        return page


def enter(namespace):
    namespace["_folder"] = os.getcwd()
    os.chdir(ROOT / "examples/first_operator")


def leave(namespace):
    os.chdir(namespace["_folder"])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["*.md"],
    document_types={".md": Page},
    setup=enter,
    teardown=leave,
).pytest()
