"""The operators as Python functions, one module per family; my_ops.recurrent has the rest."""

from my_ops import _autocast as _autocast  # registers the rules of the ops above
from my_ops import _flops as _flops
from my_ops import _vmap as _vmap
from my_ops.ops.attention import attention as attention
from my_ops.ops.elementwise import add_one as add_one
from my_ops.ops.elementwise import custom_add as custom_add
from my_ops.ops.elementwise import d_sigmoid as d_sigmoid
from my_ops.ops.elementwise import fill_index as fill_index
from my_ops.ops.elementwise import round_ste as round_ste
from my_ops.ops.gemm import gemm as gemm
from my_ops.ops.linear import PackedWeight as PackedWeight
from my_ops.ops.linear import linear as linear
from my_ops.ops.linear import prepack as prepack
