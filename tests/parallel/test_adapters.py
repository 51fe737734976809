"""Adapters (LoRA) in stages that are cut, against peft in one process of plain transformers."""

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from distributed import run_distributed
from one_process import check, check_drawn, check_together
from peft import LoraConfig, PeftModel, get_peft_model
from sampling import in_campaigns
from scenario import FROZEN, Scenario, ScenarioBatch
from tiny_language_models import TINY
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, Olmo2Config, Olmo2ForCausalLM

from motet.config import RunConfig
from motet.families.classes import model_class_of
from motet.models.hub.export import describe_config, export_parts, load_export
from motet.models.materialize import float64_throughout, read_part_config
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.verification.verify import collect_weights, fill_adapters

NUM_DRAWS = int(os.environ.get("MOTET_LORA_DRAWS", "40"))
SEED = os.environ.get("MOTET_LORA_SEED", "16")

NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2_VALUES = {"intermediate_size": None, "num_key_value_heads": None, "max_position_embeddings": 256, **NO_DROPOUT}
FAMILIES = {"olmo2": (Olmo2ForCausalLM, Olmo2Config, {}), "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2_VALUES)}

LORA = Scenario(lora=("language_model",), frozen="audio", placement="shared")
WHOLE = replace(LORA, llm_pp=2, tp=2)
CASES = {
    "pipeline and tensor parallelism": WHOLE,
    "sequence parallel, split backward": replace(WHOLE, sequence_parallel=True, schedule="zero_bubble_h1"),
    "some linears, tied, recomputed": replace(
        LORA, llm="llama-tied", lora_targets=("q_proj", "o_proj"), tp=2, recompute=True, frozen="all but language model"
    ),
    "context parallel": replace(LORA, cp=2, items="half"),
    "sharded": replace(LORA, cp=2, encoder_cp=2, placement="colocated", fully_sharded=True),
    "encoders too": replace(
        LORA, lora=("vision", "audio", "language_model"), frozen="nothing", encoder_pp=2, llm_pp=2, tp=2
    ),
    "norms over all heads": replace(LORA, llm="olmo2", tp=2),
    "packed": replace(LORA, llm="qwen3", tp=2, packing=True),
    "Conv1D": replace(LORA, llm="gpt2", tp=2),
    "fused queries, keys and values": replace(LORA, llm="phi3", tp=2, sequence_parallel=True),
    "inner features": replace(LORA, lora=("vision",), feature_layer=-2, frozen="all but encoders", tp=2),
    "experts": replace(LORA, llm="mixtral", tp=2, sequence_parallel=True),
    "experts over replicas": replace(LORA, llm="qwen3_moe", dp=2, ep=2),
    "two replicas, interleaved": replace(LORA, llm_pp=4, llm_places=(0, 1, 0, 1), dp=2, schedule="interleaved_1f1b"),
}
USUAL = ("sequence parallel, split backward", "sharded")


@pytest.fixture(autouse=True)
def _more_families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in FAMILIES.items():
        monkeypatch.setitem(TINY, name, family)


def test_equals_peft() -> None:
    check_together([CASES[name] for name in USUAL])


@pytest.mark.parametrize("name", in_campaigns(name for name in CASES if name not in USUAL))
def test_other_layouts_equal_peft(name: str) -> None:
    check(CASES[name])


def draw(rng: Random) -> Scenario:
    tp = rng.choice([1, 2])
    llm_pp = rng.choice([1, 2])
    frozen = rng.choice([name for name in sorted(FROZEN) if "language_model" not in FROZEN[name]])
    cp = rng.choice([1, 2]) if tp * llm_pp < 4 else 1
    llm = rng.choice(
        ["llama", "llama-tied", "qwen3", "gemma3", "phi3", "olmo2", "gpt2"] if cp == 1 else ["llama", "qwen3"]
    )
    lora = rng.choice([("language_model",), ("vision", "language_model"), ("vision", "audio", "language_model")])
    return replace(
        LORA,
        llm=llm,
        lora=tuple(name for name in lora if name not in FROZEN[frozen]),
        lora_targets=None,
        frozen=frozen,
        items=rng.choice(["mixed", "half", "one", "none"]),
        tp=tp,
        llm_pp=llm_pp,
        cp=cp,
        encoder_cp=cp if rng.random() < 0.5 else 1,
        fully_sharded=cp > 1 and rng.random() < 0.5,
        sequence_parallel=rng.random() < 0.5,
        packing=rng.random() < 0.3 and llm not in ("olmo2", "gpt2"),
        recompute=rng.random() < 0.3,
        schedule=rng.choice(["1f1b", "gpipe", "zero_bubble_h1"]),
        placement="shared" if cp == 1 else "colocated",
    )


@pytest.mark.campaign
def test_drawn_layouts() -> None:
    print(f"MOTET_LORA_SEED={SEED} MOTET_LORA_DRAWS={NUM_DRAWS}")
    check_drawn(draw, check, SEED, NUM_DRAWS)


TEXT = replace(WHOLE, frozen="all but language model", items="none", num_samples=5)
NUM_STEPS = 10


def run_file() -> RunConfig:
    """At one learning rate."""
    config = TEXT.config()
    return config.model_copy(update={"train": config.train.model_copy(update={"lr_schedule": "constant"})})


def trained(scenario: Scenario) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before and after some steps, on the first rank."""
    config = run_file()
    with float64_throughout():
        engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
        fill_adapters(engine.model)
        before = collect_weights(engine.model)
        optimizer = build_optimizer(config, engine.model)
        batch = ScenarioBatch(scenario, config)
        for step in range(NUM_STEPS):
            engine.run(batch)
            optimizer.step(step)
            engine.model.zero_gradients()
        after = collect_weights(engine.model)
    if before is None or after is None:
        return {}, {}
    return {n: own for n, (own,) in before.items()}, {n: own for n, (own,) in after.items()}


def train_with_peft(config: RunConfig, weights: dict[str, torch.Tensor], batch: ScenarioBatch) -> PeftModel:
    """The same steps by plain transformers, peft and torch."""
    part = config.model.causal_lm
    hf_config = read_part_config(part, "language_model", where="model")
    model = get_peft_model(
        model_class_of(hf_config.model_type, "language_model")(hf_config).double(),
        LoraConfig(r=2, lora_alpha=3.0, target_modules="all-linear"),
    ).double()
    prefix = "language_model.module."
    own = {f"base_model.model.{n.removeprefix(prefix)}": w for n, w in weights.items() if n.startswith(prefix)}
    model.load_state_dict(own, strict=True)
    options = config.train
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    samples = [batch.features("language_model", i) for i in range(len(batch.samples))]
    num_tokens = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    for _ in range(NUM_STEPS):
        for sample in samples:
            logits = model(input_ids=sample["input_ids"][None], use_cache=False).logits[0, :-1]
            (cross_entropy(logits, sample["labels"][1:], reduction="sum") / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_ten_steps_equal_peft_which_loads_the_result(tmp_path: Path) -> None:
    config = run_file()
    batch = ScenarioBatch(TEXT, config)
    before, after = run_distributed(lambda rank: trained(TEXT), TEXT.num_ranks, timeout=120)[0]
    with float64_throughout():
        model = train_with_peft(config, before, batch)
    num_compared = 0
    for name, parameter in model.named_parameters():
        ours = after[f"language_model.module.{name.removeprefix('base_model.model.')}"]
        assert (ours - parameter).norm() <= 1e-9 * parameter.norm(), name
        num_compared += parameter.requires_grad
    assert num_compared == 2 * 7 * 4

    export_parts(after, describe_config(config.model, {"vision": 3, "audio": 4}), tmp_path / "export")
    ids = batch.features("language_model", 0)["input_ids"][None]
    plain = model_class_of("llama", "language_model").from_pretrained(tmp_path / "export" / "language_model")
    with torch.no_grad():
        expected, base = (each(input_ids=ids).logits for each in (model, plain))
        read_again = PeftModel.from_pretrained(plain, tmp_path / "export" / "language_model_adapter")
        by_peft = read_again(input_ids=ids).logits
        by_motet = load_export(tmp_path / "export").language_model.module(input_ids=ids).logits
    assert (base - expected).norm() > 1e-3 * expected.norm()
    # Norms are computed in float32 here.
    for logits in (by_peft, by_motet):
        assert (logits - expected).norm() < 1e-5 * expected.norm()
