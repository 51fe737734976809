"""float32 masters and main gradients of bfloat16 parameters."""

from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from one_process import verify
from scenario import Scenario
from torch import nn
from training import Layout, run_config, stored_tensors, train
from transformers import LlamaConfig, LlamaForCausalLM

from motet.parallel.main_gradients import keep_main_gradients
from motet.parallel.saved_tensors import save_less
from motet.runtime.training.master_weights import MASTER, MasterAdamW

DP2: Layout = {"vision": {"dp": 2}, "audio": {"dp": 2}, "language_model": {"dp": 2}}


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
    Scenario(dtype="bfloat16", placement="shared", llm_pp=2, tp=2, sequence_parallel=True, recompute=True),
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
    options = {
        "train__dtype": "bfloat16",
        "train__steps": 4,
        "train__checkpoint_every": 2,
        "train__lr_schedule": "constant",
        "parallel__zero1": True,
    }
    whole, half = (run_config(tmp_path / name, DP2, **options) for name in ("whole", "half"))
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


def test_float32_checkpoints_go_on_in_bfloat16(tmp_path: Path) -> None:
    """As those of 0.1.0 under autocast do: what they hold is what masters and moments begin with."""
    wide = run_config(tmp_path, DP2, train__steps=2, train__checkpoint_every=2)
    train(wide)
    before = stored_tensors(tmp_path / "checkpoints" / "step_00000002")
    resumed = {"steps": 3, "resume": "latest", "dtype": "bfloat16", "learning_rate": 1e-12, "weight_decay": 0.0}
    (found,) = train(wide.model_copy(update={"train": wide.train.model_copy(update=resumed)}))
    after = stored_tensors(Path(found["checkpoint"]))
    names = [name for name in before if name.startswith("model/")]
    assert any(not torch.equal(before[name], before[name].bfloat16().float()) for name in names)
    for name in names:
        torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-8)


LLAMA = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attn_implementation": "sdpa",
}
NUM_TOKENS = 48


def make_llama(seed: int, kind: str) -> LlamaForCausalLM:
    """Of one value in every dtype."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).bfloat16()
    return model.to({"float64": torch.float64, "autocast": torch.float32}.get(kind, torch.bfloat16))


def losses_of_30_steps(seed: int, kind: str) -> list[float]:
    model = make_llama(seed, kind)
    keep_main_gradients(model.parameters())
    optimizer_class = MasterAdamW if kind == "bfloat16" else torch.optim.AdamW
    optimizer = optimizer_class(model.parameters(), lr=3e-4, weight_decay=0.0)
    data = torch.randint(0, 128, (8, 1, NUM_TOKENS), generator=torch.Generator().manual_seed(seed + 100))
    losses = []
    for _ in range(30):
        total = 0.0
        for ids in data:
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            wide = logits if kind == "float64" else logits.float()
            loss = nn.functional.cross_entropy(wide, ids[0, 1:], reduction="sum") / (8 * (NUM_TOKENS - 1))
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.campaign
def test_30_steps_are_as_near_to_float64_as_under_autocast() -> None:
    errors = {"autocast": 0.0, "bfloat16": 0.0}
    for seed in range(3):
        exact = losses_of_30_steps(seed, "float64")
        of_seed = {}
        for kind in errors:
            losses = losses_of_30_steps(seed, kind)
            of_seed[kind] = sum(abs(a - b) for a, b in zip(losses, exact, strict=True)) / len(exact)
            errors[kind] += of_seed[kind] / 3
        print(f"seed {seed}: mean error of the loss {of_seed}")
    print(f"three seeds: {errors}")
    assert errors["bfloat16"] <= 1.2 * errors["autocast"]


def saved_bytes(kind: str) -> tuple[int, list[torch.Tensor]]:
    """What autograd keeps of two blocks' forward, parameters and casts of weights left out; the gradients."""
    model = make_llama(0, kind)
    weights = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tuple(tensor.shape) not in weights:
            kept.setdefault(storage.data_ptr(), tensor)
        return tensor

    x = torch.randn(1, 200, 128).to(next(model.parameters()).dtype).requires_grad_()
    positions = torch.arange(200)[None]
    rotary = model.model.rotary_emb(x, positions)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with save_less(torch.bfloat16, keep) if kind == "less" else hooks, autocast:
        hidden = x
        for block in model.model.layers[1:3]:
            hidden = block(hidden, position_embeddings=rotary, position_ids=positions, attention_mask=None)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    hidden.float().square().sum().backward()
    return size, [x.grad, *(p.grad for layer in model.model.layers[1:3] for p in layer.parameters())]


def test_fewer_activations_are_saved_than_under_autocast() -> None:
    """The gradients are the same to the bit."""
    (autocast, _), (plain, expected), (less, gradients) = (saved_bytes(k) for k in ("autocast", "bfloat16", "less"))
    print(f"saved activations: {less / autocast:.3f} of those under autocast, {plain / autocast:.3f} by torch's rules")
    assert less <= 0.65 * autocast
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
