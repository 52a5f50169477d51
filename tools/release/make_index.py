# /// script
# requires-python = ">=3.10"
# dependencies = ["packaging"]
# ///
"""Writes the package indexes for a folder of wheels: make_index.py FOLDER

There is one index for each local version, such as FOLDER/cu130/ for X.Y.Z+cu130, and FOLDER/simple/
for the plain wheels. In a single index, pip would take the highest local version if none is
requested. Each has HTML as in PEP 503 and index.json as in PEP 691, with SHA-256 hashes and each
wheel's METADATA (PEP 658). Any web server can serve them:
pip install my_ops==X.Y.Z+cu130 --extra-index-url URL/cu130/
"""

from __future__ import annotations

import functools
import hashlib
import html
import http.server
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename

VERSION = "1.1"  # of the JSON format


def describe(wheel: Path) -> dict[str, Any]:
    """Writes the wheel's METADATA beside it, and returns its entry of PEP 691."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name)
    wheel.with_name(wheel.name + ".metadata").write_bytes(metadata)
    return {
        "filename": wheel.name,
        "url": f"../../{wheel.name}",
        "hashes": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
        "requires-python": BytesParser().parsebytes(metadata)["Requires-Python"],
        "core-metadata": {"sha256": hashlib.sha256(metadata).hexdigest()},
        "size": wheel.stat().st_size,
    }


def link(file: dict[str, Any]) -> str:
    attributes = {
        "href": f"{file['url'].replace('+', '%2B')}#sha256={file['hashes']['sha256']}",
        "data-requires-python": file["requires-python"],
        "data-core-metadata": f"sha256={file['core-metadata']['sha256']}",
    }
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items() if value)
    return f"<a {text}>{html.escape(file['filename'])}</a>"


def write(folder: Path, title: str, links: list[str], data: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["<!DOCTYPE html>", '<html><head><meta charset="utf-8">']
    lines += [f'<meta name="pypi:repository-version" content="{VERSION}">']
    lines += [f"<title>{title}</title></head><body>", *(f"{item}<br>" for item in links)]
    (folder / "index.html").write_text("\n".join([*lines, "</body></html>", ""]))
    meta = {"api-version": VERSION}
    (folder / "index.json").write_text(json.dumps({"meta": meta, **data}, indent=1) + "\n")


def make_index(folder: Path) -> None:
    wheels = [(wheel, *parse_wheel_filename(wheel.name)[:2]) for wheel in folder.glob("*.whl")]
    if not wheels:
        raise SystemExit(f"make_index: no wheel in {folder}")
    for variant in {version.local for _, _, version in wheels}:
        root = folder / (variant or "simple")
        chosen = [entry for entry in sorted(wheels) if entry[2].local == variant]
        projects = sorted({canonicalize_name(name) for _, name, _ in chosen})
        for project in projects:
            mine = [
                (wheel, str(v)) for wheel, name, v in chosen if canonicalize_name(name) == project
            ]
            files = [describe(wheel) for wheel, _ in mine]
            data = {"name": project, "versions": sorted({v for _, v in mine}), "files": files}
            write(root / project, project, [link(file) for file in files], data)
        links = [f'<a href="{name}/">{name}</a>' for name in projects]
        write(root, root.name, links, {"projects": [{"name": name} for name in projects]})


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves the folder on this machine, to try an index. Yields its URL."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    make_index(Path(sys.argv[1]))
