"""DistMM's tables: models and systems are the paper's, Figure 7's ranges are met, the shapes hold."""

from dataclasses import replace

import pytest

from motet.planner.evaluate import evaluate
from papers.distmm.models import (
    ALPA,
    MEGATRON_1_0,
    MEGATRON_2019,
    SIZES,
    problem,
    tower,
    utilization,
    v100_speeds,
)
from papers.distmm.systems import (
    BYTES_OF_A_REPLICA,
    DISTMM_BATCH,
    MEGATRON_TP,
    PUBLISHED_REPLICAS,
    balanced_outcome,
    distmm_outcome,
    larger_batch_outcome,
    megatron_outcome,
    problems,
    published_partition,
    separated_outcome,
    setting,
)
from papers.distmm.tables import OTHERWISE, PUBLISHED_SPEEDUPS, tables

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
    for training in (ALPA, MEGATRON_2019, MEGATRON_1_0):
        speeds = v100_speeds(training)
        assert utilization(speeds, training) == pytest.approx(training.utilization)
        assert 0 < speeds.gemm.overhead_s < 1e-4
        assert training.utilization < speeds.gemm.limit < 0.9, (
            "products are faster than a model, slower than large ones"
        )
    # Alpa's artifact has Megatron-LM's models of up to 39 B parameters between 40 and 47% of peak.
    large = replace(ALPA, layers=32, hidden_size=4096, sequences=4)
    assert 0.40 < utilization(v100_speeds(), large) < 0.47


def test_partitions_are_those_that_the_paper_mentions():
    clip, coca = setting("single node", "CLIP").problem, setting("single node", "CoCa").problem
    assert published_partition(clip, "text") == (4, 1)
    assert published_partition(coca, "text") == published_partition(coca, "vision") == (8, 1)
    large = setting("multi-node", "CoCa").problem
    assert published_partition(large, "vision") == (8, 2)
    assert all(published_partition(setting("single device", m).problem, "vision") == (1, 1) for m in MODELS)


def test_only_shared_states_let_megatron_lm_hold_the_models():
    """Table 2's largest at each scale, colocated, in the partitions of section 7.1."""
    for scale, tp in MEGATRON_TP.items():
        given = setting(scale, "CoCa").problem
        parameters = sum(given.modules[name].workload.num_parameters for name in given.towers)
        assert parameters * BYTES_OF_A_REPLICA / tp > 16e9
        assert megatron_outcome(setting(scale, "CoCa")).evaluation.fits


def test_published_replicas_are_taken():
    assert dict.fromkeys(MODELS, 512) == {model: setting("single device", model).batch for model in MODELS}
    for (scale, model), numbers in PUBLISHED_REPLICAS.items():
        assert sum(numbers) == 64
        modules = distmm_outcome(setting(scale, model)).evaluation.plan.modules
        assert tuple(len(modules[name].replicas) for name in ("vision", "text")) == numbers
    # 10 and 150 samples a replica are one batch with these numbers only.
    assert [(n, 64 - n) for n in range(1, 64) if 10 * n == 150 * (64 - n)] == [
        PUBLISHED_REPLICAS["single device", "CLIP"]
    ]
    larger = larger_batch_outcome(setting("single device", "CLIP"))
    assert len(larger.evaluation.problem.samples) == DISTMM_BATCH == 10 * 60 == 150 * 4
    assert larger.evaluation.fits


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


def test_the_shapes_of_figures_8_to_10():
    for scale in ("single node", "single device"):
        for model in MODELS:
            each = setting(scale, model)
            megatron, distmm = megatron_outcome(each), distmm_outcome(each)
            assert distmm.utilization("text") > megatron.utilization("text")
            assert distmm.utilization("vision") > megatron.utilization("vision") * 0.99
    # Section 7.2.1: what gains most is CLIP's text tower, which needs half of Megatron-LM's tensor parallelism.
    gains = {
        (model, name): distmm_outcome(each).utilization(name) / megatron_outcome(each).utilization(name)
        for model in MODELS
        for each in [setting("single node", model)]
        for name in ("vision", "text")
    }
    assert max(gains, key=gains.__getitem__) == ("CLIP", "text")
    assert gains["CLIP", "text"] > 1.4
    reduced = {}
    for model in MODELS:
        each = setting("single device", model)
        reduced[model] = megatron_outcome(each).communication_share - separated_outcome(each).communication_share
    assert min(reduced.values()) > 0
    assert max(reduced, key=reduced.__getitem__) == "CoCa"


@pytest.mark.campaign
def test_the_ranges_of_figure_7_are_met_but_for_the_largest_speedup():
    speedups = {what: row for (table, what), row in rows().items() if table == "Figure 7" and row.published}
    assert len(speedups) == sum(2 - (lowest is None) for lowest, _ in PUBLISHED_SPEEDUPS.values()) == 5
    for what, row in speedups.items():
        # 20.7% below, as docs/accuracy.md says: costs are of other sources than this figure.
        assert row.ratio == pytest.approx(1, abs=0.15 if "multi-node" not in what else 0.22), what


@pytest.mark.campaign
def test_what_is_said_is_what_is():
    found = rows()
    other = {what: row for (table, what), row in found.items() if table == "Figure 7 under other assumptions"}
    missed = {what for what, row in other.items() if row.ratio and abs(row.ratio - 1) > 0.15}
    assert {what.split(":")[0] for what in missed} == OTHERWISE.keys(), "none of them meets every range"
    coca = setting("single device", "CoCa")
    assert other["replicas as motet balances them: CoCa(760M, 760M)"].ours == pytest.approx(
        megatron_outcome(coca).iteration_s / balanced_outcome(coca).iteration_s
    )
    assert set(PUBLISHED_SPEEDUPS) == set(MEGATRON_TP)
    replicas = [row.ratio for (table, what), row in found.items() if table.startswith("Section") and "CLIP" in what]
    assert replicas == pytest.approx([1, 1], abs=0.06)
    for row in found.values():
        assert row.assumptions
        assert row.calibrated_on == "nothing"
        assert row.held_out == (row.published is not None)


def test_problems_are_the_nine_models():
    named = dict(problems())
    assert len(named) == 9
    for what, each in named.items():
        assert each.num_devices == 64
        assert each.towers == ("vision", "text")
        assert what.endswith(f"batch {len(each.samples)}")
