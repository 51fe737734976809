"""Reduces the memory of tensors that autograd saves for stages in half precision, without changing results.

transformers' norms compute in float32 and save their input so; a gated MLP saves its activation function's output
beside the input. In the context of `save_less`

* a float32 copy of a tensor in half precision is saved in half precision, from which it is restored exactly;
* float32 products, copies of them in half precision, and results of activation functions are not saved. The backward
  computes them again from what their own nodes of the graph save anyway.

(Megatron-LM recomputes norms and activation functions as modules; here modules stay as they are.)

Limits: SiLU and GELU of torch only. Blocks that are recomputed save as torch does while their backward runs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from motet.parallel.main_gradients import HALF_DTYPES
from motet.parallel.split_backward import Ambient

VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
"""Nodes that only reshape."""
COPY, PRODUCT = "ToCopyBackward0", "MulBackward0"
ACTIVATIONS: dict[str, Callable[[Any], Tensor]] = {
    "SiluBackward0": lambda node: functional.silu(node._saved_self),
    "GeluBackward0": lambda node: functional.gelu(node._saved_self, approximate=node._saved_approximate),
}


class _Again(NamedTuple):
    """A tensor that is computed again from what a node of the graph saves."""

    compute: Callable[[Any], Tensor]
    node: Any
    shape: torch.Size
    dtype: torch.dtype


class Narrow(NamedTuple):
    """A float32 tensor whose values half precision holds."""

    values: Any
    shape: torch.Size


class SavesLess(Ambient):
    """What is saved in the place of tensors, within one forward of a stage whose parameters have this half
    precision."""

    def __init__(self, dtype: torch.dtype, on_saved: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._dtype, self._on_saved = dtype, on_saved
        self._narrow: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def __enter__(self) -> None:
        super().__enter__()
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)

    def pack(self, tensor: Tensor) -> Tensor | _Again | Narrow:
        dtype = self._dtype
        node = _origin(tensor.grad_fn)
        kind = "" if node is None else node.name()
        if kind in ACTIVATIONS:
            return _Again(ACTIVATIONS[kind], node, tensor.shape, tensor.dtype)
        if tensor.dtype == torch.float32:
            if kind == PRODUCT and _saves_both(node):
                return _Again(_multiply, node, tensor.shape, tensor.dtype)
            if kind == COPY and _source_dtype(node) == dtype:
                number = node._sequence_nr()
                if number not in self._narrow:
                    self._narrow[number] = tensor.detach().to(dtype)
                    self._on_saved(self._narrow[number])
                return Narrow(self._narrow[number], tensor.shape)
        elif tensor.dtype in HALF_DTYPES and kind == COPY and _source_dtype(node) == torch.float32:
            source = _origin(node.next_functions[0][0])
            if source is not None and source.name() == PRODUCT and _saves_both(source):
                return _Again(_multiply, source, tensor.shape, tensor.dtype)
        self._on_saved(tensor)
        return tensor

    @staticmethod
    def unpack(saved: Tensor | _Again | Narrow) -> Tensor:
        if isinstance(saved, _Again):
            with torch.no_grad():
                return saved.compute(saved.node).to(saved.dtype).reshape(saved.shape)
        if isinstance(saved, Narrow):
            return saved.values.to(torch.float32).reshape(saved.shape)
        return saved


def save_less(
    dtype: torch.dtype, on_saved: Callable[[Tensor], object] = lambda tensor: None
) -> AbstractContextManager[object]:
    """The context of one forward of a stage. `dtype`: of its parameters; nothing changes unless it is half precision.
    `on_saved` receives the tensors that are saved then."""
    return SavesLess(dtype, on_saved) if dtype in HALF_DTYPES else nullcontext()


def _origin(node: Any) -> Any:
    """The node whose result a chain of reshaping nodes passes on."""
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node


def _source_dtype(node: Any) -> torch.dtype | None:
    """The dtype of what a copying node copied."""
    source, index = node.next_functions[0]
    return None if source is None else source._input_metadata[index].dtype


def _saves_both(product: Any) -> bool:
    return product._saved_self is not None and product._saved_other is not None


def _multiply(product: Any) -> Tensor:
    return product._saved_self * product._saved_other
