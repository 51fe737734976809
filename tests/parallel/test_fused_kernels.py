"""Fused kernels: the gradients of plain modules, and nothing else in the modules changed.

The kernels are interpreted; `make gpu` sets `MOTET_TEST_DEVICE=cuda`, where they are compiled."""

import copy
import os

import pytest
import torch
from interpreted_liger import interpret_liger
from one_process import check
from sampling import in_campaigns
from scenario import Scenario
from tiny_configs import EVERY_MODEL
from tiny_language_models import MIXTURES, SIZES, TINY
from torch import Tensor, nn

from motet.errors import UserError
from motet.parallel.fused_kernels import (
    GatedMlp,
    Norm,
    check_fused_kernels,
    fused_rotation,
    gated_mlp_of,
    norm_of,
    plain_norm,
    rotates_halves,
    use_fused_kernels,
)
from motet.runtime.assembly import check_kernels

DEVICE = torch.device(os.environ.get("MOTET_TEST_DEVICE", "cpu"))
FOUND = {
    # family: norms, gated MLPs, rotations of 4 layers
    "llama": (9, 4, 4),
    "qwen3": (17, 4, 4),
    "mistral": (9, 4, 4),
    "gemma3": (25, 4, 4),
    "phi3": (9, 4, 4),
    "mllama": (13, 4, 2),
    "mixtral": (9, 0, 4),
    "gpt_oss": (9, 0, 0),
    "deepseek_v3": (17, 4, 4),
    "glm4_moe": (9, 4, 4),
    "llama4": (9, 4, 0),
}


def prepare() -> None:
    if DEVICE.type == "cpu":
        interpret_liger()


