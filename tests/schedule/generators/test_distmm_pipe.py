"""DistMM-Pipe, and GPipe and 1F1B with batch-syncs: DistMM section 5.4 and Figure 6."""

from dataclasses import replace
from importlib import import_module
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import chain, contrastive, language_model, module, replica, routes_of, samples
from queue_rules import QueueRule, can_deadlock
from sampling import examples

from motet.plan import Edge, Plan
from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.generators.list_schedule import list_schedule
from motet.schedule.lower import lower
from motet.schedule.program import make_program
from motet.schedule.routes import Routes
from motet.schedule.validate import validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import SimulationResult, simulate

SCHEDULES = ("distmm_pipe", "1f1b", "gpipe")


class BatchSyncs(UniformCosts):
    """A batch-sync takes no time, so that what is idle is idle for the schedule's sake alone."""

    def compute_s(self, action: Compute) -> float:
        return 0.0 if action.cell.module == "loss" else super().compute_s(action)


def two_towers(num_stages: int, per_batch: int, num_batches: int) -> Routes:
    """Of equal stages, each on a rank of its own."""
    towers = {"image": [replica(*range(num_stages))], "text": [replica(*range(num_stages, 2 * num_stages))]}
    number = per_batch * num_batches
    plan = contrastive(towers, num_batches=num_batches, num_microbatches=dict.fromkeys(towers, number))
    return routes_of(plan, samples(number, ["image", "text"]))


def simulated(schedule: str, routes: Routes, costs: UniformCosts) -> SimulationResult:
    validate(GENERATORS[schedule](routes), Dependencies(routes))
    return simulate(make_program(schedule, routes, costs.compute_s), costs)


def idle_s(result: SimulationResult) -> list[float]:
    """Of each rank."""
    spans = result.timeline.spans
    num_ranks = 1 + max(span.rank for span in spans)
    busy = [sum(s.end - s.start for s in spans if s.rank == rank and s.kind in "FB") for rank in range(num_ranks)]
    return [result.iteration_time_s - each for each in busy]


@examples(60)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(2, 4),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([1, 2, 3]),
)
def test_no_extra_idle_time_over_1f1b_of_the_same_microbatches(
    num_stages: int, per_batch: int, num_batches: int, forward_s: float, backward_s: float
) -> None:
    """Figure 6. 1F1B's microbatches are not contrasted, so nothing makes its backwards wait for other forwards."""
    costs = BatchSyncs(forward_s=forward_s, backward_s=backward_s)
    alone = simulated("1f1b", routes_of(chain(num_stages, per_batch * num_batches)), costs)
    result = simulated("distmm_pipe", two_towers(num_stages, per_batch, num_batches), costs)
    assert idle_s(result) == pytest.approx(2 * idle_s(alone))


def test_the_others_wait_for_their_batch_syncs() -> None:
    """4 stages, two contrastive batches of 4 microbatches: GPipe drains and fills once more, which is 3 (F + B)."""
    routes, costs = two_towers(4, 4, 2), BatchSyncs()
    times = {schedule: simulated(schedule, routes, costs).iteration_time_s for schedule in SCHEDULES}
    assert times == {"distmm_pipe": (8 + 3) * 3, "1f1b": (8 + 3 + 3) * 3, "gpipe": (8 + 2 * 3) * 3}


def test_with_one_contrastive_batch_all_are_gpipe() -> None:
    routes = two_towers(3, 5, 1)
    assert GENERATORS["distmm_pipe"](routes).ranks == GENERATORS["gpipe"](routes).ranks
    times = {simulated(schedule, routes, BatchSyncs()).iteration_time_s for schedule in SCHEDULES}
    assert times == {(5 + 2) * 3}


@examples(40)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_a_stage_has_k_microbatches_in_flight_and_one_for_each_stage_after_it(
    num_stages: int, per_batch: int, num_batches: int
) -> None:
    routes = two_towers(num_stages, per_batch, num_batches)
    after = [num_stages - 1 - s for s in range(num_stages)] * 2
    number = per_batch * num_batches
    held = {
        "distmm_pipe": [min(per_batch + d, number) for d in after],
        "gpipe": [per_batch for _ in after],
    }
    for schedule, expected in held.items():
        # The last stages' ranks hold the loss's own graph beside, until its backward.
        peaks = validate(GENERATORS[schedule](routes), Dependencies(routes)).peak_activations
        assert list(peaks) == [number + (d == 0) for number, d in zip(expected, after, strict=True)]


