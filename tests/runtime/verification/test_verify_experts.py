"""`motet verify` for mixtures of experts whose experts are distributed over ranks."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from one_process import check, check_together
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch
from test_verify_zero1 import PlainAdamW
from tiny_language_models import MIXTURES

from motet.assignment.batch_assignment import contiguous_assignment
from motet.config import RunConfig
from motet.costs.stage_seconds import token_exchange_bytes
from motet.families.capabilities import FEATURES, SHOWN_EQUAL
from motet.families.configured_graph import read_graph
from motet.runtime.assembly import build_optimizer
from motet.runtime.engine import Engine
from motet.runtime.verification.verify import collect_gradients

FAMILIES = tuple(family for family in MIXTURES if family not in ("llama4", "mixtral-kernels"))
"""Llama 4's experts are not told which tokens are theirs: tensor parallelism cuts their widths."""

GROUP = Scenario(tp=2, ep=2, placement="replicated")
"""A tensor-parallel group shares the experts; it has the same tokens on all ranks."""
REPLICAS = Scenario(dp=2, ep=2, placement="replicated")
"""Two replicas share them and exchange tokens."""
LAYOUTS = {
    "group": GROUP,
    "group, sequence parallel": replace(GROUP, sequence_parallel=True),
    "group, two stages": replace(GROUP, llm_pp=2),
    "replicas": REPLICAS,
    "replicas, two stages": replace(REPLICAS, llm_pp=2),
    "replicas of groups, sequence parallel": replace(REPLICAS, tp=2, ep=4, sequence_parallel=True),
    "pairs of replicas": replace(REPLICAS, dp=4),
}
"""Every layout; each family runs under all of them in campaigns."""
COMBINED = {
    "no sample for a microbatch": replace(REPLICAS, num_samples=3),
    "no sample for a replica": replace(REPLICAS, num_samples=1, num_microbatches=1),
    "images of one sample, frozen model": replace(REPLICAS, frozen="all but projectors", items="one"),
    "no images": replace(REPLICAS, items="none"),
    "frozen encoders, packed, recomputed": replace(
        REPLICAS, frozen="all but language model", packing=True, recompute=True
    ),
    "split backward": replace(REPLICAS, schedule="zero_bubble_h1", items="half"),
    "split backward in a group": replace(GROUP, schedule="zero_bubble_h1", sequence_parallel=True),
    "recomputed in a group, frozen encoders": replace(GROUP, recompute=True, frozen="all but language model"),
    "shared tokens": replace(REPLICAS, cp=2, placement="shared"),
    "shared tokens, group": replace(GROUP, cp=2, placement="shared"),
    "encoders elsewhere": replace(REPLICAS, placement="parallel", units=(1, 1, 2)),
    "deferral": replace(REPLICAS, assignment="entrain", num_microbatches=3, items="half"),
    "frozen model in a group": replace(GROUP, frozen="all but encoders", items="one"),
}

QUICK = [
    replace(GROUP, llm="mixtral"),
    replace(GROUP, llm="deepseek_v3", sequence_parallel=True),
    replace(REPLICAS, llm="gpt_oss", num_samples=3),
    replace(REPLICAS, llm="qwen3_moe", llm_pp=2, schedule="zero_bubble_h1", items="half"),
]


def test_experts_equal_one_process() -> None:
    for comparison in check_together(QUICK).values():
        assert comparison.max_raw_grad_rel_err <= 1e-9


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_every_layout(family: str) -> None:
    for layout, comparison in zip(
        LAYOUTS, check_together([replace(s, llm=family) for s in LAYOUTS.values()]).values(), strict=True
    ):
        print(f"{family}, {layout}: {comparison.max_raw_grad_rel_err:.1e}")


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMBINED)
def test_with_other_mechanisms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[(sorted(COMBINED).index(name) + 1) % len(FAMILIES)]
    monkeypatch.setitem(SHOWN_EQUAL, family, frozenset(FEATURES))  # Their own tests ask for probes.
    check(replace(COMBINED[name], llm=family))


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_transformers_kernels_for_experts(dtype: str) -> None:
    """They are what a user has who asks for nothing; the reference in float64 does without."""
    check_together([replace(layout, llm="mixtral-kernels", dtype=dtype) for layout in (GROUP, REPLICAS)])