def tiny(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model_class, config_class, values = (TINY | MIXTURES)[family]
    torch.manual_seed(0)
    values = {**SIZES, **values}
    config = config_class(**{name: value for name, value in values.items() if value is not None})
    config._attn_implementation = "eager"
    model = model_class(config)
    with torch.no_grad():  # Fresh norms of one would hide factors.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(DEVICE, dtype)


def loss_and_gradients(model: nn.Module) -> list[Tensor]:
    tokens = torch.arange(14, device=DEVICE).view(2, 7) + 3
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "phi3", *in_campaigns(sorted(set(FOUND) - {"llama", "gemma3", "phi3"}))]
)
def test_families(family: str) -> None:
    prepare()
    plain, fused = tiny(family), tiny(family)
    names = [name for name, _ in fused.named_parameters()]
    classes = [type(module) for module in fused.modules()]
    found = use_fused_kernels(fused)
    assert (found["norms"], found["mlps"], found["rotations"]) == FOUND[family]
    assert [name for name, _ in fused.named_parameters()] == names
    assert [type(module) for module in fused.modules()] == classes
    for ours, expected in zip(loss_and_gradients(fused), loss_and_gradients(plain), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=2e-6 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("family", ["llama", *in_campaigns(["gemma3", "qwen3", "phi3"])])
def test_bfloat16_is_as_near_to_float64_as_the_models_own_precision(family: str) -> None:
    prepare()
    plain, fused = tiny(family, torch.bfloat16), tiny(family, torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    use_fused_kernels(fused)
    ours, own, reference = (
        torch.cat([tensor.double().view(-1) for tensor in loss_and_gradients(model)]) for model in (fused, plain, exact)
    )
    assert (ours - reference).norm() < 1.2 * (own - reference).norm()
    assert (ours - reference).norm() < 0.03 * reference.norm()


def test_what_is_not_the_kernels_computation_is_left_alone() -> None:
    class Clipped(nn.Module):
        """A norm that differs from the usual one on large numbers only."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, values: Tensor) -> Tensor:
            return plain_norm(values, self.weight, Norm(self.eps, 0.0, "llama")).clamp(-1.0, 1.0)

    class Gated(nn.Module):
        def __init__(self, factor: float, dropout: float | None = None) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
            self.factor = factor
            if dropout is not None:
                self.dropout = nn.Dropout(dropout)

        def forward(self, values: Tensor) -> Tensor:
            return self.down_proj(nn.functional.silu(self.factor * self.gate_proj(values)) * self.up_proj(values))

    class Dropping(Gated):
        def forward(self, values: Tensor) -> Tensor:
            gated = nn.functional.silu(self.gate_proj(values)) * self.up_proj(values)
            return self.down_proj(nn.functional.dropout(gated, 0.5, self.training))

    assert norm_of(Clipped()) is None
    assert norm_of(nn.LayerNorm(8, bias=False)) is None
    assert norm_of(nn.RMSNorm(8, eps=1e-6)) is None
    assert gated_mlp_of(Gated(1.0)) == GatedMlp(("gate_proj", "up_proj", "down_proj"), "silu")
    assert gated_mlp_of(Gated(1.1)) is None
    assert gated_mlp_of(Gated(1.0, dropout=0.1)) is None
    assert gated_mlp_of(Dropping(1.0).eval()) is None
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as interleaved
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

    assert rotates_halves(halves)
    assert not rotates_halves(interleaved)


def test_no_encoder_with_layer_norms_changes() -> None:
    config, model_class = EVERY_MODEL["siglip"]
    assert not use_fused_kernels(model_class(config))


def test_rotations_that_the_kernel_does_not_know_run_the_models_own() -> None:
    prepare()
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    calls = []

    def own(*args: object, **named: object) -> object:
        calls.append(named)
        return apply_rotary_pos_emb(*args, **named)

    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    half = torch.randn(2, 5, 4)
    same, other = torch.cat((half, half), -1), torch.cat((half, 2 * half), -1)
    for angles, num_own in ((same, 0), (other, 1)):
        calls.clear()
        rotate = fused_rotation(own)
        # At positions of zero all halves are alike: nothing is concluded from them.
        rotate(query.clone(), key.clone(), torch.ones(2, 5, 8), torch.zeros(2, 5, 8))
        assert len(calls) == 1
        found = rotate(query.clone(), key.clone(), angles.cos(), angles.sin())
        for ours, expected in zip(found, apply_rotary_pos_emb(query, key, angles.cos(), angles.sin()), strict=True):
            assert torch.allclose(ours, expected, atol=1e-6)
        assert len(calls) == 1 + num_own
    wide = same.double()
    fused_rotation(own)(query, key, wide.cos(), wide.sin())
    fused_rotation(own)(query, key, same.cos(), same.sin(), unsqueeze_dim=1)
    assert len(calls) == 4
    rotate = fused_rotation(own)
    for cos, sin in ((same.cos(), same.sin()), (same.cos().clone(), same.sin())):
        rotate(query.clone(), key.clone(), cos, sin)
    with pytest.raises(RuntimeError, match="rotary positions whose halves differ in some batches"):
        rotate(query.clone(), key.clone(), other.cos(), other.sin())


SHARED = {"kernels": "liger", "dtype": "float32"}
VERIFIED = {
    "tensor and sequence parallelism": Scenario(
        llm="qwen3", tp=2, sequence_parallel=True, items="none", num_samples=2, placement="shared", **SHARED
    ),
}
CAMPAIGNS = {
    "pipeline, recomputed": Scenario(llm_pp=2, placement="colocated", recompute="attention", **SHARED),
    "all parts over tensor-parallel ranks": Scenario(llm="qwen3", tp=2, sequence_parallel=True, **SHARED),
    "packed": Scenario(llm="qwen3", placement="replicated", packing=True, frozen="audio", **SHARED),
    "adapters": Scenario(llm="phi3", vision="clip", lora=("language_model",), placement="replicated", **SHARED),
    "zero-bubble": Scenario(llm_pp=2, schedule="zero_bubble_h1", **SHARED),
    "context parallelism": Scenario(llm="gemma3", cp=2, placement="colocated", **SHARED),
    "full sharding": Scenario(dp=2, fully_sharded=True, placement="shared", **SHARED),
    "experts": Scenario(llm="qwen3_moe", tp=2, ep=2, items="none", num_samples=2, placement="shared", **SHARED),
    "offloaded": Scenario(llm="mistral", recompute="offload", placement="replicated", **SHARED),
    "rotated vision tower": Scenario(vision="qwen2_5_vl", audio="qwen2_audio", recompute=True, **SHARED),
    "pixtral": Scenario(llm="mistral", vision="pixtral", placement="replicated", **SHARED),
}


@pytest.mark.parametrize("name", [*VERIFIED, *in_campaigns(CAMPAIGNS)])
def test_equals_one_process(name: str) -> None:
    prepare()
    check((VERIFIED | CAMPAIGNS)[name], tolerance=1e-5)


@pytest.mark.campaign
def test_bfloat16_equals_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where nobody has made the interpreter know bfloat16."""
    prepare()
    monkeypatch.setattr("motet.runtime.assembly.check_kernels", lambda config, plan, device: None)
    scenario = Scenario(items="none", num_samples=2, llm_pp=2, placement="colocated", kernels="liger", dtype="bfloat16")
    check(scenario, tolerance=2.0**-8)


@pytest.mark.campaign
def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare()
    from motet.parallel import fused_kernels

    monkeypatch.setattr(fused_kernels, "norm_of", lambda module: (own := norm_of(module)) and own._replace(eps=1e-3))
    with pytest.raises(AssertionError):
        check(Scenario(items="none", num_samples=2, placement="replicated", **SHARED), tolerance=1e-5)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Scenario(kernels="liger"), "computes in float32; give train.dtype"),
        (Scenario(compiles=True, **SHARED), "fuses kernels itself"),
        (Scenario(kernels="liger", dtype="bfloat16"), "interpreter does not compute in bfloat16"),
    ],
)
def test_what_is_not_shown_equal_is_refused(scenario: Scenario, message: str) -> None:
    config = scenario.config()
    with pytest.raises(UserError, match=message):
        check_kernels(config, scenario.plan(config), torch.device("cpu"))


def test_a_cpu_or_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from motet.parallel import fused_kernels

    check_fused_kernels(torch.device("cpu"), torch.float32)  # Interpreted.
    monkeypatch.setattr(fused_kernels, "interpreting", lambda: False)
    with pytest.raises(UserError, match=r"train\.kernels: liger needs a GPU"):
        check_fused_kernels(torch.device("cpu"), torch.float32)
    check_fused_kernels(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(fused_kernels, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'motet\[liger\]'"):
        check_fused_kernels(torch.device("cuda"), torch.bfloat16)
