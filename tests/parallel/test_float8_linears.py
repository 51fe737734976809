"""Linear layers in float8: the products of rounded numbers, the same under every layout, and near the model's own."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from distributed import run_distributed
from interpreted_liger import interpret_liger
from one_process import check
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch
from tiny_language_models import tiny_language_model
from torch import Tensor, nn

from motet.config import RunConfig
from motet.errors import UserError
from motet.parallel import float8_linears
from motet.parallel.float8_linears import check_float8, num_float8_linears, use_float8_linears
from motet.parallel.fused_kernels import use_fused_kernels
from motet.runtime.assembly import build_engine, check_linears
from motet.runtime.engine import Engine

DEVICE = torch.device(os.environ.get("MOTET_TEST_DEVICE", "cpu"))
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(values: Tensor, dim: int | None) -> Tensor:
    """Float64 numbers as float8 holds them, with one scale along `dim`, or for all."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / largest)))
    return (values * scale).to(torch.float8_e4m3fn).double() / scale


def test_products_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 48)).to(DEVICE, DTYPE)
    use_float8_linears([block], DEVICE)
    assert num_float8_linears([block]) == 1
    given = (torch.randn(3, 5, 32) * torch.rand(3, 5, 1).exp()).to(DEVICE, DTYPE).requires_grad_()
    gradient = torch.randn(3, 5, 48).to(DEVICE, DTYPE)
    output = block(given)
    output.backward(gradient)
    weight, rows, back = block[0].weight.double(), given.detach().double().view(-1, 32), gradient.double().view(-1, 48)
    expected = {
        "output": (rounded(rows, -1) @ rounded(weight, -1).T + block[0].bias.double(), output),
        "input": (rounded(back, -1) @ rounded(weight, None), given.grad),
        "weight": (back.T @ rows, block[0].weight.grad),
        "bias": (back.sum(0), block[0].bias.grad),
    }
    for name, (exact, found) in expected.items():
        error = (found.double().view_as(exact) - exact).norm() / exact.norm()
        assert error < (1e-6 if DEVICE.type == "cpu" else 4e-3), f"{name}: {error}"


def loss_and_gradients(model: nn.Module) -> list[Tensor]:
    tokens = torch.arange(22, device=DEVICE).view(2, 11) + 3
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of all gradients together."""
    ours, theirs = (torch.cat([gradient.double().view(-1) for gradient in each[1:]]) for each in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("family", ["llama", *in_campaigns(["gemma3", "qwen3", "phi3"])])
def test_precision(family: str) -> None:
    """Rounding is an error of 2^-4 at most, of one factor. Here it leaves 4 to 14% of the gradients' norm."""
    own = tiny_language_model(family).to(DEVICE, torch.float32)
    model = copy.deepcopy(own).to(DTYPE)
    names = [name for name, _ in model.named_parameters()]
    use_float8_linears(model.model.layers, DEVICE)
    assert num_float8_linears(model.model.layers) >= 16
    assert [name for name, _ in model.named_parameters()] == names
    found, expected = loss_and_gradients(model), loss_and_gradients(own)
    assert abs(found[0] - expected[0]) < 0.01 * expected[0]
    assert 0.01 < difference(found, expected) < 0.2


def test_beside_fused_kernels() -> None:
    """These change a linear's input by 1e-7, which rounds a few numbers to their other neighbour in float8."""
    if DEVICE.type == "cpu":
        interpret_liger()
    model = tiny_language_model("llama").to(DEVICE, DTYPE)
    fused = copy.deepcopy(model)
    assert use_fused_kernels(fused)["mlps"] == 4
    for each in (model, fused):
        use_float8_linears(each.model.layers, DEVICE)
    assert difference(loss_and_gradients(fused), loss_and_gradients(model)) < 0.01


def test_what_stays_as_it_is() -> None:
    block = nn.ModuleDict(
        {"wide": nn.Linear(32, 48), "odd": nn.Linear(32, 40), "frozen": nn.Linear(32, 32).requires_grad_(False)}
    )
    use_float8_linears([block], DEVICE)
    assert num_float8_linears([block]) == 1
    assert [name for name, module in block.items() if type(module) is nn.Linear] == ["odd", "frozen"]


