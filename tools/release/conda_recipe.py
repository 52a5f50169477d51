# /// script
# requires-python = ">=3.10"
# dependencies = ["packaging", "py-rattler-build"]
# ///
"""Writes the recipe of an sdist for conda-forge: conda_recipe.py SDIST FOLDER

FOLDER/recipe.yaml is the recipe.yaml of this folder with the sdist's version and hash. Then
rattler-build renders it for every platform and CUDA release.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import rattler_build
from packaging.utils import parse_sdist_filename

RECIPE = Path(__file__).with_name("recipe.yaml")
PLATFORMS = ["linux-64", "linux-aarch64"]
COMPILERS = ["None", "12.9", "13.0"]  # CUDA releases; None is a build for the CPU


def filled_in(text: str, sdist: Path) -> str:
    values = {
        "version": str(parse_sdist_filename(sdist.name)[1]),
        "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
    }
    for name, value in values.items():
        text, count = re.subn(rf'^( +{name}): ".*"$', rf'\1: "{value}"', text, flags=re.MULTILINE)
        assert count == 1, f"recipe.yaml has {count} lines of {name}"
    return text


def render(recipe: Path, platform: str) -> dict[str, list[str]]:
    """The package for each compiler, and what its build requires."""
    pinning = {"c_stdlib": ["sysroot"], "cuda_compiler": ["cuda-nvcc"], "python_min": ["3.10"]}
    rendered = rattler_build.Stage0Recipe.from_file(recipe).render(
        rattler_build.VariantConfig({**pinning, "cuda_compiler_version": COMPILERS}),
        rattler_build.RenderConfig(rattler_build.PlatformConfig(target_platform=platform)),
    )
    return {
        variant.recipe.build.string: [str(r) for r in variant.recipe.requirements.build]
        for variant in rendered
    }


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    sdist, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(filled_in(RECIPE.read_text(), sdist))
    for platform in PLATFORMS:
        for name, needs in render(path, platform).items():
            print(f"{platform}: {name} needs {', '.join(needs)}")


if __name__ == "__main__":
    main()
