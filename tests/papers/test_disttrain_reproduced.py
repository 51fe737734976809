"""DistTrain's tables: the models are the paper's, the calibration is met, the shape holds, misses are known."""

from dataclasses import replace
from functools import cache

import pytest

from motet.planner.disttrain.orchestration import orchestrate
from motet.planner.disttrain.planner import disttrain as plan_disttrain
from motet.planner.disttrain.planner import orchestrated_plan, orchestration_problem
from motet.planner.evaluate import evaluate
from papers.disttrain.alternatives import ALTERNATIVES, alternatives_table, calibrated
from papers.disttrain.models import (
    ASSUMED,
    BACKBONES,
    FROZEN_SETTINGS,
    PEAK_FLOPS,
    SEQUENCE,
    backbone,
    image_tokens,
    mllm,
    sample_flops,
    unet,
    vit_huge,
)
from papers.disttrain.reordering import reordering_table
from papers.disttrain.systems import (
    LARGE,
    MEGATRON_STAGES,
    SMALL,
    _fewest_devices,
    disttrain,
    megatron,
    proportional,
)
from papers.disttrain.tables import _deep_dive, _frozen, _overall, _step_ccl, problems


@cache
def all_tables():
    """But for the alternatives, which take the longest."""
    return [_overall(), _deep_dive(), reordering_table(), _frozen(), _step_ccl()]


def rows():
    return {(table.table.split(":")[0], row.what): row for table in all_tables() for row in table.rows}


def test_the_models_have_the_papers_sizes():
    assert vit_huge().num_parameters == pytest.approx(0.63e9, rel=0.01)
    assert unet().num_parameters == pytest.approx(866e6, rel=0.01)
    parameters = {size: backbone(size).num_parameters for size in BACKBONES}
    assert parameters["9B"] == pytest.approx(7e9, rel=0.05)
    assert parameters["15B"] == pytest.approx(13e9, rel=0.05)
    assert parameters["72B"] == pytest.approx(70e9, rel=0.05)


def test_megatron_is_the_papers():
    """Tensor parallelism 8, one more stage for the encoder and one for the generator, all data-parallel alike."""
    for size, stages in MEGATRON_STAGES.items():
        num_devices = megatron(size, LARGE[0], LARGE[1][size]).num_devices
        assert num_devices % (8 * (stages + 2)) == 0
        assert num_devices <= LARGE[0]


def test_the_shape_of_figures_15_to_17():
    num_devices, batches = LARGE
    gains = [
        disttrain(size, num_devices, batches[size]).mfu / megatron(size, num_devices, batches[size]).mfu
        for size in BACKBONES
    ]
    assert gains == sorted(gains, reverse=True), "the smaller the model, the larger the gain"
    assert all(gain > 1 for gain in gains)
    for size in BACKBONES:
        small = size, SMALL[0], SMALL[1][size]
        times = [disttrain(*small), proportional(*small, by_time=True), megatron(*small)]
        assert [each.iteration_s for each in times] == sorted(each.iteration_s for each in times)
        assert disttrain(*small).mfu > proportional(*small).mfu


def test_assumptions_that_others_published():
    """Two measured throughputs of eight A100, from which the efficiencies follow."""
    a_unet_image = sample_flops("9B")[2] / ASSUMED.images
    assert pytest.approx(290 / 8 * 3 * a_unet_image / PEAK_FLOPS, rel=0.01) == ASSUMED.unet_efficiency
    # 256 words are about 350 tokens.
    assert SEQUENCE - ASSUMED.images * image_tokens(ASSUMED) == pytest.approx(350, abs=5)


def test_the_one_constant_is_what_calibrating_gives():
    assert calibrated(ASSUMED).matrix_efficiency == pytest.approx(ASSUMED.matrix_efficiency, rel=0.005)


@pytest.mark.campaign
def test_no_alternative_brings_all_three_models_to_the_published_ratios():
    """What the table's note says of 15B: too good by a seventh, but for a baseline with StepCCL, which 9B speaks
    against."""
    ratios = {
        alternative.what: {row.what.split(":")[0][-3:].strip(): row.ours for row in rows}
        for alternative, rows in zip(ALTERNATIVES, batched(alternatives_table().rows, 3), strict=True)
    }
    with_step_ccl = ratios.pop("Megatron-LM with StepCCL")
    assert all(1.9 < each["15B"] < 2.01 for each in ratios.values())
    assert with_step_ccl["15B"] == pytest.approx(1.7, rel=0.05)
    assert with_step_ccl["9B"] < 0.8 * 2.8
    for each in (*ratios.values(), with_step_ccl):
        assert each["9B"] / each["15B"] < 1.5 < 2.75 / 1.75
    assert max(each["72B"] for each in ratios.values()) > 1.8
    assert min(each["72B"] for each in ratios.values()) < 1.27


