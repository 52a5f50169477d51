"""Attention under fast_fp32, on a Hopper GPU: overrides last as long as the process, so the checks
run in their own."""

from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("attention_checks.py")


def test_the_switch(cuda, run_pytest):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    run_pytest(CHECKS)
