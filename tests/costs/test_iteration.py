"""The costs of actions and messages: by hand on a small problem, frozen and trainable, packed into stages at will."""

from dataclasses import fields, replace

import numpy as np
import pytest
from bound_costs import (
    CELL,
    LONG,
    SAMPLES,
    TABLE,
    TEXT,
    VISION,
    bind,
    costs_of,
    cut_encoder,
    cut_plan,
    seconds,
    small_plan,
    stage_on,
    unlike_stages,
)

from motet.cluster import LINKS, Link, cluster_from_dict, cpu_cluster
from motet.costs.analytic import analytic_table
from motet.costs.cost_model import LayerCost, Load, ModuleCosts, Quadratic, Sharing
from motet.costs.memory import MemoryOptions
from motet.plan import ContextOptions, Edge, Replica
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Message, lower
from motet.schedule.routes import Cell
from motet.simulator.costs import ArrayCosts, GroupCosts


def test_frozen_encoder_and_language_model_with_trainable_projector():
    costs = bind(small_plan())
    # Four frozen layers without a graph, the projector with one and its weight gradient alone.
    assert seconds(costs, Kind.FORWARD, "vision", 0, 0, 0) == 4 * 0.5 + 1
    assert seconds(costs, Kind.BACKWARD, "vision", 0, 0, 0) == 1000
    # Frozen, but gradients pass through to the projector; a stage costs something too.
    assert seconds(costs, Kind.FORWARD, "text", 0, 1, 0) == 0.25 + 2
    assert seconds(costs, Kind.BACKWARD, "text", 0, 1, 0) == 0.5 + 2 * 10


def test_a_microbatch_without_images_has_no_backward():
    costs = bind(small_plan())
    assert Cell("text", 0, 0, 3) not in costs.routes.with_backward
    assert seconds(costs, Kind.FORWARD, "text", 0, 0, 3) == 0.25 + 2 * 0.5


def test_everything_trainable():
    costs = bind(small_plan(vision_trainable=((0, 5),), text_trainable=((0, 4),)))
    assert seconds(costs, Kind.BACKWARD, "vision", 0, 0, 0) == 1000 + 4 * 110
    assert seconds(costs, Kind.BACKWARD, "text", 0, 0, 0) == 0.5 + 2 * 110
    # Without images nothing lies before the first layer.
    assert seconds(costs, Kind.BACKWARD, "text", 0, 0, 3) == 0.5 + 1000 + 110


def test_halves_add_up_to_the_backward():
    costs = bind(small_plan(vision_trainable=((2, 5),), text_trainable=((1, 3),)))
    for cell in costs.routes.with_backward:
        halves = costs.compute_s(Compute(Kind.INPUT, cell)) + costs.compute_s(Compute(Kind.WEIGHT, cell))
        assert halves == costs.compute_s(Compute(Kind.BACKWARD, cell))


def test_recomputation_is_paid_by_blocks_with_a_gradient():
    plan = small_plan(vision_trainable=((2, 5),), recompute=("vision",))
    costs = bind(plan)
    # Block 2, head and projector are trainable: only block 2 is run again, and keeps no graph before.
    assert seconds(costs, Kind.FORWARD, "vision", 0, 0, 0) == 2 * 0.5 + 0.5 + 2
    assert seconds(costs, Kind.BACKWARD, "vision", 0, 0, 0) == 1 + 1000 + 2 * 110


def test_bytes_of_messages():
    costs = bind(small_plan(), memory=MemoryOptions(activation_bytes=2))
    routes = costs.routes
    into_text = Message(Cell("vision", 0, 0, 0), Cell("text", 0, 0, 0), False, 0, 1)
    assert routes.outgoing[into_text.source][0].target == into_text.target
    assert costs.message_bytes(into_text) == 144 * 64 * 2
    between = Message(Cell("text", 0, 0, 1), Cell("text", 0, 1, 1), True, 2, 1)
    assert costs.message_bytes(between) == 151 * 64 * 2
    assert costs.message_s(between) > costs.cluster.within_node.latency_s


