"""Emulated stages have the shapes of the real ones, take the time they are told, and run in the unmodified engine."""

from types import SimpleNamespace

import pytest
import torch
from distributed import run_distributed
from generator_run import generator_config

from benchmarks import emulation
from benchmarks.emulation import EmulatedStage, Sleeper, emulated_stage_maker
from motet.assignment.sample import Sample, Segment
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.costs.analytic import analytic_table
from motet.data.run_file import open_samples
from motet.families.encoders.token_counts import encoder_segment
from motet.models.materialize import read_part_config
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.from_run_file import planning_problem
from motet.runtime.assembly import build_stage
from motet.runtime.engine import Engine
from motet.schedule.action import parse_action

NUM_MICROBATCHES = 3


def config(*, tied: bool = False) -> RunConfig:
    vision = {"image_size": 32, "patch_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    llm = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2}
    vision_part = {"config": "SiglipVisionConfig", "values": {**vision, **heads, "vision_use_head": False}}
    values = {**llm, **heads, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return RunConfig.model_validate(
        {
            "model": {
                "encoders": {"vision": {**vision_part, "train": {"module": False}}},
                "language_model": {"config": "LlamaConfig", "values": values},
            },
            "data": {"kind": "dial-a-digit"},
            "parallel": {"num_microbatches": NUM_MICROBATCHES},
        }
    )


def samples(config: RunConfig) -> tuple[Sample, ...]:
    """Of different lengths, and one without an image."""
    vision = read_part_config(config.model.encoders["vision"], "encoder", where="model")
    result = []
    for i in range(2 * NUM_MICROBATCHES):
        images = tuple(encoder_segment(vision, item=k, grid=(2, 2)) for k in range((1, 0, 2)[i % 3]))
        sequence = (*(Segment(image.outputs, "vision", image.item) for image in images), Segment(3 + i))
        result.append(Sample(f"s{i}", {"vision": images, "language_model": sequence}, {"language_model": 2 + i}))
    return tuple(result)


@pytest.mark.parametrize(("name", "num_layers"), [("vision", 5), ("language_model", 4)])
def test_shapes_are_those_of_the_real_stages(name, num_layers):
    run = config()
    members = [sample for sample in samples(run) if sample.has(name)]
    workload = planning_problem(run, members).modules[name].workload
    assert workload.num_layers == num_layers
    for cut in range(1, num_layers):
        for layers in ((0, cut), (cut, num_layers)):
            tp = TensorParallel(group=None, rank=0, size=1)
            real = build_stage(run, name, layers, tp, torch.device("cpu"), recompute=None)
            emulated = EmulatedStage(name, workload, layers, {}, {})
            assert emulated.hidden_size == real.hidden_size or layers[0] == 0
            assert emulated.output_size == real.output_size
            if layers[0]:
                assert emulated.input_shape(members) == tuple(real.input_shape(members))
            if layers[1] < num_layers or name == "vision":
                assert emulated.output_shape(members) == tuple(real.output_shape(members))


def test_shapes_of_a_generator_are_those_of_the_real_stages(tmp_path):
    run = generator_config(tmp_path)
    source = open_samples(run)
    whole = [source.sample(i) for i in range(8)]
    members = [sample for sample in whole if sample.has("image")]
    workload = planning_problem(run, whole).modules["image"].workload
    tp = TensorParallel(group=None, rank=0, size=1)
    for cut in range(1, workload.num_layers):
        real = build_stage(run, "image", (0, cut), tp, torch.device("cpu"), recompute=None)
        emulated = EmulatedStage("image", workload, (0, cut), {}, {}, {"language_model": 24})
        assert emulated.output_shape(members) == tuple(real.output_shape(members))
        assert emulated.incoming_size("language_model") == real.incoming_size("language_model")


def test_lateness_is_taken_off_the_next_sleep(monkeypatch):
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 1e-4

    monkeypatch.setattr(emulation, "time", SimpleNamespace(sleep=sleep, perf_counter=lambda: now))
    sleeper = Sleeper()
    for _ in range(100):
        sleeper.sleep(1e-3)
    assert now == pytest.approx(0.1 + 1e-4)


def plan_with_two_replicas(run: RunConfig, schedule: str) -> Plan:
    """Rank 2 r holds the encoder of replica r, rank 2 r + 1 the language model."""
    problem = planning_problem(run, samples(run))
    modules = {}
    for place, (name, module) in enumerate(problem.modules.items()):
        whole = (0, module.workload.num_layers)
        modules[name] = ModulePlan(
            kind=module.workload.kind,
            num_layers=whole[1],
            replicas=tuple(Replica(stages=(Stage(layers=whole, ranks=(2 * r + place,)),)) for r in range(2)),
            trainable=module.trainable,
            loss_weight=module.loss_weight,
        )
    return Plan(modules=modules, edges=problem.edges, num_microbatches=NUM_MICROBATCHES, schedule=schedule)


def evaluation_of(run: RunConfig, schedule: str) -> Evaluation:
    from dataclasses import replace

    problem = planning_problem(run, samples(run))
    workloads = {name: module.workload for name, module in problem.modules.items()}
    slow = analytic_table(workloads, cpu_cluster(4), dtype="float32", dtype_bytes=4, tp_sizes=(1,))
    return evaluate(replace(problem, table=slow, cluster=cpu_cluster(4)), plan_with_two_replicas(run, schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_the_engine_runs_emulated_stages(schedule: str):
    run = config()
    evaluation = evaluation_of(run, schedule)
    batch = SimpleNamespace(samples=samples(run))

    def work(rank: int) -> tuple:
        engine = Engine(evaluation.plan, emulated_stage_maker(evaluation.costs), device=torch.device("cpu"))
        result = engine.run(batch)
        sizes = {p.name: (p.parameter.numel(), p.parameter.grad.abs().sum().item()) for p in engine.model.parameters}
        return result.loss, engine.timeline(), sizes

    results = run_distributed(work, 4)
    loss, timeline, _ = results[0]
    assert loss == 0.0
    routes = evaluation.program.dependencies.routes
    ran = [parse_action(span.name) for span in timeline.spans if span.kind in "FBIW"]
    assert {a.cell for a in ran if a.kind.value == "F"} == set(routes.cells)
    assert {a.cell for a in ran if a.kind.value in "BI"} == set(routes.with_backward)
    assert any(a.kind.value == "W" for a in ran) == (schedule == "zero_bubble_h1")
    for rank in range(4):  # Lateness is made up for, so only the sum is at least what was asked for.
        asked = sum(evaluation.costs.compute_s(a) for a in ran if rank in routes.stage(a.cell).ranks)
        assert timeline.busy_s[rank] >= asked
    language_model = evaluation.problem.modules["language_model"].workload
    assert results[1][2] == {
        f"language_model.weights.{i}": (layer.num_parameters, 0.0) for i, layer in enumerate(language_model.layers)
    }
    assert list(results[0][2]) == ["vision.weights.4"]


def test_tied_parameters_are_refused():
    run = config(tied=True)
    workload = planning_problem(run, samples(run)).modules["language_model"].workload
    with pytest.raises(ValueError, match="tied"):
        EmulatedStage("language_model", workload, (0, 4), {}, {})
