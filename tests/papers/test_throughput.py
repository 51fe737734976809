"""Published throughputs: the rows as data, and the prediction of a row's step."""

from collections import Counter
from dataclasses import replace

import pytest

from papers.throughput.prediction import plan_of, predict, problem_of
from papers.throughput.published import Measurement, measurements

ROWS = {row.id: row for row in measurements()}


def test_every_row_is_there_once() -> None:
    assert len(ROWS) == len(measurements()) == 203
    assert Counter(row.kind for row in measurements()) == {"text": 162, "multimodal": 39, "moe": 2}


def test_rows_that_count() -> None:
    counting = [row for row in measurements() if row.counts]
    assert Counter(row.kind for row in counting) == {"text": 119, "multimodal": 30}
    assert all(row.seconds and row.has_shape for row in counting)
    assert not any(row.precision == "fp8" or row.method == "megatron" for row in counting)


def test_times_follow_from_the_printed_throughput() -> None:
    for row in measurements():
        if row.kind == "text" and row.seconds is not None and row.tok_s_gpu:
            assert row.gbs is not None
            assert row.gbs * row.seq / row.gpus / row.tok_s_gpu == pytest.approx(row.seconds, rel=0.03), row.id


def test_the_software_profile_depends_on_eager_and_fsdp_alone() -> None:
    of_fields: dict[tuple[bool, bool | str], set[str]] = {}
    for row in measurements():
        of_fields.setdefault((row.eager, row.fsdp), set()).add(row.software)
    assert all(len(profiles) == 1 for profiles in of_fields.values())


def test_variants_of_a_model_are_held_out_together() -> None:
    groups = {ROWS[name].group for name in ("titan-a100-l2-70B-selop", "titan-a100-l2-70B-full")}
    assert groups == {("torchtitan-A100", "l2-70B", "a100-80")}
    assert ROWS["foundry-3b-s512-8xh100-bf16"].group == ("llm-foundry", "MPT-3b", "h100")


@pytest.mark.parametrize(
    ("name", "num_stages", "first", "last"),
    [
        # 126 blocks, embedding and head: two layers for each of 64 chunks.
        ("dgxc-llama3.1-405b-bf16-512", 64, (0, 2), (126, 128)),
        # 80 blocks over 20 chunks, and the ends beside them.
        ("dgxc-llama3.1-70b-bf16-64", 20, (0, 5), (77, 82)),
    ],
)
def test_layers_are_cut_as_megatron_cuts_them(
    name: str, num_stages: int, first: tuple[int, int], last: tuple[int, int]
) -> None:
    row = ROWS[name]
    plan = plan_of(row, problem_of(row))
    stages = plan.modules["language_model"].replicas[0].stages
    assert (len(stages), stages[0].layers, stages[-1].layers) == (num_stages, first, last)
    assert stages[row.pp].ranks == stages[0].ranks
    assert plan.num_ranks == row.gpus


@pytest.mark.parametrize("name", ["foundry-1b-s2048-8xh100-bf16", "korthikanti-22B-full", "clip-H/14-h100-32"])
def test_twice_the_microbatches_take_about_twice_as_long(name: str) -> None:
    row = ROWS[name]

    def seconds(factor: int) -> float:
        return predict(_larger(row, factor)).seconds

    assert 1.6 < seconds(2) / seconds(1) < 2.05


def _larger(row: Measurement, factor: int) -> Measurement:
    assert row.gbs is not None
    assert row.mbs is not None
    if row.towers:  # A contrastive batch is one microbatch.
        return replace(row, gbs=factor * row.gbs, mbs=factor * row.mbs)
    return replace(row, gbs=factor * row.gbs, microbatches=None)
