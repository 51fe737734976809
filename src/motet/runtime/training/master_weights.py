"""AdamW of bfloat16 parameters, with float32 masters that it updates and rounds to the parameters.

A step of a small learning rate is less than half of bfloat16's spacing, and would be lost without masters
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.1). Masters are part of the optimizer's state, so that
ZeRO-1 and fully sharded stages share them as they share moments. They begin as the parameters are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of the tensors that the optimizer keeps for each parameter; estimates of memory and time count
`motet.costs.memory.ADAMW_STATES` of them."""
MASTER = "master"
"""Name of the state that is the parameter in float32."""


def new_state(parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter that has not been updated: zeros, and in half precision its master."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        **{moment: torch.zeros_like(parameter, dtype=wide) for moment in MOMENTS},
    }
    return state if wide == parameter.dtype else {**state, MASTER: parameter.detach().to(wide, copy=True)}


class MasterAdamW(torch.optim.AdamW):
    """Gradients are float32. A parameter in float32 (a contrastive loss's scale) is its own master."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in members:
                if not self.state[parameter]:
                    self.state[parameter].update(new_state(parameter))
            states = [self.state[parameter] for parameter in members]
            masters = [state.get(MASTER, parameter) for parameter, state in zip(members, states, strict=True)]
            beta1, beta2 = group["betas"]
            adamw(
                masters,
                [parameter.grad for parameter in members if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=group["foreach"],
                fused=group["fused"],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
            for parameter, master in zip(members, masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