def test_golden() -> None:
    """The last stage of Figure 6: two contrastive batches of two microbatches; S is the loss's F and B."""
    routes = two_towers(2, 2, 2)
    lists = [" ".join(map(str, actions)) for actions in GENERATORS["distmm_pipe"](routes).ranks]
    first = "{0}F0 {0}F1 {0}F2 {0}B0 {0}F3 {0}B1 {0}B2 {0}B3"
    last = "{0}F0 {0}F1 loss[0].0F0 loss[0].0B0 {0}B0 {0}F2 {0}B1 {0}F3 loss[0].0F1 loss[0].0B1 {0}B2 {0}B3"
    assert lists == [
        form.format(f"{tower}[0].{stage}") for tower in ("image", "text") for stage, form in ((0, first), (1, last))
    ]


def drawn_towers(rng: Random) -> tuple[Plan, int]:
    """Towers of any shapes, on ranks of their own or (some) all on the same; also the number of samples."""
    names = rng.sample(["image", "text", "audio"], k=rng.choice([1, 2, 2, 3]))
    num_batches = rng.randint(1, 3)
    counts = {name: num_batches * rng.randint(1, 3) for name in names}
    towers, first_rank = {}, 0
    if rng.random() < 0.25:
        shape = [list(range(r * 2, r * 2 + 2)) for r in range(rng.randint(1, 3))]
        towers = {name: [replica(*ranks) for ranks in shape] for name in names}
    else:
        for name in names:
            replicas, num_stages, size = [], rng.randint(1, 3), rng.randint(1, 2)
            for _ in range(rng.randint(1, 3)):
                groups = [tuple(range(first_rank + s * size, first_rank + (s + 1) * size)) for s in range(num_stages)]
                replicas.append(replica(*groups))
                first_rank += num_stages * size
            towers[name] = replicas
    locked = [name for name in names if rng.random() < 0.2]
    plan = contrastive(towers, num_batches=num_batches, num_microbatches=counts, locked=locked)
    return plan, rng.randint(1, 24)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_towers_can_be_run_under_any_queue_rule(seed: int) -> None:
    rng = Random(seed)
    plan, num_samples = drawn_towers(rng)
    towers = [name for name in plan.modules if name != "loss"]
    lacking = {i: rng.sample(towers, k=rng.randint(1, len(towers))) for i in range(num_samples) if rng.random() < 0.2}
    routes = routes_of(plan, samples(num_samples, towers, lacking))
    dependencies = Dependencies(routes)
    for schedule in SCHEDULES:
        ordered = GENERATORS[schedule](routes)
        validate(ordered, dependencies)
        program = lower(ordered, dependencies)
        for rule in QueueRule:
            assert not can_deadlock(program, rule), f"{schedule} under {rule}"


def captioning(num_stages: int, num_decoder_stages: int, per_batch: int, num_batches: int) -> Routes:
    """CoCa-like: the image tower's output also enters a decoder with a loss of its own. A rank for each stage."""
    towers = two_towers(num_stages, per_batch, num_batches).plan
    first, number = 2 * num_stages, per_batch * num_batches
    plan = Plan(
        modules={**towers.modules, "decoder": language_model(replica(*range(first, first + num_decoder_stages)))},
        edges=(*towers.edges, Edge(source="image", target="decoder", layers=tuple(range(num_decoder_stages)))),
        num_microbatches=number,
    )
    return routes_of(plan, samples(number, ["image", "text", "decoder"]))