def test_reductions_and_the_optimizer():
    def replicated(**options):
        plan = small_plan(text_trainable=((1, 4),), **options)
        text = plan.modules["text"]
        second = Replica(stages=(stage_on((0, 2), 4), stage_on((2, 4), 5)))
        vision = plan.modules["vision"]
        both = {
            "vision": replace(vision, replicas=(*vision.replicas, Replica(stages=(stage_on((0, 5), 3),)))),
            "text": replace(text, replicas=(*text.replicas, second)),
        }
        return replace(plan, modules=both, num_microbatches=2)

    costs = bind(replicated())
    block, head = TEXT.layers[1].num_parameters, TEXT.layers[3].num_parameters
    link = costs.cluster.within_node
    # Two ranks, two steps of half of the bytes; layer 0 of the first stage is frozen.
    assert costs.reduce_s(Reduce("text", 0, 2)) == pytest.approx(2 * link.latency_s + 4 * block / link.bytes_per_s)
    assert costs.fixed_s == pytest.approx(1.0 + 1e-6 * (block + head))
    shared = bind(replicated(), memory=MemoryOptions(zero1=True))
    assert shared.fixed_s == pytest.approx(1.0 + 1e-6 * (block + head) / 2)
    assert shared.static_bytes(2) == costs.static_bytes(2) - 4 * (block + head)


