"""The project's page on an index: README.md with links that work there, and the project's URLs.

MY_OPS_HOME is the repository's URL (https://github.com/OWNER/NAME); the release job sets it.
Without it the README is used as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def absolute(text: str, home: str, tag: str) -> str:
    """The text with its relative links pointing to files of the repository, at a tag."""
    relative = r"(?![\w+]+:|#|/)"
    text = re.sub(rf"(\]\(){relative}", rf"\1{home}/blob/{tag}/", text)
    return re.sub(rf"(\b(?:src|srcset)=\"){relative}", rf"\1{home}/raw/{tag}/", text)


def arguments(readme: Path, version: str, home: str | None) -> dict[str, Any]:
    """Arguments of setup()."""
    text = readme.read_text(encoding="utf-8")
    urls = {}
    if home:
        text = absolute(text, home, f"v{version}")
        urls = {
            "Source": home,
            "Documentation": f"{home}/blob/v{version}/docs/index.md",
            "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
            "Issues": f"{home}/issues",
        }
    return {
        "long_description": text,
        "long_description_content_type": "text/markdown",
        "project_urls": urls,
    }
