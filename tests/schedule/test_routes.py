from random import Random

import pytest
from drawing import draw_problem
from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm

from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment
from motet.plan import Edge, Plan
from motet.schedule.routes import Cell, Route, Routes, derive_routes


def with_backward(routes: Routes) -> set[str]:
    return {f"{cell.module}{cell.stage}" for cell in routes.with_backward}


def test_chain() -> None:
    routes = routes_of(chain(3, 2))
    assert routes.cells == tuple(Cell("llm", 0, s, m) for s in range(3) for m in range(2))
    middle = Cell("llm", 0, 1, 1)
    assert routes.incoming[middle] == (Route(Cell("llm", 0, 0, 1), middle, (1,), True),)
    assert routes.outgoing[Cell("llm", 0, 2, 1)] == ()
    assert not any(route.carries_gradient for route in routes.incoming[Cell("llm", 0, 0, 0)])
    assert any(route.carries_gradient for route in routes.incoming[middle])


def test_cells_stand_in_topological_order() -> None:
    for seed in range(100):
        routes = draw_problem(Random(seed)).routes
        place = {cell: i for i, cell in enumerate(routes.cells)}
        for cell in routes.cells:
            assert all(place[route.source] < place[cell] for route in routes.incoming[cell])
            assert all(route.source == cell for route in routes.outgoing[cell])


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        # A projector behind a frozen encoder: its own weights, nothing before it.
        ({"vision": ((1, 2),), "llm": ()}, {"vision1", "llm0", "llm1"}),
        ({"vision": (), "llm": ((1, 2),)}, {"llm1"}),
        ({"vision": (), "llm": ((0, 1),)}, {"llm0", "llm1"}),
        ({"vision": ((0, 1),), "llm": ()}, {"vision0", "vision1", "llm0", "llm1"}),
        ({"vision": (), "llm": ()}, set()),
    ],
)
def test_a_backward_needs_something_trainable_at_or_before(trainable: dict, expected: set[str]) -> None:
    plan = Plan(
        modules={
            "vision": module(replica(0, 1), trainable=trainable["vision"]),
            "llm": language_model(replica(2, 3), trainable=trainable["llm"]),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    routes = routes_of(plan)
    assert with_backward(routes) == expected
    trained = {f"{name}{i}" for name, runs in trainable.items() for first, last in runs for i in range(first, last)}
    assert {f"{cell.module}{cell.stage}" for cell in routes.with_weight_gradient} == trained


def test_whether_a_backward_is_needed_differs_by_microbatch() -> None:
    """A trained vision before a frozen language model: without an image there is nothing to train."""
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1, 2), trainable=())},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    routes = routes_of(plan, samples(2, ["vision", "llm"], {1: ["vision"]}))
    assert {cell.microbatch for cell in routes.cells if cell.module == "vision"} == {0}
    assert routes.with_backward == {Cell("vision", 0, 0, 0), Cell("llm", 0, 0, 0), Cell("llm", 0, 1, 0)}


def test_what_reaches_no_loss_has_no_backward() -> None:
    plan = Plan(
        modules={"llm": language_model(replica(0)), "unused": module(replica(1))},
        edges=(Edge(source="llm", target="unused"),),
        num_microbatches=1,
    )
    assert with_backward(routes_of(plan)) == {"llm0"}


def test_evaluation_has_no_backward() -> None:
    plan = vision_audio_llm(2)
    batch = samples(2, ["vision", "audio", "llm"])
    routes = derive_routes(plan, contiguous_assignment(plan, batch), batch, forward_only=True)
    assert not routes.with_backward
    assert not any(route.carries_gradient for cell in routes.cells for route in routes.incoming[cell])


def test_modules_that_cut_the_batch_differently() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1), replica(2))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    batch = samples(4, ["vision", "llm"], {2: ["vision"]})
    assignment = BatchAssignment({"vision": (((0, 1), (3,)),), "llm": (((0,), (3, 1)), ((2,), ()))})
    routes = derive_routes(plan, assignment, batch)
    crossing = [r for cell in routes.cells for r in routes.incoming[cell]]
    assert [(r.source.microbatch, r.target.replica, r.target.microbatch, r.samples) for r in crossing] == [
        (0, 0, 0, (0,)),
        (0, 0, 1, (1,)),
        (1, 0, 1, (3,)),
    ]
    assert Cell("llm", 1, 0, 1) not in routes.cells


def test_an_edge_enters_at_its_layers() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1, 2, 3))},
        edges=(Edge(source="vision", target="llm", layers=(0, 2)),),
        num_microbatches=1,
    )
    routes = routes_of(plan)
    assert [r.target.stage for r in routes.outgoing[Cell("vision", 0, 0, 0)]] == [0, 2]


def test_a_copy_reads_the_original_s_samples() -> None:
    plan = Plan(
        modules={
            "vision": module(replica(0)),
            "vision@1": module(replica(1), copy_of="vision"),
            "llm": language_model(replica(0, 1)),
        },
        edges=(
            Edge(source="vision", target="llm", layers=(0,)),
            Edge(source="vision@1", target="llm", layers=(1,)),
        ),
        num_microbatches=2,
    )
    routes = routes_of(plan, samples(2, ["vision", "llm"], {1: ["vision"]}))
    assert {(c.module, c.microbatch) for c in routes.cells if c.module != "llm"} == {("vision", 0), ("vision@1", 0)}
    assert [r.target.stage for r in routes.outgoing[Cell("vision@1", 0, 0, 0)]] == [1]


def test_assignments_that_do_not_fit_are_refused() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=1,
    )
    batch = samples(2, ["vision", "llm"])
    with pytest.raises(ValueError, match="sample 1 of llm needs vision, but is in no microbatch of vision"):
        derive_routes(plan, BatchAssignment({"vision": (((0,),),), "llm": (((0, 1),),)}), batch)
    with pytest.raises(ValueError, match="sample 0 is in two microbatches of vision"):
        derive_routes(plan, BatchAssignment({"vision": (((0,), (0, 1)),), "llm": (((0, 1),),)}), batch)
