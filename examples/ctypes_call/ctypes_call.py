"""Calls the kernels of an installed my_ops through ctypes, without its Python package."""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import torch  # brings the libraries that the module needs

package = importlib.util.find_spec("my_ops")  # where it is, without importing it
library = ctypes.CDLL(str(Path(package.origin).with_name("_C.so")))

# Without these, ctypes passes pointers and sizes as 32-bit ints.
pointer, size = ctypes.c_void_p, ctypes.c_int64
library.my_ops_cpu_d_sigmoid.argtypes = [pointer, pointer, size]
library.my_ops_cuda_d_sigmoid.argtypes = [pointer, pointer, size, pointer]
library.my_ops_error_string.restype = ctypes.c_char_p


def check(error: int) -> None:
    if error:
        raise RuntimeError(library.my_ops_error_string(error).decode())


def d_sigmoid(z: np.ndarray) -> np.ndarray:
    z = np.ascontiguousarray(z, np.float32)
    out = np.empty_like(z)
    check(library.my_ops_cpu_d_sigmoid(z.ctypes.data, out.ctypes.data, z.size))
    return out


def d_sigmoid_cuda(z: torch.Tensor) -> torch.Tensor:
    assert z.is_cuda and z.dtype == torch.float32 and z.is_contiguous()
    out = torch.empty_like(z)
    with torch.cuda.device(z.device):
        stream = torch.cuda.current_stream().cuda_stream
        check(library.my_ops_cuda_d_sigmoid(z.data_ptr(), out.data_ptr(), z.numel(), stream))
    return out


z = np.array([-1.0, 0.0, 2.0], np.float32)
print("NumPy:", d_sigmoid(z).round(4))
try:
    check(library.my_ops_cpu_d_sigmoid(None, None, 3))
except RuntimeError as error:
    print("error:", error)
if torch.cuda.is_available():
    print("CUDA:", d_sigmoid_cuda(torch.from_numpy(z).cuda()).cpu().numpy().round(4))
