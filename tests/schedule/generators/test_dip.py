from plans import language_model, module, replica, routes_of, vision_audio_llm

from motet.plan import Edge, Plan
from motet.schedule.action import Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.dip import dip
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import lower
from motet.schedule.validate import validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate

COLOCATED = Plan(
    modules={
        "vision": module(replica(0, 1)),
        "audio": module(replica(0, 1), trainable=()),
        "llm": language_model(replica(0, 1)),
    },
    edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
    num_microbatches=4,
)


def test_encoders_come_before_and_after_the_language_model() -> None:
    routes = routes_of(COLOCATED)
    schedule = dip(routes)
    validate(schedule, Dependencies(routes))
    for actions in schedule.ranks:
        phases = ["e" if action.cell.module != "llm" else "l" for action in actions]
        assert "".join(phases) == "e" * 8 + "l" * 8 + "e" * 4
        assert [action.kind for action in actions[-4:]] == [Kind.BACKWARD] * 4


def test_time_by_hand() -> None:
    """Two encoders: 4 x 2 forwards and a slot of fill; 1F1B of two stages, (4 + 1) x 3; 4 backwards and one of drain.

    The first language model's forward begins when its rank has done all encoders' forwards, so the fill is hidden but
    for the last microbatch's second stage, and so is the drain."""
    routes = routes_of(COLOCATED)
    time_s = simulate(lower(dip(routes), Dependencies(routes)), UniformCosts()).iteration_time_s
    assert time_s == 8 + (4 + 1) * 3 + 4 * 2


def test_every_encoder_microbatch_is_held() -> None:
    routes = routes_of(COLOCATED)
    # Vision's four, and 1F1B's two or one.
    assert validate(dip(routes), Dependencies(routes)).peak_activations == (4 + 2, 4 + 1)


def test_encoders_on_ranks_of_their_own_are_held_all_the_same() -> None:
    routes = routes_of(vision_audio_llm(6))
    assert validate(dip(routes), Dependencies(routes)).peak_activations == (6, 6, 6, 3, 2, 1)


def test_a_limit_in_bytes_and_a_lone_encoder_go_to_interleaved_1f1b() -> None:
    routes = routes_of(COLOCATED)
    memory = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: 4)
    assert dip(routes, memory=memory) == interleaved_1f1b(routes, memory=memory)
    alone = routes_of(Plan(modules={"vision": module(replica(0, 1), loss_weight=1.0)}, edges=(), num_microbatches=3))
    assert dip(alone) == interleaved_1f1b(alone)
