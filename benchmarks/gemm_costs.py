"""The costs that fit_gemm.py starts from, and how a header spells them."""

from __future__ import annotations

from typing import Any

from my_ops._gemm_costs import Numbers

START: dict[str, Any] = {  # GemmCosts, as first fitted by hand
    "fp32_skinny": {
        "few_min_columns": 256,
        "few_min_input": 8192,
        "few_min_weight": 1 << 21,
        "min_k": 4096,
        "max_columns": 8192,
        "max_columns_many": 128,
    },
    "fp32_narrow": {
        "max_columns": 384,
        "launches": 1e12,  # until its times are among the measured ones; see BY_HAND of fit_gemm.py
        "end": 5.5e7,
        "split_element": 75.0,
        "conversion": 40.0,
        "floats": {"here": 0.56, "split": 0.19},
        "halves": {"here": 0.33, "split": 0.13},
    },
    "fp32_short": {"launches": 1e12, "byte": 8.0, "product": 0.166},  # launches: as above
    "fp32_sm90": {
        "min_side": 96,
        "min_k": 192,
        "packed_min_rows": 9,
        "packed_min_weight": 2048,
        "launches": 1.5e8,
        "second_pass": 1.2e8,
        "element": 100.0,
        "strided_element": 150.0,
        "single_min_work": 4e9,
        "tf32_launches": 8e9,
        "tf32_element": 1100.0,
        "tf32_strided_gain": 2.3,
        "wide_slowdown": 1.38,
        "medium_slowdown": 1.55,
        "small_slowdown": 2.05,
        "promoted_slowdown": 1.04,
        "reduce": 60e3,
        "reduce_element": 0.04,
        "more_waves_min_gain": 1.0,
        "bf16_min_work": 5e8,
    },
    "fp32_sm80": {"launches": 1.5e8, "product": 1.0},
    "half_sm90": {
        "large_us": 0.70,
        "wide_us": 0.53,
        "medium_us": 0.37,
        "small_us": 0.26,
        "end_us": 1.5,
        "epilogue_warps_min_share": 0.92,
        "epilogue_warps_min_k": 1024,
        "epilogue_warps_min_k_slow": 2048,
        "copied": {"min_size": 128, "min_tiles": 32, "max_k_per_tile": 64},
        "in_place": {"min_size": 64, "min_tiles": 16, "max_k_per_tile": 128},
        "epilogue_min_side": 16,
        "epilogue_max_k": 1024,
        "epilogue_max_outputs": 1 << 20,
    },
    "small": {
        "max_outputs": 1 << 17,
        "many_outputs": 1 << 15,
        "max_work_of_many": 1 << 21,
        "max_work_8_bytes": 1 << 20,
        "max_work_4_bytes": 1 << 22,
        "max_work_2_bytes": 1 << 21,
        "long_k": 256,
        "max_work_of_long_k": 1 << 20,
        "tile_min_side": 16,
        "tile_min_work": 1 << 22,
    },
}


def flat(tree: dict[str, Any], path: str = "") -> Numbers:
    """The numbers by their names in GemmCosts, such as `fp32_sm90.element`, in its order."""
    numbers: Numbers = {}
    for name, value in tree.items():
        inner = flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
        numbers.update(inner)
    return numbers


def initializer(tree: dict[str, Any], numbers: dict[str, str], column: int, path: str = "") -> str:
    """{.fp32_skinny = {.few_min_columns = 256, ...}}, in clang-format's style."""
    items = []
    for name, value in tree.items():
        start = f".{name} = "
        inner = column + 1 + len(start)
        if isinstance(value, dict):
            items.append(start + initializer(value, numbers, inner, f"{path}{name}."))
        else:
            items.append(start + numbers[path + name])
    line = "{" + ", ".join(items) + "}"
    if "\n" not in line and column + len(line) < 100:
        return line
    return "{" + (",\n" + " " * (column + 1)).join(items) + "}"
