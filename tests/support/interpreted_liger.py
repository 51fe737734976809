"""Kernels of liger-kernel in Triton's interpreter, which has no GPU.

They ask their numbers for another dtype (`eps.to`), though the interpreter hands floats on as Python's, and call
functions of CUDA's device library, which it does not have. The interpreter holds bfloat16 as integers, with which it
computes as such, and cuts off what does not fit; here it computes in float32 and rounds to the nearest, as a GPU does.
Triton and liger-kernel are changed in these places, for all of the process; `tests/parallel/test_fused_kernels.py`
fails if these places move.
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
    _know_bfloat16(interpreter)
    # Looked up when they are called: the interpreter changes `tl` for the time of a kernel.
    _replace(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))
    _replace(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def _know_bfloat16(interpreter: Any) -> None:
    """Products of matrices are not among what changes."""
    import numpy as np
    import torch
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    operate, cast = builder.binary_op, builder.cast_impl

    def wide(given: Any) -> Any:
        if given.dtype.scalar != tl.bfloat16:
            return given
        return handle((given.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def narrow(given: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(given.data)).to(torch.bfloat16)
        return handle(values.view(torch.uint16).numpy().reshape(given.data.shape), tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if tl.bfloat16 not in (lhs.dtype.scalar, rhs.dtype.scalar):
            return operate(self, lhs, rhs, op)
        made = operate(self, wide(lhs), wide(rhs), op)
        return made if made.data.dtype == np.bool_ else narrow(made)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.bfloat16:
            return cast(self, wide(src), dst_type)
        if dst_type.scalar == tl.bfloat16:
            return narrow(cast(self, src, tl.float32))
        return cast(self, src, dst_type)

    _replace(builder, "binary_op", binary_op)
    _replace(builder, "cast_impl", cast_impl)


def _replace(module: ModuleType | type, name: str, function: Any) -> None:
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, function)
