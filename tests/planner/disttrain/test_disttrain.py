"""DistTrain's plans: what they look like, that they simulate, and that the simulation's choice is no worse than any."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from small_problem import small_problem, with_memory

from motet.assignment.sample import Segment
from motet.cluster import LINKS
from motet.costs.analytic import analytic_table
from motet.costs.memory import RESERVE
from motet.plan import Edge, Plan, check_plan
from motet.planner.disttrain.orchestration import Orchestration, UnitDegrees, evaluate_degrees, orchestrate
from motet.planner.disttrain.planner import disttrain, orchestrated_plan, orchestration_problem
from motet.planner.evaluate import evaluate
from motet.planner.problem import ModuleProblem
from motet.planner.registry import make_plan
from motet.shapes.diffusion_transformers import Connection, transformer_workload


def with_tp(problem, sizes):
    return replace(problem, modules={name: replace(m, tp_sizes=sizes) for name, m in problem.modules.items()})


@examples(12)
@given(
    num_devices=st.integers(3, 9),
    tp_sizes=st.sampled_from(((1,), (1, 2))),
    dp_sizes=st.sampled_from(((1,), (1, 2), (1, 2, 4))),
    frozen=st.sampled_from(((), ("vision",), ("vision", "audio"), ("language_model",))),
    num_microbatches=st.sampled_from((2, 4)),
)
def test_every_plan_is_one_and_simulates(num_devices, tp_sizes, dp_sizes, frozen, num_microbatches):
    problem = small_problem(
        num_devices=num_devices, frozen=frozen, dp_sizes=dp_sizes, num_microbatches=num_microbatches
    )
    problem = with_tp(problem, tp_sizes)
    plan = make_plan(problem, "disttrain")
    check_plan(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.planner == "disttrain"
    assert plan.num_ranks <= num_devices
    held = [rank for *_, stage in plan.stages() for rank in stage.ranks]
    assert len(held) == len(set(held)), "units share no rank"
    evaluation = evaluate(problem, plan)
    assert evaluation.fits
    assert evaluation.iteration_time_s >= evaluation.lower_bound_s * (1 - 1e-9) > 0


def test_units_have_degrees_of_their_own():
    """Frozen encoders beside a trained language model: replicas go where the work is."""
    plan = disttrain(small_problem(num_devices=8, dp_sizes=(1, 2, 4)))
    replicas = {name: len(module.replicas) for name, module in plan.modules.items()}
    assert replicas["language_model"] > replicas["audio"]
    assert evaluate(small_problem(num_devices=8, dp_sizes=(1, 2, 4)), plan).fits


def every_layout(problem, stage_counts=(1, 2, 3), dp_sizes=(1, 2)):
    """Every simulated layout, written out."""
    for choice in product(product(stage_counts, dp_sizes), repeat=len(problem.modules)):
        degrees = {name: UnitDegrees(1, pp, dp) for name, (pp, dp) in zip(problem.modules, choice, strict=True)}
        if sum(d.num_devices for d in degrees.values()) <= problem.num_devices:
            layout = Orchestration(degrees=degrees, num_microbatches=4, iteration_s=0.0)
            yield evaluate(problem, orchestrated_plan(problem, layout))


def test_no_layout_simulates_much_faster():
    """The closed form leaves messages out, so it need not be first; but among all layouts it must be among the best."""
    problem = small_problem(num_devices=5, dp_sizes=(1, 2), frozen=())
    times = [evaluation.iteration_time_s for evaluation in every_layout(problem)]
    assert len(times) > 10
    assert evaluate(problem, disttrain(problem)).iteration_time_s <= 1.05 * min(times)


def test_a_generator_comes_behind_the_language_model():
    problem = small_problem(num_devices=4, encoders=("vision", "audio"))
    turned = replace(
        problem, edges=(Edge(source="vision", target="language_model"), Edge(source="language_model", target="audio"))
    )
    roles = {name: unit.role for name, unit in orchestration_problem(turned).units.items()}
    assert roles == {"vision": "encoder", "audio": "generator", "language_model": "language_model"}


def test_encoder_language_model_and_generator_simulate():
    """A small diffusion transformer behind the language model, with a loss of its own."""
    values = {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}
    generator = transformer_workload(
        {
            "_class_name": "PixArtTransformer2DModel",
            **values,
            "sample_size": 64,
            "out_channels": 4,
            "caption_channels": 64,
        },
        Connection(incoming_size=64, projector="mlp"),
    )
    small = small_problem(num_devices=8, encoders=("vision",), frozen=(), dp_sizes=(1, 2, 4))
    samples = [replace(s, layouts={**s.layouts, "image": (Segment(64, grid=(8, 8)),)}) for s in small.samples]
    whole = ((0, generator.num_layers),)
    modules = {**small.modules, "image": ModuleProblem(workload=generator, trainable=whole, loss_weight=1.0)}
    problem = replace(
        small,
        samples=tuple(samples),
        modules=modules,
        edges=(*small.edges, Edge(source="language_model", target="image")),
        table=analytic_table({name: module.workload for name, module in modules.items()}, small.cluster),
    )
    plan = disttrain(problem)
    assert plan.modules["image"].kind == "generator"
    assert len({len(module.replicas) for module in plan.modules.values()}) > 1
    evaluation = evaluate(problem, plan)
    assert evaluation.fits
    assert evaluation.iteration_time_s >= evaluation.lower_bound_s * (1 - 1e-9)


def test_what_does_not_fit_is_said():
    problem = with_memory(small_problem(num_devices=3, frozen=()), 2**20)
    assert evaluate(problem, disttrain(problem)).overflows


def test_stages_are_interleaved_if_the_schedule_is():
    problem = small_problem(num_devices=3, encoders=("vision",), dp_sizes=(1,), schedule="interleaved_1f1b")
    plan = disttrain(problem)
    stages = plan.modules["language_model"].replicas[0].stages
    assert len(stages) > len({stage.ranks for stage in stages})
    assert (
        evaluate(problem, plan).iteration_time_s
        < evaluate(problem, disttrain(replace(problem, schedule="1f1b"))).iteration_time_s
    )


def test_memory_decides():
    """With memory for little more than the leanest layout needs, one that fits."""
    roomy = small_problem(num_devices=6, encoders=("vision",), frozen=(), dp_sizes=(1, 2, 4))
    fastest = max(evaluate(roomy, disttrain(roomy)).result.peak_memory_bytes)
    leanest = min(
        max(evaluation.result.peak_memory_bytes) for evaluation in every_layout(roomy, (1, 2, 3, 4), (1, 2, 4))
    )
    assert 1.1 * leanest < fastest
    tight = with_memory(roomy, 1.03 * leanest / (1 - RESERVE))
    assert evaluate(tight, disttrain(tight)).fits


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="disttrain gives every module its own ranks"):
        disttrain(small_problem(), placement="colocated")
    with pytest.raises(ValueError, match=r"cluster.num_devices: is 2, but vision and audio and language_model need"):
        disttrain(small_problem(num_devices=2))


def test_the_closed_form_knows_of_messages_and_of_sums_of_gradients():
    """Six nodes of one device on a slow network: without them it is far off."""
    problem = small_problem(num_devices=6, encoders=("vision",), frozen=(), dp_sizes=(2,))
    slow = replace(LINKS["ethernet10"], bytes_per_s=3e7)
    problem = replace(problem, cluster=replace(problem.cluster, devices_per_node=1, between_nodes=slow))
    whole = orchestration_problem(problem)
    text = problem.modules["language_model"].workload
    gradients = sum(layer.num_parameters for layer in text.layers) * problem.memory.parameter_bytes
    assert whole.units["language_model"].reduce_s == pytest.approx(gradients / 3e7)
    found = orchestrate(whole)
    simulated_s = evaluate(problem, orchestrated_plan(problem, found)).iteration_time_s
    assert found.iteration_s == pytest.approx(simulated_s, rel=0.3)
    units = {name: replace(unit, boundary_s={}, reduce_s=0.0) for name, unit in whole.units.items()}
    deaf = evaluate_degrees(replace(whole, units=units), found.degrees)
    assert deaf.iteration_s < 0.7 * simulated_s


def test_frozen_modules_sum_nothing_and_send_nothing_back():
    trained, frozen = (
        orchestration_problem(small_problem(num_devices=4, encoders=(), frozen=names)).units["language_model"]
        for names in ((), ("language_model",))
    )
    assert trained.reduce_s > frozen.reduce_s == 0
    assert trained.boundary_s[1] == 2 * frozen.boundary_s[1] > 0
