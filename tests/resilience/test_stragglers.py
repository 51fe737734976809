"""Who is called slow, against a definition written down again, and what a training says of one."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupted_training import before_each_step, config_of, failures, undisturbed
from training import plan_of

from motet.plan import Plan, Replica, Stage
from motet.resilience import stragglers
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.stragglers import StragglerWatch, action_s, find_stragglers
from motet.runtime.training.trainer import Trainer
from motet.timeline import Span


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two pipelines of two ranks: encoders on the first, language model on the second."""
    return plan_of(config_of(Path()))


def spans(*compute_s: float) -> list[Span]:
    return [Span(0, "F", "F", 0.0, s) for s in compute_s] + [Span(0, "m", "wait", 0.0, 9.0)]


def test_only_computation_counts() -> None:
    assert action_s(spans(1.0, 3.0)) == 2.0
    assert action_s(spans()) == 0.0


@given(st.lists(st.sampled_from([0.0, 1.0, 1.4, 1.6, 4.0]), min_size=4, max_size=4))
def test_a_rank_is_compared_with_the_one_that_has_its_layers(plan: Plan, seconds: list[float]) -> None:
    peer = {
        rank: next(other for other in range(4) if other != rank and layers_of(plan, other) == layers_of(plan, rank))
        for rank in range(4)
    }
    expected = [rank for rank in range(4) if seconds[peer[rank]] > 0 and seconds[rank] > 1.5 * seconds[peer[rank]]]
    found = find_stragglers(plan, seconds, 1.5)
    assert [straggler.rank for straggler in found] == expected
    assert [straggler.peers for straggler in found] == [(peer[rank],) for rank in expected]


def test_who_pads_samples_is_not_compared_with_who_packs_them(plan: Plan) -> None:
    """Tokens are shared out in another stage of the first pipeline, so its first stage packs samples too."""
    llm = plan.modules["language_model"]
    for cp_size, slow in ((1, [2]), (2, [])):
        replicas = []
        for first, size in ((0, cp_size), (1 + cp_size, 1)):
            second = Stage(layers=(1, llm.num_layers), ranks=tuple(range(first + 1, first + 1 + size)), cp_size=size)
            replicas.append(Replica(stages=(Stage(layers=(0, 1), ranks=(first,)), second)))
        unlike = replace(plan, modules={"language_model": replace(llm, replicas=tuple(replicas))}, edges=())
        seconds = [1.0] * unlike.num_ranks
        seconds[1 + cp_size] = 9.0
        assert [straggler.rank for straggler in find_stragglers(unlike, seconds, 1.5)] == slow


def layers_of(plan: Plan, rank: int) -> list[tuple[str, tuple[int, int]]]:
    return [(name, stage.layers) for name, _, _, stage in plan.stages_of_rank(rank)]


def test_each_time_that_a_rank_becomes_slow_it_is_told_once(plan: Plan) -> None:
    speeds = [[1.0] * 4, [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 2.0], [1.0] * 4, [1.0, 1.0, 1.0, 2.0]]
    asked = iter(speeds)
    watch = StragglerWatch(plan, 1.5, lambda mine: next(asked))
    told = [
        [straggler.rank for straggler in watch.after_step(spans(1.0))] for _ in range(len(speeds) * stragglers.WINDOW)
    ]
    assert watch.slow_s(3) > watch.slow_s(2) == 0
    last = [told[i] for i in range(stragglers.WINDOW - 1, len(told), stragglers.WINDOW)]
    assert last == [[], [3], [], [], [3]]
    assert sum(map(len, told)) == 2


def test_one_slow_step_of_many_is_not_slow(plan: Plan) -> None:
    gathered: list[float] = []
    watch = StragglerWatch(plan, 1.5, lambda mine: gathered.append(mine) or [mine] * 4)  # type: ignore[func-returns-value]
    for step in range(stragglers.WINDOW):
        watch.after_step(spans(100.0 if step == 3 else 1.0))
    assert gathered == [1.0]


def test_a_training_names_a_slow_rank_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As if rank 3 took five times as long as all others."""
    monkeypatch.setattr(stragglers, "WINDOW", 2)
    rank = [-1]

    def note(trainer: Trainer) -> None:
        rank[0] = trainer.engine.model.mesh.rank

    monkeypatch.setattr(stragglers, "action_s", lambda _: 5e-3 if rank[0] == 3 else 1e-3)
    config = config_of(tmp_path)
    plan = plan_of(config)
    with before_each_step(note):
        result = train_on_nodes(config, plan, None, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [line] = failures(config)
    [change] = line["changes"]
    assert (change["kind"], change["node"], line["done"], line["step"]) == ("slow", 3, "nothing", 2)
    assert change["how"].startswith("rank 3 is slow: an action takes it 5 ms, rank 1 with the same layers 1 ms")
    assert "node 3: rank 3 is slow" in capfd.readouterr().err
