"""The language model's timeline as the bubble scheduler sees it: drawn by hand, and against plans' own schedules."""

import pytest
from plans import interleaved

from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.planner.optimus.timeline import Kernel, LlmPipeline, Slot, llm_timeline, passes_in_order
from motet.schedule.action import Kind
from motet.schedule.generators import GENERATORS
from motet.schedule.program import make_program
from motet.schedule.routes import derive_routes
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate


def uniform(num_places, num_chunks, num_microbatches, forward_s=1.0, backward_s=2.0, **options):
    num_stages = num_places * num_chunks
    return LlmPipeline(
        num_places=num_places,
        forward=[(Kernel(forward_s),)] * num_stages,
        backward=[(Kernel(backward_s),)] * num_stages,
        num_microbatches=num_microbatches,
        **options,
    )


def test_one_chunk_is_1f1b_by_hand():
    timeline = llm_timeline(uniform(2, 1, 3))
    # 0: F0 F1 . . B0 B0 F2 B1 B1 . B2 B2      1: . F0 B0 B0 F1 B1 B1 F2 B2 B2
    assert timeline.forward_points == (0, 1, 6)
    assert timeline.backward_points == (6, 9, 12)
    assert timeline.iteration_s == 12
    assert timeline.slots[0] == (Slot(0, 0, window_s=1), Slot(2, 4, window_s=2), Slot(9, 10, window_s=2), Slot(12, 12))
    assert timeline.slots[1] == (Slot(0, 1, window_s=1), Slot(10, 12))


def test_all_gather_and_reduce_scatter_widen_the_outer_bubbles():
    timeline = llm_timeline(uniform(2, 1, 3, all_gather_s=3, reduce_scatter_s=5))
    assert timeline.forward_points == (3, 4, 9)
    assert timeline.iteration_s == 20
    assert [(slots[0].end_s, slots[-1].start_s) for slots in timeline.slots] == [(3, 15), (4, 13)]


def test_figure_12_adjusted_warm_up_defers_the_later_microbatches():
    pipeline = uniform(4, 2, 8)
    usual, adjusted = llm_timeline(pipeline, adjust_warm_up=False), llm_timeline(pipeline)
    # Place 0 ends the first backward of its last chunk at 16: eight forwards, then four backwards of 2.
    assert usual.forward_points == (0, 1, 2, 3, 8, 9, 10, 16)
    assert adjusted.forward_points == (0, 1, 2, 3, 16, 19, 22, 25)
    assert adjusted.adjusted
    assert not usual.adjusted
    # (microbatches x chunks + places - 1) x (forward + backward)
    assert usual.iteration_s == adjusted.iteration_s == (8 * 2 + 3) * 3


def test_the_warm_up_is_adjusted_only_where_that_costs_nothing():
    pipeline = uniform(4, 2, 8, forward_s=1, backward_s=2, message_s=0.5)
    usual, adjusted = llm_timeline(pipeline, adjust_warm_up=False), llm_timeline(pipeline)
    assert adjusted.iteration_s == usual.iteration_s


def test_bubbles_inside_a_pass_are_where_it_communicates():
    forward = (Kernel(1), Kernel(2, True), Kernel(4, True), Kernel(8), Kernel(16, True), Kernel(32))
    pipeline = LlmPipeline(num_places=1, forward=[forward], backward=[(Kernel(1),)], num_microbatches=1)
    assert llm_timeline(pipeline).slots == (
        (Slot(0, 0, window_s=1), Slot(1, 7, True, 8), Slot(15, 31, True, 32), Slot(64, 64)),
    )


@pytest.mark.parametrize(
    ("num_places", "num_chunks", "num_microbatches"), [(1, 1, 1), (2, 3, 4), (4, 2, 8), (3, 2, 5), (2, 1, 3)]
)
@pytest.mark.parametrize("forwards_per_place", [1, 2])
def test_every_pass_stands_once_and_after_its_forward(num_places, num_chunks, num_microbatches, forwards_per_place):
    for place in range(num_places):
        order = passes_in_order(num_places, num_chunks, num_microbatches, place, forwards_per_place)
        stages = range(place, num_places * num_chunks, num_places)
        assert sorted(order) == sorted((s, i, kind) for s in stages for i in range(num_microbatches) for kind in (0, 1))
        assert all(order.index((s, i, 0)) < order.index((s, i, 1)) for s in stages for i in range(num_microbatches))


@pytest.mark.parametrize(("num_places", "num_chunks", "num_microbatches"), [(2, 2, 4), (4, 3, 8), (3, 2, 5), (4, 1, 6)])
@pytest.mark.parametrize(
    ("forwards_per_place", "schedule"), [(2, "interleaved_1f1b"), (1, "interleaved_1f1b_adjusted")]
)
def test_the_order_and_its_times_are_those_of_the_schedule(
    num_places, num_chunks, num_microbatches, forwards_per_place, schedule
):
    """The schedule that plans run, and the simulator's clock."""
    plan = interleaved(num_places, num_chunks, num_microbatches)
    samples = [Sample(str(i), {"llm": (Segment(4),)}, {"llm": 3}) for i in range(num_microbatches)]
    routes = derive_routes(plan, contiguous_assignment(plan, samples), samples)
    program = make_program(schedule, routes)
    for place, actions in enumerate(GENERATORS[schedule](routes).ranks):
        order = passes_in_order(num_places, num_chunks, num_microbatches, place, forwards_per_place)
        assert [(a.cell.stage, a.cell.microbatch, int(a.kind is Kind.BACKWARD)) for a in actions] == order
    timeline = llm_timeline(uniform(num_places, num_chunks, num_microbatches), adjust_warm_up=forwards_per_place == 1)
    assert simulate(program, UniformCosts()).iteration_time_s == timeline.iteration_s


def test_stages_that_do_not_fill_the_places_are_refused():
    with pytest.raises(ValueError, match="3 forward and 3 backward stages for 2 places"):
        llm_timeline(
            LlmPipeline(num_places=2, forward=[(Kernel(1),)] * 3, backward=[(Kernel(1),)] * 3, num_microbatches=2)
        )
