"""Every benchmark runs at a tiny size. What it measures there means nothing; that it compares like with like does."""

import re
from dataclasses import replace

import pytest

from benchmarks import (
    against_ddp_and_fsdp,
    assigning,
    attention_distribution,
    attention_kernels,
    attention_policies,
    balanced_data,
    command_line,
    data_service,
    deferral,
    frozen_aware,
    generator_ratio,
    pipeline_against_torch,
    prediction,
    run_ahead,
    schedules,
    simulator_scale,
    zero_bubble,
)
from benchmarks.measuring import Spread, ratio, seconds
from benchmarks.reporting import Report
from motet.cluster import cpu_cluster
from motet.costs.profiling import links as profiler_links
from motet.planner.from_run_file import planning_problem
from motet.runtime import launch
from motet.schedule.generators import CONTRASTING, GENERATORS

TINY = ["--blocks", "1", "--steps", "1", "--layers", "2", "--width", "64"]


@pytest.fixture(autouse=True)
def _small_messages(monkeypatch):
    monkeypatch.setattr(profiler_links, "LINK_ELEMENTS", (1, 2**10, 2**14))


@pytest.fixture(autouse=True)
def _one_thread_after_a_launch(monkeypatch):
    """The number of ranks of a launch is the benchmark's own, whatever started the tests."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    assert not launch.started_by_torchrun()


def text_of(report: Report, folder) -> str:
    return report.write(folder).read_text()


@pytest.mark.campaign
def test_pipeline_and_torch_compute_the_same(tmp_path):
    report = pipeline_against_torch.main([*TINY, "--microbatches", "2", "--samples", "1", "--tokens", "8"])
    rows = re.findall(r"\| 64 \| (\w+) \| \((.*), (.*)\) \| \((.*), (.*)\) \|", text_of(report, tmp_path))
    assert [name for name, *_ in rows] == ["equal", "unequal"]
    for _, *numbers in rows:
        loss, norm, torch_loss, torch_norm = map(float, numbers)
        assert loss == pytest.approx(torch_loss, rel=1e-5)
        assert norm == pytest.approx(torch_norm, rel=1e-5)


@pytest.mark.campaign
def test_zero_bubble_and_1f1b_compute_the_same(tmp_path):
    tiny = ["--blocks", "1", "--steps", "2", "--layers", "4", "--width", "64"]
    text = text_of(zero_bubble.main([*tiny, "--microbatches", "3", "--samples", "1", "--tokens", "8"]), tmp_path)
    results = re.findall(r"'(1f1b|zero_bubble_\w+)': \(([\d.]+), ([\d.]+)\)", text)
    assert [name for name, _, _ in results] == list(zero_bubble.SCHEDULES)
    for number in (1, 2):
        values = [float(result[number]) for result in results]
        assert values == pytest.approx([values[0]] * 4, rel=1e-5)
    assert text.count("Goal: ") == 3


@pytest.mark.campaign
def test_bubble_filling_is_no_slower_than_list_scheduling(tmp_path):
    text = text_of(schedules.main(["--groups", "2", "--cells", "40", "--problems", "1"]), tmp_path)
    row = re.search(r"\| ViT-3B \+ GPT-11B[^|]*\|(.*)\|", text)
    assert row is not None
    by_list, dip, filled, _, bound = map(float, row.group(1).split("|"))
    assert bound <= filled <= min(by_list, dip)
    assert "| zero_bubble_v | " in text


@pytest.mark.campaign
def test_pipeline_ddp_and_fsdp_learn_the_same(tmp_path):
    report = against_ddp_and_fsdp.main([*TINY, "--microbatches", "4", "--image-size", "32"])
    text = text_of(report, tmp_path)
    trained = re.findall(r"motet, pipeline ([\d.]+), DDP ([\d.]+), FSDP2 (\d+\.\d+)", text)
    assert len(trained) == 2
    for pipeline, ddp, fsdp in trained:
        assert float(ddp) == pytest.approx(float(pipeline), rel=1e-4)
        assert float(fsdp) == pytest.approx(float(pipeline), rel=1e-4)
    first = [float(loss) for loss in re.findall(r"first step ([\d.]+);", text)]
    assert all(float(after[0]) < before for after, before in zip(trained, first, strict=True))


@pytest.mark.campaign
def test_frozen_aware_and_unaware_plans_compute_the_same(tmp_path):
    arguments = [*TINY, "--microbatches", "2", "--image-size", "32", "--repetitions", "1"]
    # Six ranks of one module each need six layers: two blocks make five of the encoder and four of the language model.
    report = frozen_aware.main([*arguments, "--costs", str(tmp_path / "costs.json")])
    text = text_of(report, tmp_path)
    results = re.search(r"'frozen-aware': \((.*), (.*)\), 'frozen-unaware': \((.*), (.*)\)", text)
    assert results is not None
    loss, norm, other_loss, other_norm = map(float, results.groups())
    assert loss == pytest.approx(other_loss, rel=1e-5)
    assert norm == pytest.approx(other_norm, rel=1e-4)
    assert text.count("Gain: measured") == 2


@pytest.mark.campaign
def test_plans_with_and_without_run_ahead_compute_the_same(tmp_path):
    arguments = [*TINY, "--image-size", "32", "--repetitions", "1", "--costs", str(tmp_path / "costs.json")]
    results = re.search(r"'run-ahead': (\(.*\)), 'without': (\(.*\))}", text_of(run_ahead.main(arguments), tmp_path))
    assert results is not None
    assert results.group(1) == results.group(2)


@pytest.mark.campaign
def test_predictions_are_made_and_measured(tmp_path):
    arguments = [*TINY, "--image-size", "32", "--repetitions", "1", "--cases", "1"]
    report = prediction.main([*arguments, "--costs", str(tmp_path / "costs.json")])
    text = text_of(report, tmp_path)
    assert len(re.findall(r"\| (?:computed|emulated) \|", text)) == 2
    assert "Error of the prediction: median" in text


@pytest.mark.campaign
def test_layouts_of_a_generator_are_compared(tmp_path):
    arguments = [*TINY, "--repetitions", "1", "--costs", str(tmp_path / "costs.json")]
    text = text_of(generator_ratio.main(arguments), tmp_path)
    assert len(re.findall(r"^\| (apart|together) \|", text, flags=re.MULTILINE)) == 4
    assert len(re.findall(r"Time apart over time together: predicted [\d.]+, measured [\d.]+ \(", text)) == 2
    assert text.count("Goal: within") == 2


def test_layouts_of_a_generator_have_the_same_microbatches():
    config = generator_ratio.configuration(2, 64)
    for make, size, num_ranks in ((generator_ratio.on_two, 16, 2), (generator_ratio.on_eight, 32, 8)):
        batch = generator_ratio.DrawingBatch(config, num_samples=size)
        plans = make(replace(planning_problem(config, batch.samples), cluster=cpu_cluster(num_ranks)))
        assert {plan.num_ranks for plan in plans.values()} == {num_ranks}
        numbers = {name: plan.num_microbatches for name, plan in plans.items()}
        assert numbers == {"apart": size // 2, "together": size // 4}
        generator = {name: _ranks(plan, "image") for name, plan in plans.items()}
        assert not generator["apart"] & _ranks(plans["apart"], "language_model")
        assert generator["together"] == set(range(num_ranks))


def _ranks(plan, module):
    return {rank for replica in plan.modules[module].replicas for stage in replica.stages for rank in stage.ranks}


def test_cases_of_the_prediction_differ():
    cases = prediction.COMPUTED + prediction.EMULATED
    assert len(cases) == 30
    assert len({(c.name, c.num_ranks, c.num_microbatches, c.schedule) for c in cases}) == len(cases)
    assert {c.schedule for c in cases} == GENERATORS.keys() - CONTRASTING


def test_ratios_are_of_the_same_round():
    blocks = {"a": [[1.0, 3.0, 2.0], [20.0]], "b": [[1.0], [10.0]]}
    assert ratio(blocks, "a", "b") == Spread(2.0, 2.0, 2.0)
    assert seconds(blocks, "b") == Spread(5.5, 3.25, 7.75)


@pytest.mark.campaign
def test_every_policy_is_compared(tmp_path):
    sizes = ["--short", "5000", "--long", "9000", "--ranks", "4", "--draws", "2", "--repetitions", "2"]
    text = text_of(attention_distribution.main(sizes), tmp_path)
    for policy in attention_distribution.POLICIES:
        assert f" {policy} |" in text
    assert re.search(r"in every draw\. (Reached|Missed): 1\.\d+\.", text)
    assert len(re.findall(r"^\| packed documents, causal \|", text, flags=re.MULTILINE)) == 3


@pytest.mark.campaign
def test_simulated_attention_never_beats_busy_units(tmp_path):
    text = text_of(attention_policies.main(["--lengths", "12000", "--ranks", "3", "--draws", "1"]), tmp_path)
    rows = re.findall(r"^\| ([\w ]+) \| ([\d.]+) \| ([\d.* |]+) \|$", text, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == list(attention_policies.MASKS)
    for _, evenly, times in rows:
        assert all(float(time.strip("* ")) >= float(evenly) for time in times.split("|"))


@pytest.mark.campaign
def test_kernels_are_compared_under_every_mask(tmp_path):
    sizes = ["--lengths", "64", "--heads", "2:1", "--dim", "16", "--block", "32", "--repetitions", "1"]
    text = text_of(attention_kernels.main(sizes), tmp_path)
    rows = re.findall(r"^\| ([^|]+) \| (motet|FlexAttention|torch, dense causal) \|", text, flags=re.MULTILINE)
    assert {name for name, _ in rows} == set(attention_kernels.masks(64))
    assert len(rows) == 2 * len(attention_kernels.masks(64)) + 1


@pytest.mark.campaign
def test_commands_are_run_in_processes_of_their_own(tmp_path):
    text = text_of(command_line.main(["--repetitions", "1", "--commands", "help"]), tmp_path)
    assert re.search(r"\| help \| `motet plan --help` \| [\d.]+ s \| [\d.]+ s \| 0.3 s \|", text)


@pytest.mark.campaign
def test_the_simulator_at_scale_counts_every_action(tmp_path):
    text = text_of(simulator_scale.main(["--actions", "2560", "--repetitions", "1"]), tmp_path)
    counted = re.findall(r"^\| (chain of \d+|\d+ GPUs)[^|]*\| ([\d,]+) \| ([\d,]+) \|", text, flags=re.MULTILINE)
    numbers = {name: (int(actions.replace(",", "")), int(m.replace(",", ""))) for name, actions, m in counted}
    # Of p stages and m microbatches 2 p m actions, 2 (p - 1) m messages.
    assert numbers["chain of 8"] == (2560, 2 * 7 * 160)
    assert numbers["chain of 64"] == (2560, 2 * 63 * 20)
    # One pipeline of 96 stages stands for all: 2 x 96 x 16 actions, 8 messages for each of 2 x 95 x 16 values.
    assert numbers["3072 GPUs"] == numbers["16384 GPUs"] == (3072, 24320)


@pytest.mark.campaign
def test_deferral_makes_microbatches_even(tmp_path):
    arguments = ["--data-sets", "ChartQA", "--batches", "1", "--cases", "3"]
    text = text_of(balanced_data.main(arguments), tmp_path)
    rows = re.findall(r"\| ([^|]+) \| ([\d.]+) \(.*?\) \| ([\d.]+) \(.*?\) \| [\d.]+ \| ([\d.]+) \|", text)
    found = {name: tuple(map(float, values)) for name, *values in rows}
    assert found.keys() == set(balanced_data.METHODS)
    assert all(deferred < random for deferred, random in zip(found["deferral"], found["random"], strict=True))


@pytest.mark.campaign
def test_every_assignment_is_timed(tmp_path):
    text = text_of(assigning.main(["--only-small", "--times", "1", "--operations", "50"]), tmp_path)
    rows = re.findall(r"\| 512 \| 4 \| (\w+) \| ([\d.]+) \|", text)
    assert [name for name, _ in rows] == list(assigning.ASSIGNMENTS)
    assert all(float(ms) > 0 for _, ms in rows)


@pytest.mark.campaign
def test_deferral_and_random_order_compute_the_same(tmp_path):
    tiny = ["--blocks", "1", "--batches", "1", "--layers", "3", "--width", "64", "--repetitions", "1"]
    text = text_of(deferral.main([*tiny, "--costs", str(tmp_path / "costs.json")]), tmp_path)
    results = re.findall(r"'(random|entrain)': \[\(([\d.]+), ([\d.]+)\)\]", text)
    assert [name for name, _, _ in results] == ["random", "entrain"]
    for number in (1, 2):
        assert float(results[0][number]) == pytest.approx(float(results[1][number]), rel=1e-5)


@pytest.mark.campaign
def test_batches_travel_every_way(tmp_path):
    tiny = ["--megabytes", "0.4", "--batches", "20", "--batch-size", "4", "--steps", "2", "--slack", "0.1"]
    text = text_of(data_service.main(tiny), tmp_path)
    rates = re.findall(r"^\| .* \| ([\d.]+) \| [\d.]+ \.\. [\d.]+ \|$", text, flags=re.MULTILINE)
    assert len(rates) == 4
    assert all(float(rate) > 0 for rate in rates)
    assert len(re.findall(r"^\| .* \| [\d.]+% \|$", text, flags=re.MULTILINE)) == 3
