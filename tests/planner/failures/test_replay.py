"""Replays whose outcome can be computed by hand, and what must hold of any."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_templates import draw_templates, plan_of
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.errors import UserError
from motet.planner.failures.replay import (
    KINDS,
    Change,
    Policy,
    RedundancyPolicy,
    RestartPolicy,
    TemplatePolicy,
    Times,
    Usage,
    best_grid,
    draw_changes,
    duration_s,
    read_trace,
    replay,
)
from motet.planner.templates.pipelines import Template, best_combinations, combination_s
from papers.oobleck.size_policy import SizePolicy

TEMPLATES = {n: Template(num_nodes=n, replicas={}, fill_s=2.0, slowest_s=2.0 / n) for n in (1, 2, 3)}
TIMES = Times(detect_s=1.0, rebuild_s=2.0, start_s=5.0, load_s=3.0)


def grid(kind: type[RestartPolicy] = RestartPolicy, **values: float) -> RestartPolicy:
    return kind(TEMPLATES, 12, TIMES, 6, 2, 1.0, **values)  # type: ignore[arg-type]


def nodes(count: int) -> tuple[str, ...]:
    return tuple(f"n{i}" for i in range(count))


def test_a_restart_loses_what_is_not_in_a_checkpoint() -> None:
    """Starts at 8 s; 3 nodes make 3 pipelines of 1, 2 + 3 x 2 = 8 s; a checkpoint after two takes until 25 s; the loss
    at 40 s costs 15 s; then 2 nodes restart (9 s) and need 12 s for an iteration."""
    changes = [Change(0.0, (), nodes(3)), Change(40.0, ("n0",))]
    usage = replay(changes, 61.0, grid())
    assert usage.seconds == {"training": 16 + 12, "redone": 15, "saving": 1, "recovery": 8 + 9, "waiting": 0}
    assert usage.iterations == 3
    assert usage.num_restarts == 1


def test_a_warning_saves_what_is_there() -> None:
    changes = [Change(0.0, (), nodes(3)), Change(40.0, ("n0",))]
    usage = replay(changes, 62.0, grid(), warning_s=10.0)
    # Warned at 30 s; the third iteration ends at 33 s and is saved within a second, and all starts again.
    assert usage.seconds == {"training": 24 + 20, "redone": 0, "saving": 1, "recovery": 8 + 1 + 8, "waiting": 0}


def test_neighbours_lost_at_once_are_a_restart_for_redundancy() -> None:
    templates = {3: TEMPLATES[3]}
    for lost, restarts in ((("n0",), 0), (("n0", "n1"), 1), (("n0", "n2"), 1), (("n2", "n3"), 0), (("n1", "n4"), 0)):
        members = RedundancyPolicy(templates, 12, TIMES, 8, 0, 0.0)
        usage = replay([Change(0.0, (), nodes(8)), Change(40.0, lost)], 80.0, members)
        assert usage.num_restarts == restarts, lost


def test_redundancy_needs_pipelines_of_two_nodes() -> None:
    """Those of one would be the fastest, but nobody could take over. Starts at 8 s, 2 + 11 s for an iteration."""

    def usage(*changes: Change) -> Usage:
        return replay(changes, 40.0, RedundancyPolicy(TEMPLATES, 12, TIMES, 6, 0, 0.0))

    assert usage(Change(0.0, (), nodes(1))).iterations == 0
    assert usage(Change(0.0, (), nodes(2))).iterations == pytest.approx(32 / 13)
    assert usage(Change(0.0, (), nodes(6)), Change(30.0, ("n0",))).num_restarts == 0


def test_the_fastest_grid() -> None:
    assert best_grid(TEMPLATES, 5, 12) == (1, 5, 2 + 2 * 2.0)
    assert best_grid(TEMPLATES, 15, 12) == (1, 12, 2.0)
    assert best_grid({3: TEMPLATES[3]}, 5, 12) == (3, 1, 2 + 11 * 2 / 3)
    assert best_grid({3: TEMPLATES[3]}, 2, 12) == (0, 0, float("inf"))


@pytest.mark.parametrize("kind", [RestartPolicy, RedundancyPolicy])
def test_spare_nodes_come_and_go_without_a_trace(kind: type[RestartPolicy]) -> None:
    """Of 8 nodes two pipelines of 3 use 6. Starts at 8 s; an iteration takes 2 + 5 x 2 / 3 s."""
    members = kind({3: TEMPLATES[3]}, 12, TIMES, 8, 0, 0.0)
    changes = [
        Change(0.0, (), nodes(8)),
        Change(20.0, ("n7",)),
        Change(30.0, (), ("n8",)),
        Change(30.1, ("n8",)),
        Change(40.0, ("n6",), ("n9",)),
    ]
    usage = replay(changes, 60.0, members)
    assert usage.seconds == {"training": 52, "redone": 0, "saving": 0, "recovery": 8, "waiting": 0}
    assert usage.iterations == pytest.approx(52 / (2 + 10 / 3))
    assert usage.num_restarts == 0
    assert usage.idle_node_s == 20 * 2 + 40 * 1  # n8 leaves before an iteration ends in which it could be counted.
    # One that joins and makes a faster grid does.
    faster = replay(
        [Change(0.0, (), nodes(8)), Change(20.0, (), ("n8",))], 60.0, kind({3: TEMPLATES[3]}, 12, TIMES, 9, 0, 0.0)
    )
    assert faster.seconds["recovery"] > 8


def template_members(**values: bool) -> TemplatePolicy:
    """Pipelines of one to three nodes, one failure to survive."""
    templates = draw_templates(Random(0), failures=1, min_nodes=1, max_nodes=3, devices_per_node=1)

    def combine(num_nodes: int) -> tuple[int, ...]:
        return best_combinations(templates.by_nodes, num_nodes, 1, 64, most=1)[0]

    return TemplatePolicy(plan_of(templates, [1, 1]), templates, combine, 64, TIMES, 4, checkpoint_every=1000, **values)


def test_below_the_guarantee_training_goes_on_unless_it_is_to_stop() -> None:
    """As `motet train` does. Of two nodes one is lost at 500 s, and the other holds everything; it is lost, too."""
    changes = [Change(0.0, (), nodes(2)), Change(500.0, ("n0",)), Change(1000.0, ("n1",)), Change(1500.0, (), nodes(2))]
    usage = replay(changes, 2000.0, template_members())
    assert usage.seconds["waiting"] == 500
    assert usage.seconds["redone"] > 900 - 8  # Nobody holds the model at 1000 s, and nothing is in a checkpoint.
    assert usage.num_restarts == 1
    assert usage.iterations > 0
    stopped = replay(changes, 2000.0, template_members(stops_below_guarantee=True))
    assert stopped.seconds["waiting"] == 1000
    assert stopped.num_restarts == 0
    # It has saved when it stopped: only the iteration in progress is lost.
    assert stopped.seconds["training"] == pytest.approx(2000 - 1000 - 2 * 8 - stopped.seconds["redone"])
    assert 0 < stopped.seconds["redone"] < 500 / 2


def test_states_that_a_lost_node_kept_are_copied_to_others() -> None:
    """With ZeRO-1, though all three pipelines hold every layer; without it nothing has to move."""
    templates = draw_templates(Random(0), failures=1, min_nodes=1, max_nodes=1, devices_per_node=1)
    plan = plan_of(templates, [1, 1, 1])
    lengths = {name: module.num_layers for name, module in plan.modules.items()}
    layer_bytes = {name: [9.0] * length for name, length in lengths.items()}
    state_bytes = {name: [[6.0]] * length for name, length in lengths.items()}
    pauses = []
    for states in (None, state_bytes):
        sized = replace(templates, layer_bytes=layer_bytes, state_bytes=states, state_copies=2)
        times = replace(TIMES, bytes_per_s=1.0)
        members = TemplatePolicy(plan, sized, lambda n: [1] * n, 64, times, 3)
        members.change((), nodes(3), warned=False)
        kept = members.owned
        pauses.append(members.change(("n2",), (), warned=False).pause_s - TIMES.rebuild_s - TIMES.detect_s)
        assert (members.owned is None) == (kept is None) == (states is None)
    assert pauses[0] == 0
    assert kept is not None
    # The two that are left keep everything; each lacks what the lost node kept together with the other one.
    lacking = [sum((rank,) not in keepers for keepers in kept.values()) * 6.0 for rank in (0, 1)]
    assert min(lacking) > 0
    assert pauses[1] == max(lacking)


def test_warned_nodes_hand_over_and_are_gone() -> None:
    """Two nodes, both warned in time, one after the other: the second saves what it holds and nothing is lost."""
    changes = [Change(0.0, (), nodes(2)), Change(500.0, ("n0",)), Change(700.0, ("n1",)), Change(900.0, (), nodes(2))]
    members = template_members()
    usage = replay(changes, 1000.0, members, warning_s=100.0)
    assert usage.seconds["redone"] == pytest.approx(0, abs=1e-9)
    assert usage.num_restarts == 0
    assert 200 <= usage.seconds["waiting"] < 300
    assert sorted((*members.order, *members.waiting)) == ["n0", "n1"]


def test_a_spare_that_is_lost_disturbs_nobody() -> None:
    """Of five nodes four may train; the fifth goes in the middle of an iteration."""
    spare = [Change(0.0, (), nodes(5)), Change(333.0, ("n4",))]
    usage = replay(spare, 1000.0, template_members())
    assert usage.seconds == {"training": 992, "redone": 0, "saving": 0, "recovery": 8, "waiting": 0}


def test_who_joins_while_all_start_does_not_end_the_start() -> None:
    changes = [Change(0.0, (), nodes(2)), Change(1.0, (), ("n2",))]
    usage = replay(changes, 100.0, template_members())
    assert usage.seconds["recovery"] == TIMES.start_s + TIMES.load_s


def test_while_there_are_too_few_all_nodes_are_idle() -> None:
    usage = replay([Change(0.0, (), nodes(2))], 50.0, RestartPolicy({3: TEMPLATES[3]}, 12, TIMES, 8, 0, 0.0))
    assert usage.seconds["waiting"] == 50
    assert usage.idle_node_s == usage.node_s == 100


def draw_members(random: Random) -> tuple[list[Policy], int]:
    failures, fewest = random.randint(0, 2), random.randint(1, 3)
    most = (failures + 1) * fewest + random.randint(0, 4)
    templates = draw_templates(
        random, failures=failures, min_nodes=fewest, max_nodes=most - failures * fewest, devices_per_node=1
    )

    def combine(num_nodes: int) -> tuple[int, ...]:
        return best_combinations(templates.by_nodes, num_nodes, failures, 64, most=1)[0]

    def iteration_s(sizes: Sequence[int]) -> float:
        return combination_s(templates.by_nodes, sizes, 64)

    return [
        TemplatePolicy(
            plan_of(templates, [fewest] * (failures + 1)),
            templates,
            combine,
            64,
            TIMES,
            most,
            stops_below_guarantee=random.random() < 0.5,
            checkpoint_every=3,
        ),
        SizePolicy(templates, combine, iteration_s, TIMES, most, model_bytes=1.0),
        RestartPolicy(templates.by_nodes, 64, TIMES, most, 3, 0.5),
        RedundancyPolicy(templates.by_nodes, 64, TIMES, most, 3, 0.0, slowdown=1.3),
    ], most


@examples(40)
@given(st.integers(0, 2**32))
def test_all_time_is_accounted_for(seed: int) -> None:
    random = Random(seed)
    policies, most = draw_members(random)
    changes = draw_changes(
        most + 1, random.uniform(20, 500), 2000.0, seed=seed, back_after_s=random.choice([None, 300.0])
    )
    warning_s = random.choice([0.0, 5.0])
    for members in policies:
        usage = replay(changes, 2000.0, members, warning_s=warning_s)
        assert usage.total_s == pytest.approx(2000.0)
        assert min(usage.seconds[kind] for kind in KINDS) >= 0
        assert (usage.iterations > 0) == (usage.seconds["training"] > 0)
        assert 0 <= usage.idle_node_s <= usage.node_s + 1e-6


def test_without_failures_nothing_is_lost() -> None:
    policies, most = draw_members(Random(1))
    for members in policies:
        usage = replay([Change(0.0, (), nodes(most))], 100.0, members)
        assert usage.seconds["redone"] == usage.seconds["waiting"] == 0
        assert usage.seconds["recovery"] == 8.0


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_read_moment_by_moment(tmp_path: Path) -> None:
    text = "0,add,a\n0,add,b\n\n2000,remove,a\n1500,add,c\n2000,remove,c\n3000,remove,b\n3000,add,b\n"
    assert read_trace(write(tmp_path, text)) == [
        Change(0.0, (), ("a", "b")),
        Change(1.5, (), ("c",)),
        Change(2.0, ("a", "c"), ()),
        Change(3.0, (), ()),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give lines like 60000,add,node1"),
        ("0,add,a\nsoon,remove,a\n", "line 2: 'soon,remove,a' is not MILLISECONDS,add|remove,NODE"),
        ("0,add\n", "line 1: '0,add' is not"),
        ("-1,add,a\n", "line 1"),
        ("0,add,a\n5,add,a\n", "line 2: add a, but it is there already"),
        ("0,remove,a\n", "line 1: remove a, but it is not there"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_trace(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_rates() -> None:
    assert [duration_s(text) for text in ("90s", "10m", "1.5h", "2d", "6", "h", "0s")] == [
        90,
        600,
        5400,
        172800,
        None,
        None,
        None,
    ]
    changes = draw_changes(30, 600.0, 6e5, seed=1, back_after_s=1000.0)
    losses = [change for change in changes if change.lost]
    assert len(losses) == pytest.approx(1000, rel=0.1)
    assert draw_changes(30, 600.0, 6e5, seed=1, back_after_s=1000.0) == changes
    assert sum(len(change.lost) for change in draw_changes(3, 1.0, 1e6)) == 3
