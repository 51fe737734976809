"""The head of a causal model on its last stage: what enters it, and the logits of the rows that are wanted.

Most models return what their head has made, within an object that takes long to construct. Once a forward has shown
that nothing follows the head, later ones are left before it, and the stage calls the head itself.

Limit: a model that treats its head's output differently from batch to batch would be misjudged. In transformers 5.23,
what follows a head depends on the configuration, and in one model on whether it trains.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.errors import UserError
from motet.models.stages.stand_ins import LeftForward


class HeadWatch:
    """Watches a model's head by hooks. It does not refer to the model, which would make a circle."""

    def __init__(self, model_name: str, head: nn.Module) -> None:
        self._model_name = model_name
        self._shape: torch.Size | None = None
        """[rows, columns] of the token ids, while the model's forward runs."""
        self._rows: Tensor | None = None
        self._may_leave = True
        self._entered: list[Tensor] = []
        self._made: list[tuple[Tensor, int]] = []
        """The head's output, and its version at that time, where it is to be found out whether anything follows."""
        self._ends_forward: dict[Hashable, bool] = {}
        """Whether forwards of a kind return the head's output unchanged."""
        self._hook: RemovableHandle | None = None
        head.register_forward_pre_hook(self._enter, prepend=True)

    def run(
        self,
        head: nn.Module,
        forward: Callable[[], Tensor],
        shape: torch.Size,
        rows: Tensor | None,
        *,
        to_its_end: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs a forward of the model, to its head at least.

        Args:
            forward: returns the model's logits.
            shape: [rows, columns] of the token ids.
            rows: indices into the flattened [rows * columns], of the logits that are wanted; None: all.
            to_its_end: whatever has been found out: the model has hooks, which may use or change its output.

        Returns:
            The head's input [rows, columns, width], and logits [number of rows, vocabulary].
        """
        self._shape, self._rows, self._may_leave = shape, rows, not to_its_end
        try:
            logits = forward()
            assert len(self._entered) == 1, "the head ran more than once"
            states = self._entered[0]
            for output, version in self._made:
                self._ends_forward[_kind(head, states)] = output is logits and output._version == version
        except LeftForward as left:
            states, self._shape = left.packed, None
            logits = head(_chosen(states, rows))
        finally:
            self._shape, self._rows, self._entered, self._made = None, None, [], []
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
        return states, logits.flatten(0, 1)

    def _enter(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._shape is None:
            return None
        states = args[0]
        if states.shape[:2] != self._shape:
            raise UserError(f"{self._model_name}: its head does not read one row for each token; give another model")
        kind = _kind(head, states)
        if self._may_leave and self._ends_forward.get(kind):
            raise LeftForward(states)
        self._entered.append(states)
        if kind not in self._ends_forward and self._hook is None:
            self._hook = head.register_forward_hook(self._leave)
        return args if self._rows is None else (_chosen(states, self._rows),)

    def _leave(self, head: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._made.append((output, output._version))


def _kind(head: nn.Module, states: Tensor) -> Hashable:
    """What a model's treatment of logits may depend on."""
    return head.training, states.dtype, torch.is_autocast_enabled(states.device.type)


def _chosen(states: Tensor, rows: Tensor | None) -> Tensor:
    return states if rows is None else states.flatten(0, 1).index_select(0, rows)[None]
