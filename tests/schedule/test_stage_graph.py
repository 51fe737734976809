from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm

from motet.assignment.batch_assignment import BatchAssignment
from motet.plan import Edge, Plan
from motet.schedule.routes import derive_routes
from motet.schedule.stage_graph import (
    cells_of_stages,
    cuts_alike,
    distances_to_sink,
    microbatches_in_flight,
    shares_ranks,
)


def by_name(values: dict) -> dict[str, int]:
    return {f"{key.module}{key.replica}.{key.stage}": value for key, value in values.items()}


def test_distances_and_microbatches_of_a_dag() -> None:
    routes = routes_of(vision_audio_llm(6))
    expected = {"vision0.0": 4, "vision0.1": 3, "audio0.0": 3, "llm0.0": 2, "llm0.1": 1, "llm0.2": 0}
    assert by_name(distances_to_sink(routes)) == expected
    assert by_name(dict(microbatches_in_flight(routes))) == {name: n + 1 for name, n in expected.items()}


def test_stages_without_cells_are_not_in_the_graph() -> None:
    routes = routes_of(vision_audio_llm(2), samples(2, ["llm"]))
    assert {key.module for key in cells_of_stages(routes)} == {"llm"}


def test_what_the_closed_forms_need() -> None:
    assert not shares_ranks(routes_of(vision_audio_llm(2)))
    assert cuts_alike(routes_of(vision_audio_llm(2)))
    assert shares_ranks(routes_of(Plan(modules={"llm": language_model(replica(0, 0))}, edges=(), num_microbatches=1)))
    assert cuts_alike(routes_of(chain(3, 5)))


def vision_llm(num_vision: int, num_llm: int) -> Plan:
    return Plan(
        modules={
            "vision": module(*(replica(i) for i in range(num_vision))),
            "llm": language_model(*(replica(num_vision + 2 * i, num_vision + 2 * i + 1) for i in range(num_llm))),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=4,
    )


def in_flight(plan: Plan, vision: tuple, llm: tuple) -> int:
    num = 1 + max(i for replica_cut in llm for members in replica_cut for i in members)
    routes = derive_routes(plan, BatchAssignment({"vision": vision, "llm": llm}), samples(num, list(plan.modules)))
    assert not cuts_alike(routes)
    return microbatches_in_flight(routes)["vision", 0, 0]  # type: ignore[index]


def test_microbatches_of_a_producer_that_cuts_differently() -> None:
    singles = tuple((i,) for i in range(8))
    pairs = tuple((i, i + 1) for i in range(0, 8, 2))
    # Twice as fine: two for each of the consumer's two, and two that are being made for the next.
    assert in_flight(vision_llm(1, 1), (singles,), (pairs,)) == 4 + 2
    # Twice as coarse: two of the consumer's may lie in two, and the next in a third.
    assert in_flight(vision_llm(1, 1), (pairs,), (singles,)) == 2 + 1
    # One of the producer's has a sample of the consumer's first and one of its last: it stays in flight throughout.
    crossed = ((0, 7), (1, 2), (3, 4), (5, 6))
    assert in_flight(vision_llm(1, 1), (crossed,), (pairs,)) == 4 + 2
    # One producer for two consumers' two each.
    assert in_flight(vision_llm(1, 2), (singles,), (singles[:4], singles[4:])) == 4 + 1
