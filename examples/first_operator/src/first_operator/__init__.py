"""A first operator, ready to ship."""

from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).with_name("_C.so"))  # registers the operator

from first_operator import nn as nn  # noqa: E402
from first_operator.ops import square as square  # noqa: E402
