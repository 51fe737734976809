"""The bubble scheduler against brute force: all owners, all leads, all orders, on a clock of whole seconds."""

from functools import cache
from itertools import pairwise, product
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.planner.optimus.bubbles import TOLERANCE, EncoderPipelines, schedule_bubbles
from motet.planner.optimus.timeline import Kernel, LlmPipeline, LlmTimeline, Slot, llm_timeline

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


@examples(150)
@given(timelines(), st.integers(1, 2), st.integers(0, 2))
def test_equal_to_brute_force_where_kernels_are_units(timeline, forward_s, backward_s):
    encoder = EncoderPipelines(((0,), (1,)), 1, ((UNIT,) * forward_s,), ((UNIT,) * backward_s,))
    found = schedule_bubbles(timeline, encoder).iteration_s
    best = shortest(timeline, forward_s, backward_s)
    assert best - 1e-9 <= found <= best + 2 * TOLERANCE * timeline.iteration_s


def shortest_of_two_stages(timeline, seconds):
    """Of one pipeline over two places: (forward, backward) seconds of each stage; the least time whatever is decided.

    Both places decide every second; a stage's work on a microbatch may be interrupted."""
    count = len(timeline.forward_points)
    needed = [(f, g, c, b) for _ in range(count) for (f, b), (g, c) in [seconds]]
    idle = [{t for slot in slots for t in range(slot.start_s, slot.end_s)} for slots in timeline.slots]

    def can(work, second):
        """(microbatch, step) that each place could do; a microbatch's steps are F on 0, F on 1, B on 1, B on 0."""
        found = [[None], [None]]
        for i, left in enumerate(work):
            step = next((k for k, units in enumerate(left) if units), None)
            if step is not None and (step < 2 or second >= timeline.backward_points[i]):
                found[(0, 1, 1, 0)[step]].append((i, step))
        free = [second < 0 or second in idle[p] or second >= timeline.iteration_s for p in (0, 1)]
        return [found[p] if free[p] else [None] for p in (0, 1)]

    @cache
    def end(second, work):
        for left, point in zip(work, timeline.forward_points, strict=True):
            if second >= point and any(left[:2]):
                return inf
        if not any(map(any, work)):
            return -inf
        if second > timeline.iteration_s + 40:
            return inf
        best = inf
        for choice in product(*can(work, second)):
            then = work
            for doing in filter(None, choice):
                i, step = doing
                left = then[i]
                then = (*then[:i], (*left[:step], left[step] - 1, *left[step + 1 :]), *then[i + 1 :])
            after = end(second + 1, then)
            best = min(best, max(second + 1, after) if any(choice) else after)
        return best

    most = sum(map(sum, needed))
    return min(lead + max(timeline.iteration_s, end(-lead, tuple(needed))) for lead in range(most + 1))


@examples(80)
@given(timelines(max_microbatches=2), st.integers(1, 2), st.integers(1, 2))
def test_two_stages_are_close_to_brute_force(timeline, first_s, second_s):
    """Not equal: forwards go first even where a backward on the way to another stage is more urgent. Of what
    was drawn, that cost one microbatch's forward at most."""
    encoder = EncoderPipelines(
        ((0, 1),), 1, ((UNIT,) * first_s, (UNIT,) * second_s), ((UNIT,) * first_s, (UNIT,) * second_s)
    )
    found = schedule_bubbles(timeline, encoder).iteration_s
    best = shortest_of_two_stages(timeline, ((first_s, first_s), (second_s, second_s)))
    assert best - 1e-9 <= found <= best + first_s + second_s + 2 * TOLERANCE * timeline.iteration_s


def ends_of_chains(slots, kernels, num_chains):
    """Chains of kernels on a clock of whole seconds, each begun as soon as it fits beside those before.

    A chain may begin where the one before ended: in that bubble, or while the language model computes behind it."""
    regions = []
    for slot in slots:
        regions.append((slot.start_s, slot.end_s, True, not slot.is_tensor_parallel))
        regions.append((slot.end_s, slot.end_s + int(slot.window_s), False, True))
    taken, ends, first = set(), [], 0
    for _ in range(num_chains):
        now, at = 0, first
        for kernel in kernels:
            at, start = next(
                (r, t)
                for r in range(at, len(regions))
                if regions[r][3 if kernel.is_communication else 2]
                for t in range(max(now, regions[r][0]), regions[r][1] - kernel.seconds + 1)
                if not any((r, u) in taken for u in range(t, t + kernel.seconds))
            )
            taken |= {(at, u) for u in range(start, start + kernel.seconds)}
            now = start + kernel.seconds
        ends.append(now)
        first = at // 2 * 2
    return ends


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_kernels_wait_for_bubbles_and_windows_in_which_they_fit(gaps, kernel_list, num_microbatches):
    slots, now = [], 0
    for seconds, window, is_tensor_parallel in gaps:
        slots.append(Slot(now, now + seconds, is_tensor_parallel, window))
        now += seconds + window
    slots.append(Slot(now, now + 1))
    kernels = tuple(Kernel(seconds, flag) for seconds, flag in kernel_list)
    slots = (Slot(0, 0, window_s=0), *slots)
    points = (1000.0,) * num_microbatches
    found = schedule_bubbles(
        LlmTimeline((slots,), points, points, 1000.0, False), EncoderPipelines(((0,),), 1, (kernels,), ((),))
    )
    reference = ends_of_chains((*slots[:-1], Slot(now, 500)), kernels, num_microbatches)
    assert [placements[0].end_s for placements in found.forwards] == reference


def pipeline(num_microbatches, **options):
    forward = (Kernel(2), Kernel(1, True), Kernel(2), Kernel(1, True))
    backward = (Kernel(4), Kernel(1, True), Kernel(4), Kernel(1, True))
    return LlmPipeline(
        num_places=2, forward=[forward] * 4, backward=[backward] * 4, num_microbatches=num_microbatches, **options
    )


@examples(60)
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


@examples(40)
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


def test_no_microbatch_is_lost_where_rounding_puts_an_end_after_the_last_point():
    """No sample has the modality: there is nothing to compute, and all that makes a forward late is its messages."""
    step_s = 7.940888888888887e-07
    points = (0.0, step_s, 2 * step_s, 2.3822666666666662e-06)
    slots = (Slot(0.0, 4e-4), Slot(5e-4, 5.127067343726621e-04))
    timeline = LlmTimeline((slots,) * 4, points, points, 5.127067343726621e-04, False)
    encoder = EncoderPipelines(((0, 1, 2, 3),), 1, ((),) * 4, ((),) * 4, message_s=4e-5)
    assert schedule_bubbles(timeline, encoder).owner == (0,) * 4
