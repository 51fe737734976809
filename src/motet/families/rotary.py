"""Rotary positions whose frequencies depend on the length of the whole sequence: `dynamic` and `longrope`.

transformers takes the largest position of a call for the length, and `dynamic` keeps the frequencies of the longest
sequence so far. Neither is a sample's own length where samples are padded, packed, or shared by the ranks of a
context-parallel group. Here the frequencies of every token are those of its own sample, as if that ran alone.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from motet.devices import to_device
from motet.errors import UserError


def depends_on_length(module: nn.Module) -> bool:
    """Whether it computes rotary positions of such a kind, for some kind of layer at least."""
    named = getattr(module, "rope_type", None)
    kinds = named.values() if isinstance(named, dict) else [named]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def forget_sequences(model: nn.Module) -> None:
    """Resets cached frequencies, so that no sequence gets those of a longer one before it."""
    for module in model.modules():
        if not depends_on_length(module) or not hasattr(module, "max_seq_len_cached"):
            continue
        for name in [*vars(module), *module._buffers]:
            if name.endswith("max_seq_len_cached"):
                setattr(module, name, module.original_max_seq_len)
            elif name.endswith("original_inv_freq"):
                original: Any = getattr(module, name)
                module.register_buffer(name.replace("original_", ""), original.clone(), persistent=False)


class SequenceRotary:
    """Gives the rotary positions of a model the lengths of the samples in each forward.

    Args:
        model: its modules of such kinds are changed in place.
        blocks: path of the list of blocks, in which no such module may be.
    """

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self._lengths: Tensor | None = None
        self.reads_lengths = False
        """Whether the model has such positions."""
        for path, module in model.named_modules():
            if not depends_on_length(module):
                continue
            if path.startswith(f"{blocks}."):
                raise UserError(
                    f"{type(model).__name__}: {path} has {module.rope_type} rotary positions in a block, which is not "
                    "supported; set rope_parameters.rope_type in values"
                )
            module.forward = self._by_length(module, module.forward)
            self.reads_lengths = True

    def begin(self, lengths: Tensor | None) -> None:
        """`lengths`: [rows, columns] of the coming forward, of each token's sample; on the CPU. None: nothing reads
        them."""
        self._lengths = lengths

    def _by_length(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            positions = bound.arguments["position_ids"]
            lengths = self._lengths
            assert lengths is not None
            positions = positions.expand(*positions.shape[:-2], *lengths.shape)
            last = self._last_positions(positions, lengths)
            result: Any = None
            for end in last.unique().tolist():
                forget_sequences(module)
                # The length is taken from the largest position: the sample's last one, which is dropped again.
                ends = positions.new_full((*positions.shape[:-1], 1), end)
                bound.arguments["position_ids"] = torch.cat([positions.clamp(max=end), ends], dim=-1)
                own = tree_map(lambda values: values[..., :-1, :], forward(*bound.args, **bound.kwargs))
                choose = partial(torch.where, to_device((last == end)[..., None], positions.device))
                result = own if result is None else tree_map(choose, own, result)
            return result

        return run

    @staticmethod
    def _last_positions(positions: Tensor, lengths: Tensor) -> Tensor:
        """[rows, columns]: the largest position of each token's sample."""
        if positions.dim() == 2:
            return lengths - 1
        # Positions of several axes (M-RoPE) are fewer than tokens. Samples stand in rows of their own.
        held = torch.arange(lengths.shape[1]) < lengths
        return positions.cpu().masked_fill(~held, 0).amax(dim=(0, -1))[:, None].expand(lengths.shape)
