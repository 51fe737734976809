"""Kernels of liger-kernel in Triton's interpreter, which has no GPU.

They ask their numbers for another dtype (`eps.to`), though the interpreter hands floats on as Python's, and call
functions of CUDA's device library, which it does not have. Triton and liger-kernel are changed here in two places, for
all of the process; `tests/parallel/test_fused_kernels.py` fails if these places move.
"""

from functools import cache
from types import ModuleType
from typing import Any


@cache
def interpret_liger() -> None:
    """From now on the kernels run in the interpreter."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    # Looked up when they are called: the interpreter changes `tl` for the time of a kernel.
    _replace(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))
    _replace(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def _replace(module: ModuleType, name: str, function: Any) -> None:
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, function)