def test_tensor_parallelism_uses_its_own_costs_and_holds_a_share():
    costs = bind(small_plan(tp=True))
    # Two layers, and the gather of what each of two ranks received half of: 151 tokens of 64 x 4 bytes.
    link = costs.cluster.within_node
    gather = link.latency_s + 151 * 64 * 4 / 2 / link.bytes_per_s
    assert seconds(costs, Kind.FORWARD, "text", 0, 1, 0) == pytest.approx(2 + gather)
    whole = bind(small_plan())
    assert costs.static_bytes(3) == pytest.approx(whole.static_bytes(2) / 2, rel=0.02)
    table = replace(TABLE, modules={"vision": TABLE.modules["vision"], "text": {1: costs_of(4)}})
    unknown = bind(small_plan(tp=True), table=table)
    with pytest.raises(ValueError, match="text was not measured with tp_size 2"):
        seconds(unknown, Kind.FORWARD, "text", 0, 0, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_step_of_a_program_has_its_costs(schedule):
    costs = bind(small_plan(text_trainable=((0, 4),), tied=((0, 3),)))
    dependencies = Dependencies(costs.routes)
    program = lower(GENERATORS[schedule](costs.routes), dependencies)
    for step in program.steps:
        if isinstance(step, Compute):
            assert costs.compute_s(step) > 0
        elif isinstance(step, Message):
            assert costs.message_s(step) > 0
        else:
            # One rank holds each layer, but the tied ones' holders are two.
            assert (costs.reduce_s(step) > 0) == step.tied


def test_context_parallel_ranks_share_tokens_and_pairs_and_gather_keys():
    table = analytic_table({"text": TEXT}, cpu_cluster(8))
    one, two = (bind(cut_plan(cp_size=size), LONG, table=table) for size in (1, 2))
    assert two.load(CELL).share(2) == Load(tokens=120, pairs=240**2 / 2, sequences=1, outputs=60, tokens_squared=120**2)
    forward = Compute(Kind.FORWARD, CELL)
    layers = table.of("text", 1).layers
    overhead = sum(layer.forward.constant for layer in layers)
    # Two blocks gather 2 heads of keys and of values, 16 wide, of 240 tokens, one after the other: half of the bytes.
    link = LINKS["loopback"]
    exchange = 2 * (2 * link.latency_s + 240 * 2 * 2 * 16 * 4 / 2 / link.bytes_per_s)
    shared = (one.compute_s(forward) - overhead) / 2 + overhead + exchange
    assert two.compute_s(forward) == pytest.approx(shared)


def test_groups_that_were_measured_cost_what_was_measured():
    """As functions of one rank's load, exchanges included. A group over nodes pays what its links take beyond those of
    a node."""
    ring, quadratic = ContextOptions(method="ring"), Quadratic(constant=0.5, per_token=1e-3, per_pair=1e-6)
    layer = LayerCost(**{part.name: quadratic for part in fields(LayerCost)})
    measured = ModuleCosts(layers=(layer,) * 4, stage_forward=Quadratic(constant=0.25))
    table = replace(TABLE, groups={"text": {Sharing.of(1, 2, ring, 1): measured}})
    cluster = cluster_from_dict({"num_devices": 4, "device": "a100-40", "devices_per_node": 2})
    slow = replace(cluster.between_nodes, latency_s=cluster.within_node.latency_s + 3.0, bytes_per_s=1e15)
    cluster = replace(cluster, within_node=replace(cluster.within_node, bytes_per_s=1e15), between_nodes=slow)
    forward, backward = Compute(Kind.FORWARD, CELL), Compute(Kind.INPUT, CELL)
    plan = cut_plan(cp_size=2)
    (stage,) = plan.modules["text"].replicas[0].stages
    for ranks, is_apart in ((((0, 1), (2, 3)), False), (((0, 2), (1, 3)), True)):
        replicas = tuple(Replica(stages=(replace(stage, ranks=own),)) for own in ranks)
        text = replace(plan.modules["text"], context=ring, replicas=replicas)
        costs = bind(replace(plan, modules={"text": text}, num_microbatches=2), LONG, table=table, cluster=cluster)
        of_layer = quadratic.seconds(costs.load(CELL).share(2))
        # Keys of two blocks make one hop; in a backward one more, and gradients two.
        assert costs.compute_s(forward) == pytest.approx(0.25 + 4 * of_layer + 2 * 3.0 * is_apart)
        assert costs.compute_s(backward) == pytest.approx(3 * of_layer + 2 * 9.0 * is_apart)
        assert (costs.group_communication_s(forward) > 3.0) == is_apart
    # Of another method nothing was measured.
    unmeasured = bind(plan, LONG, table=table, cluster=cluster).compute_s(forward)
    assert unmeasured == bind(plan, LONG, cluster=cluster).compute_s(forward)


def test_between_groups_of_unequal_size_each_place_sends_each_place_a_piece():
    costs = bind(unlike_stages(2, 1, 1, 3), LONG, table=analytic_table({"text": TEXT}, cpu_cluster(8)))
    width = 64 * 4

    def message(stage, gradient):
        return costs.message_bytes(Message(Cell("text", 0, stage, 0), Cell("text", 0, stage + 1, 0), gradient, 0, 1))

    for gradient in (False, True):
        assert [message(stage, gradient) for stage in range(3)] == [120 * width, 240 * width, 80 * width]
    assert all(
        costs.group_communication_s(Compute(kind, Cell("text", 0, stage, 0))) == 0
        for stage, kind in ((0, Kind.FORWARD), (3, Kind.INPUT))
    )


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (2, 2, 1, 2, 1)])
def test_ranks_of_an_encoder_share_the_tokens_of_its_blocks(sizes):
    """What stands before and behind them each rank computes for all, and the head's gather what the blocks made.

    A backward gets the keys once more, and their gradients return."""
    table = analytic_table({"vision": VISION, "text": TEXT}, cpu_cluster(16))
    shared, one = (bind(cut_encoder(*cp), table=table, cluster=cpu_cluster(16)) for cp in (sizes, (1, 1, 1, 1, 1)))
    link, tokens = LINKS["loopback"], 144 * 64 * 4
    gather = link.latency_s + tokens / 2 / link.bytes_per_s
    keys = 2 * link.latency_s + 2 * tokens / 2 / link.bytes_per_s  # In two portions.
    layers = table.of("vision", 1).layers
    for i, cp in enumerate(sizes):
        is_block, cell = i in (1, 2), Cell("vision", 0, i, 0)
        num_shares = cp if is_block else 1
        # Of what enters the head its ranks have their shares, beside what they gather.
        saved = one.saved_bytes(cell, False) / num_shares + (i == 3) * tokens / 2
        assert shared.saved_bytes(cell, False) == pytest.approx(saved)
        for kind, cost, times in (
            (Kind.FORWARD, layers[i].forward, 1),
            (Kind.INPUT, layers[i].input_gradient, 2),
        ):
            if kind is Kind.INPUT and i == 0:
                continue
            action = Compute(kind, cell)
            expected = (one.compute_s(action) - cost.constant) / num_shares + cost.constant
            expected += times * keys * (num_shares - 1)
            expected += gather * (i == 3)
            assert shared.compute_s(action) == pytest.approx(expected)
    messages = [
        shared.message_bytes(Message(Cell("vision", 0, i, 0), Cell("vision", 0, i + 1, 0), False, 0, 1))
        for i in range(4)
    ]
    # Where the group's size changes, one of the head's two ranks sends the whole output: half of it on average.
    assert messages == [tokens // 2, tokens // 2, tokens // 2, tokens // (2 if sizes[4] == 1 else 1)]


def test_fully_sharded_ranks_gather_parameters_and_update_a_share():
    whole, sharded = (bind(cut_plan(cp_size=2, fully_sharded=given), LONG) for given in (False, True))
    sizes = [layer.num_parameters * 4 for layer in TEXT.layers]
    link = LINKS["loopback"]
    gather = sum(link.latency_s + size / 2 / link.bytes_per_s for size in sizes)
    for kind, times in ((Kind.FORWARD, 1), (Kind.BACKWARD, 2), (Kind.INPUT, 1), (Kind.WEIGHT, 1)):
        action = Compute(kind, CELL)
        assert sharded.compute_s(action) - whole.compute_s(action) == pytest.approx(times * gather)
    num_updated = sum(layer.num_parameters for layer in TEXT.layers)
    assert whole.fixed_s - sharded.fixed_s == pytest.approx(TABLE.optimizer_s_per_parameter * num_updated / 2)


@pytest.mark.parametrize(("bytes_per_s", "is_slow"), [(1e9, False), (1e2, True)])
def test_a_block_is_gathered_while_the_one_before_it_computes(bytes_per_s, is_slow):
    """Two blocks: in a forward the second one's gather is hidden, in a backward the first one's. On a CPU none is."""
    cluster = cluster_from_dict({"num_devices": 2, "device": "h100", "devices_per_node": 2})
    link = Link(name="given", latency_s=0.001, bytes_per_s=bytes_per_s)
    cluster, on_cpu = (replace(c, within_node=link) for c in (cluster, cpu_cluster(2)))
    whole, sharded, of_cpu = (
        bind(two_replicas(fully_sharded=given), LONG, cluster=each)
        for given, each in ((False, cluster), (True, cluster), (True, on_cpu))
    )
    gathers = [link.latency_s + layer.num_parameters * 4 / 2 / link.bytes_per_s for layer in TEXT.layers]
    assert [layer.part for layer in TEXT.layers] == ["embed", "block", "block", "head"]
    assert (gathers[1] > 110) is is_slow
    for kind, times, hidden_s, computing_s in (
        (Kind.FORWARD, 1, gathers[2], 1),
        (Kind.BACKWARD, 2, gathers[1], 110),
        (Kind.INPUT, 1, gathers[1], 10),
        (Kind.WEIGHT, 1, 0, 0),
    ):
        action = Compute(kind, CELL)
        all_s = times * sum(gathers)
        added_s = sharded.compute_s(action) - whole.compute_s(action)
        assert added_s == pytest.approx(all_s - min(hidden_s, computing_s))
        assert sharded.group_communication_s(action) == pytest.approx(added_s)
        assert of_cpu.compute_s(action) - whole.compute_s(action) == pytest.approx(all_s)


@pytest.mark.parametrize("bytes_per_s", [1e12, 1e6])
def test_attention_hides_the_keys_that_travel_meanwhile(bytes_per_s):
    """A ring of four hides all hops of a forward but for what takes longer than three quarters of the attention, and of
    gradients, which make one hop more, all but the last; gathers in two portions hide one; what is traded for heads is
    waited for."""
    link = Link(name="given", latency_s=1e-9, bytes_per_s=bytes_per_s)
    cluster = replace(cluster_from_dict({"num_devices": 4, "device": "h100"}), within_node=link)
    attention = TEXT.layers[1].attention
    exposed = {}
    for method in ("ring", "all_gather", "ulysses"):
        plan = cut_plan(cp_size=4)
        text = replace(plan.modules["text"], context=ContextOptions(method=method))
        table = analytic_table({"text": TEXT}, cluster)
        costs = bind(replace(plan, modules={"text": text}), LONG, cluster=cluster, table=table)
        load = costs.load(CELL).share(4)
        layer = table.of("text", 1).layers[1]
        keys_bytes = 2 * attention.num_key_value_heads * attention.head_dim * 4 * load.tokens * 4
        # Results and gradients of queries are added up in float32, for each of the three hops.
        num_bytes = 3 * 12 * attention.num_heads * attention.head_dim * load.tokens
        device = cluster.device
        sums_s = num_bytes / device.memory_bytes_per_s / device.memory_efficiency if method == "ring" else 0.0
        num_portions = 2 if method == "all_gather" else 1
        pass_s = num_portions * 3 * link.latency_s + 0.75 * keys_bytes / link.bytes_per_s
        for kind, cost in ((Kind.FORWARD, layer.forward), (Kind.INPUT, layer.input_gradient)):
            attention_s = cost.per_pair * load.pairs + cost.per_token_squared * load.tokens_squared
            assert attention_s > 0
            passes = 1 if kind is Kind.FORWARD else 2
            if method == "ring":
                hidden_s = min(passes * pass_s, 0.75 * attention_s)
                passes += (kind is Kind.INPUT) / 3
            else:
                hidden_s = min(passes * pass_s / 2, attention_s / 2)
            found = costs.group_communication_s(Compute(kind, CELL))
            exposed[method, kind] = found
            if method != "ulysses":
                assert found == pytest.approx(2 * (passes * pass_s - hidden_s + sums_s))


def two_replicas(*, fully_sharded):
    plan = cut_plan()
    text = plan.modules["text"]
    replicas = tuple(Replica(stages=(stage_on((0, 4), rank),)) for rank in (0, 1))
    shared = {"fully_sharded": True, "sharded_replicas": 2} if fully_sharded else {}
    return replace(plan, modules={"text": replace(text, replicas=replicas, **shared)}, num_microbatches=2)


@pytest.mark.parametrize(
    "plan",
    [
        small_plan(),
        small_plan(text_trainable=((0, 4),), recompute=("text",), tp=True),
        cut_plan(cp_size=2),
        unlike_stages(2, 1, 3, 2),
    ],
)
def test_answers_by_number_are_those_for_each(plan):
    samples = LONG if len(plan.modules) == 1 else SAMPLES
    costs = bind(plan, samples)
    dependencies = Dependencies(costs.routes)
    assert isinstance(costs, ArrayCosts)
    seconds = costs.compute_seconds(dependencies)
    for number, action in enumerate(dependencies.actions(np.arange(dependencies.num_actions))):
        assert costs.compute_s(action) == seconds[number]
    whole, half = costs.saved_sizes(dependencies)
    for number, cell in enumerate(costs.routes.cells):
        assert costs.saved_bytes(cell, False) == whole[number]
        assert costs.saved_bytes(cell, True) == half[number]
    program = lower(GENERATORS["1f1b"](costs.routes), dependencies)
    sizes = costs.carried_sizes(dependencies)[program.message_value]
    assert [costs.message_bytes(message) for message in program.messages] == sizes.tolist()
    for message, size in zip(program.messages, sizes.tolist(), strict=True):
        latency_s, bytes_per_s = costs.link(message.sender, message.receiver)
        assert costs.message_s(message) == pytest.approx(latency_s + size / bytes_per_s)


def test_zero1_gathers_the_new_parameters():
    copies = small_plan(text_trainable=((0, 4),))
    stages = tuple(
        replace(s, ranks=(rank,)) for s, rank in zip(copies.modules["text"].replicas[0].stages, (3, 4), strict=True)
    )
    text = replace(copies.modules["text"], replicas=(*copies.modules["text"].replicas, Replica(stages=stages)))
    plan = replace(copies, modules={**copies.modules, "text": text})
    reduce = Reduce("text", 0, 2)
    plain, sharded = (bind(plan, memory=MemoryOptions(zero1=zero1)) for zero1 in (False, True))
    assert plain.gather_s(reduce) == 0
    num_bytes = sum(layer.num_parameters for layer in TEXT.layers[:2]) * 4
    link = LINKS["loopback"]
    assert sharded.gather_s(reduce) == pytest.approx(link.latency_s + num_bytes / 2 / link.bytes_per_s)
    # Where both keep everything, nobody lacks anything.
    kept_by_both = bind(plan, memory=MemoryOptions(zero1=True, state_copies=2))
    assert kept_by_both.gather_s(reduce) == 0
    assert kept_by_both.fixed_s == plain.fixed_s > sharded.fixed_s


def test_a_plan_may_have_more_modules_than_an_integer_has_bits():
    """Every replicated encoder is a module of its own."""
    whole = small_plan(vision_trainable=((0, 5),))
    vision = whole.modules["vision"]
    copies = {
        f"vision_{i}": replace(vision, copy_of="vision", replicas=(Replica(stages=(stage_on((0, 5), 3 + i),)),))
        for i in range(70)
    }
    edges = (*whole.edges, *(Edge(source=name, target="text") for name in copies))
    plan = replace(whole, modules={"vision": vision, **copies, "text": whole.modules["text"]}, edges=edges)
    costs = bind(plan, cluster=cpu_cluster(80))
    assert seconds(costs, Kind.BACKWARD, "vision_69", 0, 0, 0) == 1000 + 4 * 110
    assert seconds(costs, Kind.BACKWARD, "text", 0, 0, 0) == 0.5 + 2 * 10


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_group_exchanges_is_part_of_what_it_computes(sequence_parallel):
    """Against a cluster whose links take no time: what is missing there is what is exchanged."""
    cluster = cpu_cluster(8)
    free = replace(cluster, within_node=Link(name="free", latency_s=0.0, bytes_per_s=float("inf")))
    plan = cut_plan(tp_size=2, cp_size=2, sequence_parallel=sequence_parallel, recompute=("text",))
    # The first block has a weight gradient alone.
    text = replace(plan.modules["text"], trainable=((1, 4),))
    plan = replace(plan, modules={"text": text}) if not sequence_parallel else plan
    with_links, without = (
        bind(plan, LONG, cluster=c, table=analytic_table({"text": TEXT}, c, tp_sizes=(2,))) for c in (cluster, free)
    )
    assert isinstance(with_links, GroupCosts)
    for kind in Kind:
        action = Compute(kind, CELL)
        exchanged = with_links.compute_s(action) - without.compute_s(action)
        assert with_links.group_communication_s(action) == pytest.approx(exchanged)
        assert without.group_communication_s(action) == 0
    assert with_links.group_communication_s(Compute(Kind.FORWARD, CELL)) > 0


def test_a_step_in_bfloat16_sends_half():
    wide, cast = (bind(small_plan(), memory=MemoryOptions(activation_bytes=width)) for width in (4, 2))
    between = Message(Cell("text", 0, 0, 1), Cell("text", 0, 1, 1), True, 2, 1)
    assert 2 * cast.message_bytes(between) == wide.message_bytes(between)
    cell = Cell("text", 0, 0, 0)
    assert cast.saved_bytes(cell, half=False) < wide.saved_bytes(cell, half=False)