def test_tokens_of_samples_that_experts_return_as_one_row_are_shared_by_sample() -> None:
    check_together([replace(GROUP, llm="llama4", ep=1, sequence_parallel=True)])


@pytest.mark.campaign
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_experts_cut_by_their_widths(sequence_parallel: bool) -> None:
    check_together(
        [replace(GROUP, llm=family, ep=1, sequence_parallel=sequence_parallel) for family in (*FAMILIES, "llama4")]
    )


BALANCED = {
    "three microbatches": Scenario(num_microbatches=3, placement="shared"),
    "one microbatch, three stages": Scenario(num_microbatches=1, num_samples=5, llm_pp=3, placement="replicated"),
    "packed, recomputed": Scenario(llm_pp=2, packing=True, recompute=True, placement="replicated"),
    "shared tokens": Scenario(cp=2, llm_pp=2, placement="parallel", units=(1, 1, 1)),
    "group, sequence parallel": replace(GROUP, sequence_parallel=True, llm_pp=2),
    "replicas, split backward": replace(REPLICAS, llm_pp=2, schedule="zero_bubble_h1", num_samples=3),
}


@pytest.mark.parametrize(
    "name", ["packed, recomputed", *in_campaigns(n for n in BALANCED if n != "packed, recomputed")]
)
def test_auxiliary_loss_is_the_same_however_the_batch_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = ("qwen3_moe", "mixtral")[sorted(BALANCED).index(name) % 2]
    monkeypatch.setitem(SHOWN_EQUAL, family, frozenset(FEATURES))
    check(replace(BALANCED[name], llm=family, router_aux_loss=0.7))


def compare_bytes(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
    """What all ranks give to exchanges of rows is what the costs say. One rank gives back as many rows as it got."""
    given: list[int] = []
    plain = dist.all_to_all_single

    def counted(output, rows, *args, **kwargs):
        if rows.is_floating_point():
            given.append(rows.numel() * rows.element_size())
        return plain(output, rows, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        engine.run(batch)
    plan, (workload,) = engine.plan, [read_graph(config).workloads["language_model"]]
    cells = contiguous_assignment(plan, batch.samples).microbatches["language_model"]
    replica = next(r for name, r, _ in engine.model.stages if name == "language_model")
    tokens = 0
    for members in cells[replica]:
        lengths = [batch.samples[i].num_tokens("language_model") for i in members]
        tokens += len(lengths) * max(lengths, default=0)
    per_token = sum(
        token_exchange_bytes(layer, plan.modules["language_model"].replicas[0].stages[0].tp_size, 8)
        for layer in workload.layers
    )
    totals = torch.tensor([sum(given), 4 * tokens * per_token], dtype=torch.float64)
    dist.all_reduce(totals)
    assert totals[0] == totals[1] > 0


@pytest.mark.campaign
def test_bytes_of_exchanges_are_as_predicted() -> None:
    check(replace(REPLICAS, llm="mixtral", num_samples=5), before=compare_bytes)


def update_twice(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
    """Collective: two updates with states sharded by ZeRO-1 are those of plain AdamW."""
    optimizer = build_optimizer(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero1": True})}), engine.model
    )
    plain = PlainAdamW(engine, config.train.betas, config.train.eps, config.train.weight_decay)
    for step in range(2):
        engine.model.zero_gradients()
        engine.run(batch)
        gradients = collect_gradients(engine.model)
        optimizer.step(step)
        plain.step(gradients, config.train.learning_rate * optimizer.factor(step))
    plain.compare(engine)


@pytest.mark.parametrize("scenario", in_campaigns([REPLICAS, GROUP, LAYOUTS["pairs of replicas"]]))
def test_updates_with_sharded_states_are_plain(scenario: Scenario) -> None:
    check(replace(scenario, llm="qwen3_moe"), tolerance=1e-5, before=update_twice)
