"""The bubble scheduler against brute force: all owners, all leads, all orders, on a clock of whole seconds."""

from functools import cache
from itertools import pairwise, product
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.planner.optimus_bubbles import TOLERANCE, EncoderPipelines, schedule_bubbles
from motet.planner.optimus_timeline import Kernel, LlmPipeline, LlmTimeline, Slot, llm_timeline

UNIT = Kernel(1.0)


@st.composite
def timelines(draw, *, num_places=2, max_microbatches=3):
    """Any bubbles and dependency points on whole seconds, not only those that a pipeline can have."""
    end = draw(st.integers(8, 14))
    slots = []
    for _ in range(num_places):
        bounds = sorted(draw(st.lists(st.integers(0, end), min_size=3, max_size=7, unique=True)))
        bounds = bounds[: len(bounds) // 2 * 2 - 1]
        slots.append(
            (
                Slot(0, bounds[0]),
                *(Slot(a, b) for a, b in zip(bounds[1:-1:2], bounds[2:-1:2], strict=False)),
                Slot(bounds[-1], end),
            )
        )
    count = draw(st.integers(1, max_microbatches))
    times = st.lists(st.integers(0, end), min_size=count, max_size=count)
    forward_points = sorted(draw(times))
    backward_points = [max(a, b) for a, b in zip(sorted(draw(times)), forward_points, strict=True)]
    return LlmTimeline(tuple(slots), tuple(forward_points), tuple(backward_points), end, False)


def shortest(timeline, forward_s, backward_s):
    """Of two pipelines, one on each place: the least time over everything that may be decided."""
    count = len(timeline.forward_points)
    best = inf
    for owner in product(range(2), repeat=count):
        for lead in range(forward_s * count + 1):
            if lead >= best - timeline.iteration_s:
                break
            ends = [
                _earliest_end(
                    timeline, place, [i for i in range(count) if owner[i] == place], lead, forward_s, backward_s
                )
                for place in range(2)
            ]
            best = min(best, lead + max(timeline.iteration_s, *ends))
    return best


def _earliest_end(timeline, place, owned, lead, forward_s, backward_s):
    idle = {second for slot in timeline.slots[place] for second in range(slot.start_s, slot.end_s)}

    @cache
    def from_here(second, forwards, backwards):
        if any(left and second >= timeline.forward_points[i] for i, left in zip(owned, forwards, strict=True)):
            return inf
        if not any(forwards) and not any(backwards):
            return -inf
        choices = [from_here(second + 1, forwards, backwards)] if second < timeline.iteration_s + lead + 30 else []
        if second < 0 or second in idle or second >= timeline.iteration_s:
            for k, i in enumerate(owned):
                if forwards[k]:
                    choices.append(from_here(second + 1, _less(forwards, k), backwards))
                elif backwards[k] and second >= timeline.backward_points[i]:
                    choices.append(max(second + 1, from_here(second + 1, forwards, _less(backwards, k))))
        return min(choices, default=inf)

    return from_here(-lead, (forward_s,) * len(owned), (backward_s,) * len(owned))


def _less(left, k):
    return (*left[:k], left[k] - 1, *left[k + 1 :])


@settings(max_examples=150, deadline=None)
@given(timelines(), st.integers(1, 2), st.integers(0, 2))
def test_equal_to_brute_force_where_kernels_are_units(timeline, forward_s, backward_s):
    encoder = EncoderPipelines(((0,), (1,)), 1, ((UNIT,) * forward_s,), ((UNIT,) * backward_s,))
    found = schedule_bubbles(timeline, encoder).iteration_s
    best = shortest(timeline, forward_s, backward_s)
    assert best - 1e-9 <= found <= best + 2 * TOLERANCE * timeline.iteration_s


def earliest_chain_end(slots, kernels, horizon):
    """One chain of kernels on a clock of whole seconds: each begins as soon as it fits into one bubble or window."""
    regions = []
    for slot in slots:
        regions.append((slot.start_s, slot.end_s, True, not slot.is_tensor_parallel))
        regions.append((slot.end_s, slot.end_s + slot.window_s, False, True))
    now = 0
    for kernel in kernels:
        allowed = [(a, b) for a, b, compute, links in regions if (links if kernel.is_communication else compute)]
        now = next(t for t in range(now, horizon) if any(a <= t and t + kernel.seconds <= b for a, b in allowed)) + int(
            kernel.seconds
        )
    return now


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=6),
)
def test_kernels_wait_for_bubbles_and_windows_in_which_they_fit(gaps, kernel_list):
    slots, now = [], 0
    for seconds, window, is_tensor_parallel in gaps:
        slots.append(Slot(now, now + seconds, is_tensor_parallel, window))
        now += seconds + window
    slots.append(Slot(now, now + 1))
    kernels = tuple(Kernel(seconds, flag) for seconds, flag in kernel_list)
    slots = (Slot(0, 0), *slots)
    timeline = LlmTimeline((slots,), (1000.0,), (1000.0,), 1000.0, False)
    found = schedule_bubbles(timeline, EncoderPipelines(((0,),), 1, (kernels,), ((),)))
    reference = earliest_chain_end((*slots[:-1], Slot(now, 500)), kernels, 400)
    assert found.forwards[0][0].end_s == reference


