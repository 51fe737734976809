"""DistMM's tables: models and systems are the paper's, the shapes hold, misses are known."""

from dataclasses import replace

import pytest

from motet.planner.evaluate import evaluate
from motet.reproduce.distmm import PUBLISHED_SPEEDUPS, tables
from motet.reproduce.distmm_models import MEGATRON_UTILIZATION, SIZES, problem, tower, utilization, v100_speeds
from motet.reproduce.distmm_systems import (
    MEGATRON_TP,
    distmm_outcome,
    megatron_outcome,
    published_partition,
    separated_outcome,
    setting,
)

MODELS = ("CLIP", "CoCa", "LiT")


def rows():
    return {(table.table.split(":")[0], row.what): row for table in tables() for row in table.rows}


def test_the_towers_have_the_papers_sizes():
    """Table 2 names GPT-3's sizes; the smaller ones count a vocabulary, which images do not have."""
    nominal = {"350M": 0.35e9, "760M": 0.76e9, "2.7B": 2.7e9, "6.7B": 6.7e9, "13B": 13e9}
    for size in SIZES:
        assert tower("text", size).num_parameters == pytest.approx(nominal[size], rel=0.04)
        assert tower("vision", size).num_parameters == pytest.approx(nominal[size], rel=0.14)


def test_the_v100_is_as_fast_as_others_measured():
    speeds = v100_speeds()
    assert utilization(speeds) == pytest.approx(MEGATRON_UTILIZATION)
    assert 0 < speeds.gemm.overhead_s < 1e-4
    assert 0.48 < speeds.gemm.limit < 0.9, "a product is faster than a whole model, and slower than 8192 x 8192 x 8192"


def test_partitions_are_those_that_the_paper_mentions():
    clip, coca = setting("single node", "CLIP").problem, setting("single node", "CoCa").problem
    assert published_partition(clip, "text") == (4, 1)
    assert published_partition(coca, "text") == published_partition(coca, "vision") == (8, 1)
    large = setting("multi-node", "CoCa").problem
    assert published_partition(large, "vision") == (8, 2)


def ranks_of(plan, tower):
    return {rank for name, _, _, stage in plan.stages() if name == tower for rank in stage.ranks}


@pytest.mark.parametrize("scale", MEGATRON_TP)
def test_both_systems_fit_and_distmm_keeps_towers_apart(scale):
    for model in MODELS:
        each = setting(scale, model)
        both = megatron_outcome(each).evaluation, distmm_outcome(each).evaluation
        assert all(evaluation.fits for evaluation in both), f"{model} {scale}"
        plans = [evaluation.plan for evaluation in both]
        together, apart = ([ranks_of(plan, tower) for tower in each.problem.towers] for plan in plans)
        assert together == [set(range(64))] * 2
        assert apart[0].isdisjoint(apart[1])


def test_batches_are_as_large_as_megatron_lm_can_have_them():
    """Section 7.2.1: LiT's images are cheaper to keep, so its batch is larger than CLIP's."""
    batches = {}
    for model in MODELS:
        each = setting("single node", model)
        batches[model] = each.batch
        one_more = replace(each.problem, samples=problem(each.vision, each.text, each.batch + 8).samples)
        assert not evaluate(one_more, megatron_outcome(each).evaluation.plan).fits
    assert batches["LiT"] > batches["CLIP"] > batches["CoCa"]


def test_published_speedups_lie_within_what_longer_steps_give():
    table = next(table for table in tables() if "several contrastive batches" in table.table)
    speedups = {model: [row.ours for row in table.rows if row.what.startswith(model)] for model in ("CoCa", "CLIP")}
    # Computation gains on the sum of gradients.
    assert speedups["CoCa"] == sorted(speedups["CoCa"], reverse=True)
    assert speedups["CLIP"] == sorted(speedups["CLIP"])
    assert 0.85 < speedups["CoCa"][-1] / PUBLISHED_SPEEDUPS["single node"][1] < 1.15 < speedups["CoCa"][0] / 1.67
    assert speedups["CLIP"][0] < 0.85 * PUBLISHED_SPEEDUPS["multi-node"][1] < 1.15 * 3.27 < speedups["CLIP"][-1]


def test_the_shapes_of_figures_8_to_10():
    for scale in ("single node", "single device"):
        for model in MODELS:
            each = setting(scale, model)
            megatron, distmm = megatron_outcome(each), distmm_outcome(each)
            assert distmm.utilization("text") > megatron.utilization("text")
            assert distmm.utilization("vision") > megatron.utilization("vision") * 0.99
    clip = setting("single node", "CLIP")
    assert distmm_outcome(clip).utilization("text") > 1.5 * megatron_outcome(clip).utilization("text")
    reduced = {}
    for model in MODELS:
        each = setting("single device", model)
        reduced[model] = megatron_outcome(each).communication_share - separated_outcome(each).communication_share
    assert min(reduced.values()) > 0
    assert max(reduced, key=reduced.__getitem__) == "CoCa"


def test_what_is_said_is_what_is():
    found = rows()
    figure = "Figure 7"
    near = [
        found[figure, what].ratio
        for what in ("single device, lowest speedup", "single device, highest speedup", "single node, lowest speedup")
    ]
    assert near == pytest.approx([1, 1, 1], abs=0.15)
    # Known misses: the batches are not published, and the sum of gradients decides (the second table).
    assert found[figure, "single node, highest speedup"].ratio == pytest.approx(1.31, abs=0.03)
    assert found[figure, "multi-node, highest speedup"].ratio == pytest.approx(0.83, abs=0.03)
    assert set(PUBLISHED_SPEEDUPS) == set(MEGATRON_TP)
    replicas = [row.ratio for (table, what), row in found.items() if table.startswith("Section") and "CLIP" in what]
    assert replicas == pytest.approx([1, 1], abs=0.06)
    for row in found.values():
        assert row.assumptions
        assert row.calibrated_on == "nothing"
        assert row.held_out == (row.published is not None)