@examples(60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([(1.0, 2.0), (1.0, 1.0), (2.0, 1.0)]),
)
def test_a_decoder_is_as_more_stages_of_its_tower(
    num_stages: int, num_decoder_stages: int, per_batch: int, num_batches: int, seconds: tuple[float, float]
) -> None:
    """The iteration takes as long as 1F1B of the stages of both, one after the other; no batch-sync makes it longer."""
    costs = BatchSyncs(forward_s=seconds[0], backward_s=seconds[1])
    routes = captioning(num_stages, num_decoder_stages, per_batch, num_batches)
    alone = simulated("1f1b", routes_of(chain(num_stages + num_decoder_stages, per_batch * num_batches)), costs)
    assert simulated("distmm_pipe", routes, costs).iteration_time_s == pytest.approx(alone.iteration_time_s)


def test_a_decoder_holds_what_1f1b_does_and_its_tower_k_minus_1_more() -> None:
    routes = captioning(2, 2, 3, 4)
    peaks = validate(GENERATORS["distmm_pipe"](routes), Dependencies(routes)).peak_activations
    # Text's last rank, and image's, hold the loss's own graph beside.
    assert list(peaks) == [3 + 3, 3 + 2 + 1, 3 + 1, 3 + 1, 2, 1]


def test_golden_with_a_decoder() -> None:
    """Three contrastive batches of one microbatch: while the decoder has one, its tower makes the next."""
    ordered = GENERATORS["distmm_pipe"](captioning(1, 1, 1, 3), BatchSyncs().compute_s)
    image, text, decoder = (" ".join(map(str, each)) for each in ordered.ranks)
    assert image == (
        "image[0].0F0 loss[0].0F0 image[0].0F1 loss[0].0B0 image[0].0B0 loss[0].0F1 image[0].0F2 loss[0].0B1 "
        "image[0].0B1 loss[0].0F2 loss[0].0B2 image[0].0B2"
    )
    assert text == " ".join(f"text[0].0F{i} loss[0].0F{i} loss[0].0B{i} text[0].0B{i}" for i in range(3))
    assert decoder == " ".join(f"decoder[0].0F{i} decoder[0].0B{i}" for i in range(3))


def test_1f1b_keeps_a_decoder_busy_too() -> None:
    """Contrastive batches of one microbatch: what the batch-sync needs is less than what 1F1B has in flight."""
    routes, costs = captioning(1, 1, 1, 4), BatchSyncs()
    assert simulated("1f1b", routes, costs).iteration_time_s == (4 + 1) * 3


@pytest.mark.parametrize(
    ("schedule", "file"), [("distmm_pipe", "distmm_pipe"), ("1f1b", "one_f_one_b"), ("gpipe", "gpipe")]
)
def test_a_decoder_beside_the_towers_is_list_scheduled(schedule: str, file: str) -> None:
    """Two contrastive batches, of two microbatches of the towers and of four of the decoder."""
    towers = two_towers(1, 2, 2).plan
    plan = Plan(
        modules={
            **towers.modules,
            "decoder": replace(language_model(replica(2)), num_microbatches=8),
        },
        edges=(*towers.edges, Edge(source="image", target="decoder")),
        num_microbatches=4,
    )
    routes = routes_of(plan, samples(8, ["image", "text", "decoder"]))
    module_of_generator = import_module(f"motet.schedule.generators.{file}")
    with mock.patch.object(module_of_generator, "list_schedule", wraps=list_schedule) as scheduled:
        validate(GENERATORS[schedule](routes), Dependencies(routes))
        assert scheduled.call_count == 1
        scheduled.reset_mock()
        GENERATORS[schedule](two_towers(2, 2, 2))
        # Without the decoder there is a closed form, but for 1F1B, whose batch-syncs have none.
        assert scheduled.call_count == (schedule == "1f1b")


def test_without_a_loss_module_it_is_1f1b() -> None:
    routes = routes_of(Plan(modules={"llm": language_model(replica(0, 1))}, edges=(), num_microbatches=4))
    assert GENERATORS["distmm_pipe"](routes).ranks == GENERATORS["1f1b"](routes).ranks
    two = Plan(
        modules={"image": module(replica(0)), "llm": language_model(replica(1))},
        edges=(Edge(source="image", target="llm"),),
        num_microbatches=2,
    )
    assert GENERATORS["distmm_pipe"](routes_of(two)).ranks == GENERATORS["1f1b"](routes_of(two)).ranks
