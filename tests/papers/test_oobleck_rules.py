"""The rules of the authors' simulator: each one by hand on a short run, and the published rows that come of them."""

from dataclasses import replace
from heapq import heapify

import pytest

from papers.oobleck.artifact import INTERVALS_S, LOST, SPEEDS
from papers.oobleck.published import FREE, MODELS, NUM_NODES, THROUGHPUT, WITHOUT_CHECKPOINTS, Model
from papers.oobleck.rules import Bamboo, Event, Kind, Run, Varuna, calibrated_speeds, throughputs, under_rules

# 30 samples in an iteration of 30 s on 30 nodes; Oobleck reconfigures in 10 s, Varuna restarts in 100 s.
MODEL = replace(MODELS[1], global_batch=30, copy_s=10.0, restart_s=100.0, save_s=5.0, take_over_s=40.0)
SPEED = [1.0] * 16


def iterations(run: Run, until_s: float) -> list[tuple[float, float]]:
    """(end in seconds, samples per second) of those that end before a time; no loss counts from then on."""
    run.end_ms = round(until_s * 1000)
    run.samples_per_s()
    return [(end / 1000, rate) for (_, end), rate in zip(run.spans_ms, run.rates, strict=False)]


def varuna(model: Model = MODEL, every: int = 10, save_s: float = 5.0, speeds: list[float] = SPEED) -> Varuna:
    return Varuna(model, "10m", speeds, every=every, save_s=save_s)


def test_inputs_are_complete() -> None:
    assert set(SPEEDS) == {(model.name, kind) for model in MODELS for kind in THROUGHPUT[model.name]}
    for (name, kind), speeds in SPEEDS.items():
        assert len(speeds) == (15 if (name, kind) == ("GPT-3 6.7b", "Oobleck") else 16)
        assert speeds[0] == max(speeds)
    assert set(LOST) == set(INTERVALS_S)
    for nodes in LOST.values():
        assert len(set(nodes)) == 15
        assert set(nodes) <= set(range(1, NUM_NODES + 1))


def test_oobleck_goes_on_until_it_is_reconfigured() -> None:
    # Ready at 45, begins at 55, one every 30 s; a loss at 601.2, new pipelines at 611.2.
    found = iterations(Run(MODEL, "10m", SPEED), 700)
    assert [end for end, _ in found] == [*range(85, 600, 30), 641.2, 671.2]
    assert found[0][1] == 1.0
    assert found[-2][1] == pytest.approx(30 / (641.2 - 595))  # What is between is part of the next iteration.


def test_varuna_goes_on_until_it_has_restarted_and_saves_then() -> None:
    # Begins at 145; the 10th iteration ends at 445, the 11th begins 5 s later. One is in progress at the loss, 601.2.
    found = iterations(varuna(), 790)
    ends = [end for end, _ in found]
    assert ends[9:15] == [445, 480, 510, 540, 570, 600]
    # What came after the checkpoint is lost.
    assert [rate for _, rate in found[10:15]] == [0.0] * 5
    # The next one ends at 630 on all 30 nodes, is saved, and counts; so do those until the restart's end at 701.2.
    assert ends[15:] == [630, 665, 695, 731.2, 761.2]
    assert all(rate > 0 for _, rate in found[15:])


def test_without_costs_nothing_is_waited_for() -> None:
    found = iterations(varuna(every=2, save_s=0.0), 790)
    ends = [end for end, _ in found]
    assert ends == [*range(175, 700, 30), 731.2, 761.2]
    lost = [end for end, rate in found if rate == 0.0]
    assert lost == [595]  # The 15th, after the 14th was saved.


def test_a_checkpoint_fails_by_its_place_in_the_heap() -> None:
    run = varuna()
    saved, early, late = Event(50, Kind.SAVED), Event(40, Kind.RESTARTED), Event(60, Kind.LOST, 1)
    run.events = [saved, late]
    assert not run.is_cut_off()
    # No loss comes before it is complete, and yet one is before it in the array.
    run.events = [early, late, saved]
    heapify(run.events)
    assert run.events == [early, late, saved]
    assert run.is_cut_off()
    run.events = [late]
    assert not run.is_cut_off()


class Failing(Varuna):
    """One checkpoint fails: after so many iterations."""

    after = 0

    def is_cut_off(self) -> bool:
        return len(self.spans_ms) == self.after


def test_a_failed_checkpoint_takes_iterations_along() -> None:
    run = Failing(MODEL, "10m", SPEED, every=3, save_s=5.0)
    run.after = 6
    assert [rate > 0 for _, rate in iterations(run, 500)] == [True] * 3 + [False] * 3 + [True] * 5
    # Where there are fewer, also of those to come.
    run = Failing(MODEL, "10m", SPEED, every=5, save_s=5.0)
    run.after, run.has_lost = 1, True
    assert [rate > 0 for _, rate in iterations(run, 400)] == [False] * 5 + [True] * 3


def test_two_restarts_at_once_stop_training() -> None:
    # The first start ends at 645, the restart after the first loss at 1201.2: none trains until the loss at 1202.4.
    slow = replace(MODEL, restart_s=600.0)
    ends = [end for end, _ in iterations(varuna(slow), 1900)]
    assert ends[0] == 675
    assert max(end for end in ends if end < 1500) < 1201.2
    assert min(end for end in ends if end > 1201.2) > 1802.4


def test_bamboo_is_slow_after_a_loss_and_builds_anew() -> None:
    # Begins at 75. Node 5 is lost at 601.2; the iteration that would end at 615 lasts half as long again from there.
    found = iterations(Bamboo(MODEL, "10m", SPEED), 720)
    assert [end for end, _ in found] == [*range(105, 600, 30), pytest.approx(621.9), pytest.approx(691.9)]


def test_bamboo_stays_slow_when_a_waiting_node_is_lost() -> None:
    run = Bamboo(MODEL, "10m", SPEED)
    run.end_ms = 600_000
    run.samples_per_s()
    waiting = next(node for node in run.nodes if node not in run.stages)
    run.lose(600_000, waiting)
    assert run.is_slow
    assert run.iteration_ms == 45_000
    assert all(len(stages) == 1 for stages in run.stages.values())
    run.lose(600_000, next(iter(run.stages)))
    assert run.iteration_ms == 45_000
    assert sorted(len(stages) for stages in run.stages.values())[-2:] == [1, 2]


def test_calibration_meets_the_row() -> None:
    half = [speed / 2 for speed in SPEEDS["GPT-3 6.7b", "Oobleck"]]
    fitted = calibrated_speeds(MODELS[4], "Oobleck", half)
    assert under_rules(MODELS[4], "Oobleck", "6h", fitted) == pytest.approx(4.33, rel=2e-3)
    assert fitted[0] / half[0] == pytest.approx(2, rel=2e-2)


def test_where_few_iterations_survive_the_rules_jump() -> None:
    model, speeds = MODELS[4], SPEEDS["GPT-3 6.7b", "Varuna"]
    faster = [1.005 * speed for speed in speeds]
    assert under_rules(model, FREE, "10m", faster) > 1.3 * under_rules(model, FREE, "10m", speeds)


@pytest.mark.campaign
def test_published_rows() -> None:
    """Nothing is fitted but Bamboo's speed."""
    found = throughputs(SPEEDS)
    assert len(found) == 14
    for (name, kind), ours in found.items():
        published = WITHOUT_CHECKPOINTS[name] if kind == FREE else THROUGHPUT[name][kind]
        if kind == "Bamboo":
            assert ours == pytest.approx(published, rel=0.03)
        else:
            assert ours == pytest.approx(published, abs=0.0151)
