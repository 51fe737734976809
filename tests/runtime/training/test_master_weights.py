"""float32 masters and main gradients of bfloat16 parameters."""

from pathlib import Path

import torch
from distributed import run_distributed
from one_process import verify
from scenario import Scenario
from torch import nn
from training import Layout, run_config, stored_tensors, train

from motet.parallel.main_gradients import keep_main_gradients
from motet.runtime.training.master_weights import MASTER, MasterAdamW

TP2_DP2: Layout = {"vision": {"dp": 2}, "audio": {"dp": 2}, "language_model": {"tp": 2, "dp": 2}}


def test_masters_are_what_float32_gradients_make_of_them() -> None:
    """To the bit, also where a step is far smaller than bfloat16's spacing."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 7).bfloat16())
    wide = nn.Parameter(parameter.detach().float())
    keep_main_gradients([parameter])
    options = {"lr": 1e-5, "weight_decay": 0.1, "fused": True}
    ours, plain = MasterAdamW([parameter], **options), torch.optim.AdamW([wide], **options)
    for step in range(4):
        wide.grad = torch.zeros_like(wide)
        for microbatch in range(3):
            x = torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * step + microbatch)).bfloat16()
            (x @ parameter.T).float().square().sum().backward()
            alone = parameter.detach().clone().requires_grad_()
            (x @ alone.T).float().square().sum().backward()
            wide.grad += alone.grad.float()
        assert torch.equal(parameter.grad, wide.grad)
        ours.step()
        plain.step()
        ours.zero_grad()
        assert torch.equal(ours.state[parameter][MASTER], wide)
        assert torch.equal(parameter, wide.bfloat16())
    assert not torch.equal(wide, wide.bfloat16().float())


LAYOUTS = [
    Scenario(dtype="bfloat16", placement="shared", llm_pp=2, tp=2, sequence_parallel=True, schedule="zero_bubble_h1"),
    Scenario(dtype="bfloat16", placement="shared", llm_pp=2, dp=2, fully_sharded=True, sharded_replicas=2),
]


def gradients_agree(rank: int) -> None:
    for scenario in LAYOUTS:
        comparison = verify(scenario)
        assert comparison is None or comparison.passed, comparison.failures


def test_gradients_are_as_near_to_float64_as_those_of_plain_bfloat16() -> None:
    run_distributed(gradients_agree, 4, timeout=300)


def test_checkpoints_hold_masters(tmp_path: Path) -> None:
    """Training goes on to the bit, under ZeRO-1 too, and its checkpoint is read in float32."""
    options = {"train__dtype": "bfloat16", "train__steps": 4, "train__lr_schedule": "constant", "parallel__zero1": True}
    whole, half = (run_config(tmp_path / name, TP2_DP2, **options) for name in ("whole", "half"))
    half = half.model_copy(update={"train": half.train.model_copy(update={"steps": 2})})
    (first,) = train(half)
    resumed = half.model_copy(update={"train": half.train.model_copy(update={"steps": 4, "resume": "latest"})})
    second, uninterrupted = train(resumed, whole)
    assert [*first["losses"], *second["losses"]] == uninterrupted["losses"]
    left, right = (stored_tensors(Path(result["checkpoint"])) for result in (second, uninterrupted))
    assert left.keys() == right.keys()
    assert not any(MASTER in name for name in left)
    for name, tensor in left.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, right[name]), name
    assert any(not torch.equal(t, t.bfloat16().float()) for name, t in left.items() if name.startswith("model/"))
