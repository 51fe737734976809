"""What a batch-sync costs, against counting every comparison and every feature; and features that are recomputed."""

from dataclasses import replace
from itertools import combinations, product
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import contrastive, replica
from sampling import examples
from tiny_configs import EVERY_MODEL

from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.cluster import DEVICES, LINKS, Cluster
from motet.costs.analytic import analytic_table
from motet.costs.iteration import IterationCosts
from motet.costs.stage_seconds import loss_share
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import Plan
from motet.schedule.action import Compute, Kind
from motet.schedule.program import make_program
from motet.schedule.routes import Cell, derive_routes
from motet.shapes.module_shape import contrastive_loss, with_projector
from motet.simulator.simulate import simulate

NAMES = ("image", "text", "audio")
CLUSTER = Cluster(
    num_devices=16,
    device=DEVICES["v100-16"],
    devices_per_node=4,
    within_node=LINKS["nvlink2"],
    between_nodes=LINKS["ethernet25"],
    nics_per_node=1,
)


def counted(plan: Plan, pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """The most comparisons of a member (as a share of all), and the most features that it receives for each sample."""
    towers = [name for name in plan.modules if name != "loss"]
    makers = {name: [r for rep in plan.modules[name].replicas for r in rep.stages[-1].ranks] for name in towers}
    num_samples = lcm(*(len(ranks) for ranks in makers.values()))
    maker = {(name, i): makers[name][i % len(makers[name])] for name in towers for i in range(num_samples)}
    comparisons: dict[int, int] = {}
    received: dict[int, set[tuple[str, int]]] = {}
    for (first, second), i, j in product(pairs, range(num_samples), range(num_samples)):
        for mine, other in (((first, i), (second, j)), ((second, j), (first, i))):
            rank = maker[mine]
            comparisons[rank] = comparisons.get(rank, 0) + 1
            if maker[other] != rank:
                received.setdefault(rank, set()).add(other)
    most = max((len(features) for features in received.values()), default=0)
    return max(comparisons.values()) / sum(comparisons.values()), most / num_samples


@examples(60)
@given(st.data())
def test_the_fullest_member_by_counting(data: st.DataObject) -> None:
    names = NAMES[: data.draw(st.integers(2, 3))]
    all_pairs = list(combinations(names, 2))
    pairs = all_pairs if data.draw(st.booleans()) else [pair for pair in all_pairs if names[0] in pair]
    colocated = data.draw(st.booleans())
    towers, first = {}, 0
    for name in names:
        dp, tp = (2, 1) if colocated else (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)))
        towers[name] = [replica(tuple(range(first + r * tp, first + (r + 1) * tp))) for r in range(dp)]
        first += 0 if colocated else dp * tp
    plan = contrastive(towers)
    share = loss_share(plan, "loss", contrastive_loss(pairs, 8))
    comparisons, received = counted(plan, pairs)
    assert share.comparisons == pytest.approx(comparisons)
    # A device that lacks every feature of a tower receives all of them.
    assert share.gathered == pytest.approx(received)


def test_separate_towers_receive_half() -> None:
    """Section 5.3.2: the communication of the interaction is halved, but for the log-sum-exps."""
    workload = contrastive_loss([("image", "text")], 512)
    apart = contrastive({"image": [replica(r) for r in range(32)], "text": [replica(32 + r) for r in range(32)]})
    together = contrastive({name: [replica(r) for r in range(64)] for name in ("image", "text")})
    separate, colocated = (loss_share(plan, "loss", workload) for plan in (apart, together))
    assert separate.gathered == 1.0
    assert colocated.gathered == pytest.approx(2 * 63 / 64)
    assert separate.log_sum_exps == 1


WORKLOADS = {
    "image": with_projector(module_workload(EVERY_MODEL["clip"][0], role="tower"), "linear", 32),
    "text": with_projector(module_workload(EVERY_MODEL["clip_text"][0], role="tower"), "linear", 32),
    "loss": contrastive_loss([("image", "text")], 32),
}
BATCH = [
    Sample(
        str(i),
        {
            "image": (Segment(145, num_outputs=1, grid=(12, 12)),),
            "text": (Segment(16, num_outputs=1, grid=(16,)),),
        },
    )
    for i in range(32)
]


def costs_of(plan: Plan, batch: list[Sample] = BATCH) -> IterationCosts:
    routes = derive_routes(plan, contiguous_assignment(plan, batch), batch)
    table = analytic_table(WORKLOADS, CLUSTER)
    return IterationCosts(routes, batch, workloads=WORKLOADS, table=table, cluster=CLUSTER)


