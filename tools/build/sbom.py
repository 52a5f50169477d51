"""The third-party code in a wheel, in CycloneDX, at the place that PEP 770 defines.

Without a time and a serial number, so that two builds write the same bytes.
"""

from __future__ import annotations

from typing import Any

PLACE = "sboms/my_ops.cdx.json"  # in .dist-info


def component(name: str, version: str, supplier: str, licence: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "supplier": {"name": supplier},
        "licenses": [{"license": licence}],
    }


def sbom(record: dict[str, Any]) -> dict[str, Any]:
    """Made from the build record, my_ops/_build.json."""
    own = component("my_ops", record["version"], "The my_ops authors", {"id": "MIT"})
    inside = [
        component(
            "torch (inline code of its headers)",
            record["torch_built_against"],
            "PyTorch Foundation",
            {"id": "BSD-3-Clause"},
        )
    ]
    if record["nvcc"]:
        eula = {"name": "NVIDIA CUDA Toolkit EULA", "url": "https://docs.nvidia.com/cuda/eula/"}
        release = ".".join(record["nvcc"].split(".")[:2])
        inside.append(
            component("CUDA Runtime (libcudart_static)", release, "NVIDIA Corporation", eula)
        )
    names = [part["bom-ref"] for part in inside]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": inside,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": names}],
    }