def batched(rows, number):
    return [rows[i : i + number] for i in range(0, len(rows), number)]


def test_devices_that_bring_little_are_spared():
    problem = mllm("72B", 112, 240)
    best, fewest = orchestrate(problem), _fewest_devices(problem, 0.05)
    assert fewest.num_devices < best.num_devices
    assert best.iteration_s <= fewest.iteration_s <= best.iteration_s * 1.05
    found = orchestrate(replace(problem, num_devices=fewest.num_devices - 1))
    assert found.iteration_s > best.iteration_s * 1.05
    assert _fewest_devices(problem, 0.0).iteration_s == best.iteration_s


def test_how_many_devices_are_spared_hardly_depends_on_the_share():
    num_devices, batches = LARGE
    at = {
        spared: disttrain("72B", num_devices, batches["72B"], assumed=replace(ASSUMED, spared=spared)).num_devices
        for spared in (0.0, 0.01, 0.02, 0.03)
    }
    assert at[0.01] == at[0.02] == at[0.03] < at[0.0]


def test_stages_divide_the_layers_as_in_megatron():
    for size, (layers, *_) in BACKBONES.items():
        degrees = orchestrate(mllm(size, LARGE[0], LARGE[1][size])).degrees["language_model"]
        assert layers % (degrees.pp * degrees.vpp) == 0


def test_what_is_said_is_what_is():
    found = rows()
    overall = "Figures 15 and 16"
    calibrated = found[overall, "DistTrain's MFU, MLLM-72B"]
    assert not calibrated.held_out
    assert calibrated.ratio == pytest.approx(1, abs=0.01)
    for what, within in (
        ("DistTrain's MFU, least of three models", 0.05),
        ("MFU ratio, 9B and 15B, most", 0.05),
        ("MFU ratio, 9B and 15B, least", 0.17),
        ("throughput ratio, 9B and 15B, least", 0.12),
        ("MFU ratio, 72B", 0.15),
        ("throughput ratio, 72B", 0.09),
        ("GPUs of DistTrain, MLLM-72B", 0.01),
    ):
        assert found[overall, what].ratio == pytest.approx(1, abs=within), what
    at_the_published_gpus = found[overall, "throughput ratio, 9B, DistTrain on 890 GPUs"]
    assert not at_the_published_gpus.held_out, "its number of GPUs comes from the published ratios"
    assert at_the_published_gpus.ratio == pytest.approx(1, abs=0.10)
    errors = {table.table.split(":")[0]: table.max_rel_err for table in all_tables()}
    assert errors["Figure 17"] < 0.18
    assert errors["Figure 18"] < 0.07
    assert errors["Figures 19 and 20"] < 0.12
    assert errors["Figure 22"] < 0.10
    for row in found.values():
        assert row.assumptions
        assert "72B" in row.calibrated_on or row.calibrated_on == "nothing"


def test_table_2_uses_the_devices_it_is_given():
    found = orchestrate(mllm("72B", 112, 240))
    assert found.num_devices <= 112
    assert found.num_microbatches * found.degrees["language_model"].dp == 240


def test_the_closed_form_is_what_the_simulator_finds():
    """Encoder, language model and generator, unequal data parallelism: with messages and reductions within 5%."""
    name, problem = problems()[0]
    assert "9B" in name
    plan = plan_disttrain(problem)
    evaluation = evaluate(problem, plan)
    assert evaluation.fits
    best = orchestrate(orchestration_problem(problem))
    simulated = evaluate(problem, orchestrated_plan(problem, best))
    assert simulated.iteration_time_s == pytest.approx(best.iteration_s, rel=0.05)
    assert evaluation.iteration_time_s <= simulated.iteration_time_s * (1 + 1e-9)


@pytest.mark.campaign
def test_frozen_problems_compute_the_passes_of_their_setting():
    """Forward, input gradient, weight gradient: what stays of a module's backward is what its passes leave."""
    named = dict(problems())
    assert len(named) == 2 + 3 * (2 + len(FROZEN_SETTINGS))
    for setting, passes in FROZEN_SETTINGS.items():
        problem = named[f"MLLM-9B on 98 A800, global batch 128, {setting}"]
        for (name, module), count in zip(problem.modules.items(), passes, strict=True):
            needs = problem.gradients[name][module.workload.num_layers // 2]
            assert 1 + needs.input_gradient + needs.weight_gradient == count, (setting, name)
    assert {problem.num_devices for problem in named.values()} == {16, 32, 98, 1296}