def towers(image_dp: int, text_dp: int, num_batches: int = 2, per_batch: int = 2) -> Plan:
    """Whole towers, each replica on a rank."""
    plan = contrastive(
        {"image": [replica(r) for r in range(image_dp)], "text": [replica(image_dp + r) for r in range(text_dp)]},
        num_batches=num_batches,
        num_microbatches={"image": num_batches * per_batch, "text": num_batches * per_batch},
    )
    modules = {
        name: replace(
            module,
            num_layers=WORKLOADS[name].num_layers,
            trainable=((0, WORKLOADS[name].num_layers),),
            replicas=tuple(
                replace(r, stages=(replace(r.stages[0], layers=(0, WORKLOADS[name].num_layers)),))
                for r in module.replicas
            ),
        )
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)


def test_a_loss_takes_what_its_exchange_and_its_comparisons_take() -> None:
    seconds = {n: costs_of(towers(n, n)).compute_s(Compute(Kind.FORWARD, Cell("loss", 0, 0, 0))) for n in (1, 2, 4)}
    assert seconds[4] > seconds[2]  # Between nodes, where a node has one network card.
    costs = costs_of(towers(2, 2))
    forward, backward = (Compute(kind, Cell("loss", 0, 0, 0)) for kind in (Kind.FORWARD, Kind.BACKWARD))
    exchanged = costs.group_communication_s(forward)
    assert 0 < exchanged < costs.compute_s(forward)
    assert costs.group_communication_s(backward) == 0
    assert costs.compute_s(backward) > costs.compute_s(forward) - exchanged
    assert costs.saved_bytes(Cell("loss", 0, 0, 0), half=False) == 16 * 32 * 4 + 2 * 16 * 4
    # A batch of twice as many samples has four times as many comparisons: 2 x 2 x 32 FLOPs each forwards.
    small, large = costs_of(towers(2, 2, 4)).cells.model_flops(), costs.cells.model_flops()
    assert large - small == pytest.approx(3 * 2 * 2 * 32 * (2 * 16**2 - 4 * 8**2))


def test_recomputed_features_cost_a_forward_and_keep_nothing() -> None:
    plan = towers(1, 1)
    kept, recomputed = costs_of(plan), costs_of(replace(plan, recompute_features=("image",)))
    cell, other = Cell("image", 0, 0, 1), Cell("text", 0, 0, 1)
    forward, backward = Compute(Kind.FORWARD, cell), Compute(Kind.BACKWARD, cell)
    assert recomputed.compute_s(forward) <= kept.compute_s(forward)
    assert recomputed.compute_s(backward) == pytest.approx(kept.compute_s(backward) + kept.compute_s(forward))
    assert recomputed.compute_s(Compute(Kind.BACKWARD, other)) == kept.compute_s(Compute(Kind.BACKWARD, other))
    assert recomputed.saved_bytes(cell, half=False) == 0
    assert recomputed.saved_bytes(other, half=False) == kept.saved_bytes(other, half=False) > 0
    # The graph of one microbatch is there while its backward runs.
    assert recomputed.static_bytes(0) == kept.static_bytes(0) + kept.saved_bytes(cell, half=False)
    peaks = []
    for costs in (kept, recomputed):
        program = make_program("distmm_pipe", costs.routes, costs.compute_s)
        peaks.append(simulate(program, costs).peak_memory_bytes)
    assert peaks[1][0] < peaks[0][0]
    assert peaks[1][1] == peaks[0][1]


def test_a_stage_of_recomputed_features_keeps_its_input() -> None:
    plan = towers(1, 1)
    image = plan.modules["image"]
    first, second = (
        replace(image.replicas[0].stages[0], layers=layers, ranks=(rank,))
        for layers, rank in (((0, 2), 0), ((2, image.num_layers), 2))
    )
    cut = replace(image, replicas=(replace(image.replicas[0], stages=(first, second)),))
    loss = plan.modules["loss"]
    members = replace(loss.replicas[0].stages[0], ranks=(1, 2))
    plan = replace(
        plan,
        modules={
            **plan.modules,
            "image": cut,
            "loss": replace(loss, replicas=(replace(loss.replicas[0], stages=(members,)),)),
        },
        recompute_features=("image",),
    )
    costs = costs_of(plan)
    assert costs.saved_bytes(Cell("image", 0, 0, 0), half=False) == 0
    assert costs.saved_bytes(Cell("image", 0, 1, 0), half=False) == 8 * 145 * 64 * 4