FLOAT8 = {"linears": "float8"}
VERIFIED = {
    "pipeline, recomputed": Scenario(llm_pp=2, placement="colocated", recompute=True, items="half", **FLOAT8),
}
CAMPAIGNS = {
    "packed": Scenario(llm="qwen3", placement="replicated", packing=True, frozen="audio", **FLOAT8),
    "other families": Scenario(llm="phi3", vision="clip", audio="qwen2_audio", placement="replicated", **FLOAT8),
    "two windows": Scenario(llm="gemma3", vision="pixtral", placement="replicated", recompute="attention", **FLOAT8),
    "cross-attention": Scenario(
        llm="mllama", merge="cross_attention", placement="shared", recompute="every_2", **FLOAT8
    ),
    "qwen2.5-vl, offloaded": Scenario(vision="qwen2_5_vl", placement="shared", recompute="offload", **FLOAT8),
    "frozen language model": Scenario(frozen="all but encoders", llm_pp=2, placement="colocated", **FLOAT8),
    "unequal replicas": Scenario(units=(1, 2, 3), llm_pp=1, items="half", **FLOAT8),
    "context parallelism": Scenario(cp=2, placement="shared", **FLOAT8),
    "ring, packed": Scenario(cp=2, cp_method="ring", placement="shared", packing=True, **FLOAT8),
    "fully sharded": Scenario(fully_sharded=True, cp=2, encoder_cp=2, placement="shared", **FLOAT8),
    "fully sharded replicas": Scenario(
        fully_sharded=True, placement="shared", dp=2, sharded_replicas=2, num_samples=8, **FLOAT8
    ),
    "ZeRO-2": Scenario(
        fully_sharded=True, whole_parameters=True, placement="shared", dp=2, sharded_replicas=2, num_samples=8, **FLOAT8
    ),
    "interleaved": Scenario(llm_pp=4, llm_places=(0, 1, 0, 1), schedule="interleaved_1f1b", **FLOAT8),
    "compiled": Scenario(placement="replicated", compiles=True, **FLOAT8),
    "bfloat16": Scenario(llm_pp=2, placement="colocated", dtype="bfloat16", **FLOAT8),
}  # fmt: skip


def count_linears(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
    """What is trained in this process, and fits, computes in float8."""
    for stage in engine.model.modules():
        for block in stage.running_blocks.values():  # type: ignore[attr-defined]
            linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
            for linear in linears:
                is_float8 = type(linear).__name__ == "Float8Linear"
                assert is_float8 == (
                    linear.weight.requires_grad and not any(width % 16 for width in linear.weight.shape)
                )


@pytest.mark.parametrize("name", [*VERIFIED, *in_campaigns(CAMPAIGNS)])
def test_equals_one_process(name: str) -> None:
    """In float64 the sums of products of float8 numbers are exact, in whatever order."""
    scenario = (VERIFIED | CAMPAIGNS)[name]
    torch._dynamo.reset()
    check(scenario, tolerance=2.0**-8 if scenario.dtype == "bfloat16" else 1e-9, before=count_linears)


def test_a_scale_for_all_tokens_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_linears, "RECIPE", "tensorwise")
    with pytest.raises(AssertionError):
        check(Scenario(placement="shared", **FLOAT8))


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Scenario(tp=2), "not supported with tp, which vision has"),
        (Scenario(llm_pp=2, schedule="zero_bubble_h1"), "cannot be combined with zero_bubble_h1"),
        (Scenario(lora=("language_model",)), r"not supported with adapters \(lora\), which language_model has"),
        (Scenario(llm="mixtral"), "not supported with mixtures of experts, which language_model has"),
    ],
)
def test_what_is_not_shown_equal_is_refused(scenario: Scenario, message: str) -> None:
    scenario = replace(scenario, **FLOAT8)
    config = scenario.config()
    with pytest.raises(UserError, match=message):
        check_linears(config, scenario.plan(config), torch.device("cpu"))


def test_a_run_of_which_nothing_would_be_in_float8_is_refused() -> None:
    scenario = Scenario(frozen="all but projectors", placement="shared", **FLOAT8)
    config = scenario.config()
    plan = scenario.plan(config)

    def build(rank: int) -> str:
        with pytest.raises(UserError) as refused:
            build_engine(config, plan, DEVICE)
        return str(refused.value)

    assert "multiples of 16, and there is none" in run_distributed(build, plan.num_ranks)[0]


def test_devices_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    check_float8(torch.device("cpu"), torch.float64)  # Emulated.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(cuda, torch.bfloat16)
    with pytest.raises(UserError, match=r"give train\.dtype bfloat16"):
        check_float8(cuda, torch.float32)
    for device, capability in ((cuda, (8, 9)), (torch.device("xpu"), (9, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.raises(UserError, match=r"needs an NVIDIA GPU of compute capability 9\.0"):
            check_float8(device, torch.bfloat16)
    monkeypatch.setattr(float8_linears, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'motet\[float8\]'"):
        check_float8(torch.device("cpu"), torch.float32)
