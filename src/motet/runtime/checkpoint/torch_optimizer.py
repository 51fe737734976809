"""States of a user's torch optimizer, in the form in which checkpoints hold those of `motet train`.

A state tensor is of the parameter's shape, as Adam's moments, or a scalar, as its step count; others cannot be stored
under every plan. What param groups hold (learning rates, decay) is not part of a checkpoint.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from motet.errors import UserError
from motet.runtime.local_model import LocalParameter


class TorchOptimizerStates:
    """Implements `motet.runtime.checkpoint.checkpoint.OptimizerStates`. None: there is no optimizer."""

    keeps_masters = False

    def __init__(self, optimizer: torch.optim.Optimizer | None, parameters: Iterable[LocalParameter]) -> None:
        self._optimizer = optimizer
        self._parameters = [p for p in parameters if p.is_kept and p.parameter.requires_grad]

    def states(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """Returns the states by parameter. Raises `UserError` for states that fit no other plan."""
        if self._optimizer is None:
            return {}
        found: dict[Tensor, dict[str, Tensor]] = {}
        for p in self._parameters:
            for key, value in self._optimizer.state.get(p.parameter, {}).items():
                if not isinstance(value, Tensor) or (value.dim() and value.shape != p.parameter.shape):
                    raise UserError(
                        f"optimizer: {type(self._optimizer).__name__} keeps {key}, which does not have its "
                        "parameter's shape; save the model without the optimizer"
                    )
                found.setdefault(p.parameter, {})[key] = value
        return found

    def writes_state(self, p: LocalParameter) -> bool:
        return p.is_written

    def make_states(self, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Makes room for the states that a checkpoint has of this rank's parameters. `stored`: by
        `<state>/<parameter>`, their shapes there. Raises `UserError` if it has none of a parameter."""
        if self._optimizer is None:
            return
        updated = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        for p in self._parameters:
            if p.parameter not in updated:
                continue
            keys = [name.removesuffix(f"/{p.name}") for name in stored if name.endswith(f"/{p.name}")]
            if not keys and not stored:
                raise UserError(f"checkpoint: has no optimizer state of {p.name}; load it without the optimizer")
            if not keys:  # No step had reached it: torch's optimizers make its state when one does.
                continue
            self._optimizer.state[p.parameter] = {
                key: torch.empty_like(p.parameter, requires_grad=False)
                if stored[f"{key}/{p.name}"]
                else torch.empty((), dtype=torch.float32)
                for key in keys
            }