def pipeline(num_microbatches, **options):
    forward = (Kernel(2), Kernel(1, True), Kernel(2), Kernel(1, True))
    backward = (Kernel(4), Kernel(1, True), Kernel(4), Kernel(1, True))
    return LlmPipeline(
        num_places=2, forward=[forward] * 4, backward=[backward] * 4, num_microbatches=num_microbatches, **options
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.sampled_from([(((0,), (1,)), 1), (((0,), (1,)), 2), (((0, 1),), 1), (((0, 1),), 2)]),
    st.lists(st.tuples(st.sampled_from([0.25, 0.5, 1.5]), st.booleans()), min_size=1, max_size=6),
    st.floats(0, 20),
    st.floats(0, 3),
)
def test_what_the_language_model_needs_is_there(num_microbatches, layout, kernel_list, wide_s, message_s):
    kernels = tuple(Kernel(*kernel) for kernel in kernel_list)
    places, copies = layout
    encoder = EncoderPipelines(
        places, copies, (kernels,) * len(places[0]), (kernels * 2,) * len(places[0]), message_s=message_s
    )
    timeline = llm_timeline(pipeline(num_microbatches, all_gather_s=wide_s / 3, reduce_scatter_s=wide_s))
    schedule = schedule_bubbles(timeline, encoder)
    assert schedule.iteration_s >= timeline.iteration_s
    assert 0 <= schedule.efficiency <= 1
    for i, (forward, backward) in enumerate(zip(schedule.forwards, schedule.backwards, strict=True)):
        assert forward[0].start_s >= -schedule.lead_s - 1e-9
        assert forward[-1].end_s + message_s <= timeline.forward_points[i] + 1e-9
        assert backward[-1].start_s >= timeline.backward_points[i] + message_s - 1e-9
        assert max(p.end_s for p in backward) + schedule.lead_s <= schedule.iteration_s + 1e-9
        for (first, second), (later, earlier) in zip(
            pairwise(forward), zip(backward[1:], backward, strict=False), strict=True
        ):
            assert second.start_s >= first.end_s + message_s - 1e-9
            assert earlier.start_s >= later.end_s + message_s - 1e-9
    for pipe in range(encoder.num_pipelines):
        ends = [
            forward[-1].end_s for forward, owner in zip(schedule.forwards, schedule.owner, strict=True) if owner == pipe
        ]
        assert ends == sorted(ends)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.floats(0, 30))
def test_fine_bubbles_are_never_worse_than_coarse_ones_alone(num_microbatches, wide_s):
    encoder = EncoderPipelines(((0,), (1,)), 1, ((Kernel(0.5),) * 6,), ((Kernel(0.5),) * 12,))
    timeline = llm_timeline(pipeline(num_microbatches, all_gather_s=wide_s / 3, reduce_scatter_s=wide_s))
    fine, coarse = schedule_bubbles(timeline, encoder), schedule_bubbles(timeline.coarse(), encoder)
    assert fine.iteration_s <= coarse.iteration_s + 2 * TOLERANCE * timeline.iteration_s


def test_opening_and_closing_are_waited_for():
    timeline = LlmTimeline(((Slot(0, 4), Slot(9, 12)),), (4.0,), (9.0,), 12.0, False)
    encoder = EncoderPipelines(((0,),), 1, ((UNIT,),), ((UNIT,),), opening_s=2, closing_s=5)
    schedule = schedule_bubbles(timeline, encoder)
    assert (schedule.forwards[0][0].start_s, schedule.backwards[0][0].end_s) == (2, 10)
    assert schedule.iteration_s == 12 + 5


def test_backwards_keep_the_pipeline_of_their_forward():
    # Pipeline 0 has its bubble before the language model, pipeline 1 only later: the first microbatch is pipeline 0's,
    # though both backwards would fit into pipeline 1's bubble.
    timeline = LlmTimeline(
        ((Slot(0, 2), Slot(40, 40)), (Slot(0, 0), Slot(2, 4), Slot(20, 40))), (2.0, 4.0), (20.0, 21.0), 40.0, False
    )
    encoder = EncoderPipelines(((0,), (1,)), 1, ((UNIT,) * 2,), ((UNIT,),))
    schedule = schedule_bubbles(timeline, encoder)
    assert schedule.owner == (0, 1)
    assert schedule.lead_s == 0
    assert schedule.backwards[0][0].start_s == 40
    assert schedule.iteration_s == 41


def test_several_encoders_are_one_with_all_their_kernels():
    timeline = llm_timeline(pipeline(4, all_gather_s=9, reduce_scatter_s=9))
    one, other = (Kernel(1),) * 2, (Kernel(0.5),) * 3
    both = EncoderPipelines(((0,), (1,)), 1, (one + other,), (other + one,))
    schedule = schedule_bubbles(timeline, both)
    assert both.seconds == 2 * 3.5
    assert schedule.iteration_s == timeline.iteration_s
