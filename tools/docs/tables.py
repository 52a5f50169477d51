"""What the tables of pages are made of: results, figures, Markdown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def loader(folder: Path) -> Callable[[str], dict[str, Any]]:
    """Reads a file of results in a folder, by its name."""

    def load(name: str) -> dict[str, Any]:
        return json.loads((folder / f"{name}.json").read_text())

    return load


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def figure(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def environment(results: dict[str, Any]) -> str:
    e = results["environment"]
    if "gpu" not in e:
        where = f"On a CPU with {e['cpu threads']} threads, torch {e['torch']}"
    else:
        where = f"On an {e['gpu']}, torch {e['torch']}, cuDNN {e['cudnn']}, driver {e['driver']}"
    return f"{where}, on {e['date']} at commit {e['commit'][:7]}."
