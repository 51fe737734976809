"""The head of a causal model on its last stage: what enters it, and the logits of the rows that are wanted.

Most models return what their head has made, within an object that takes long to construct. Once a forward has shown
that nothing follows the head, later ones are left before it, and the stage calls the head itself.

Limit: a model that treats its head's output differently from batch to batch would be misjudged. In transformers 5.23,
what follows a head depends on the configuration alone, and in one model on whether it trains.
"""

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.errors import UserError
from motet.models.stages.stand_ins import LeftForward


class HeadWatch:
    """Watches a model's head by hooks. It does not refer to the model, which would make a circle."""

    def __init__(self, model_name: str, head: nn.Module) -> None:
        self._model_name = model_name
        self._ids: Tensor | None = None
        """[rows, columns], while the model's forward runs."""
        self._mode: Hashable = None
        """That in which the forward began."""
        self._rows: Tensor | None = None
        self._may_leave = True
        self._entered: list[Tensor] = []
        self._made: list[tuple[Hashable, Tensor, int]] = []
        """Where it is to be found out whether anything follows: the kind of the forward, the head's output, and its
        version at that time."""
        self._ends_forward: dict[Hashable, bool] = {}
        """Whether forwards of a kind return the head's output unchanged."""
        self._hook: RemovableHandle | None = None
        head.register_forward_pre_hook(self._enter, prepend=True)

    def run(
        self,
        head: nn.Module,
        forward: Callable[[], Tensor],
        ids: Tensor,
        rows: Tensor | None,
        *,
        to_its_end: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs a forward of the model, to its head at least.

        Args:
            forward: returns the model's logits.
            ids: [rows, columns] of the tokens.
            rows: indices into the flattened [rows * columns], of the logits that are wanted; None: all.
            to_its_end: do not leave the forward before the head, as hooks may use or change what the model returns.

        Returns:
            The head's input [rows, columns, width], and logits [number of rows, vocabulary].
        """
        self._ids, self._rows, self._mode = ids, rows, _mode(head, ids)
        # Tensors of inference mode do not tell whether they were written into.
        self._may_leave = not to_its_end and not torch.is_inference_mode_enabled()
        try:
            logits = forward()
            assert len(self._entered) == 1, f"the head ran {len(self._entered)} times"
            states = self._entered[0]
            for kind, output, version in self._made:
                self._ends_forward[kind] = output is logits and output._version == version
        except LeftForward as left:
            states, self._ids = left.packed, None
            logits = head(_chosen(states, rows))
        finally:
            self._ids, self._rows, self._entered, self._made = None, None, [], []
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
        return states, logits.flatten(0, 1)

    def _enter(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._ids is None:
            return None
        states = args[0]
        if states.shape[:2] != self._ids.shape:
            raise UserError(f"{self._model_name}: its head does not read one row for each token; give another model")
        mode = _mode(head, self._ids)
        kind = mode, states.dtype
        # A model that changes the mode around its head must call it itself.
        may_leave = self._may_leave and mode == self._mode
        if may_leave and self._ends_forward.get(kind):
            raise LeftForward(states)
        self._entered.append(states)
        if may_leave and kind not in self._ends_forward and self._hook is None:
            self._hook = head.register_forward_hook(partial(self._leave, kind))
        return args if self._rows is None else (_chosen(states, self._rows),)

    def _leave(self, kind: Hashable, head: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._made.append((kind, output, output._version))


def _mode(head: nn.Module, ids: Tensor) -> Hashable:
    """What a model's treatment of logits may depend on."""
    return head.training, torch.is_grad_enabled(), torch.is_autocast_enabled(ids.device.type)


def _chosen(states: Tensor, rows: Tensor | None) -> Tensor:
    return states if rows is None else states.flatten(0, 1).index_select(0, rows)[None]
