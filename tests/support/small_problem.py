"""A small vision + audio + language model to plan for, with computed costs."""

from dataclasses import replace

from motet.assignment.sample import Sample, Segment
from motet.cluster import cpu_cluster
from motet.costs.analytic import analytic_table
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import with_projector

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "image_size": 64,
    "patch_size": 8,
}
AUDIO = {
    "model_type": "whisper",
    "d_model": 48,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "max_source_positions": 50,
    "num_mel_bins": 16,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "intermediate_size": 256,
    "vocab_size": 512,
}


def sample(i, *, image=True, sound=True, words=20):
    layouts, text = {}, []
    if image:
        layouts["vision"] = (Segment(64, grid=(8, 8)),)
        text.append(Segment(64, source="vision"))
    if sound:
        layouts["audio"] = (Segment(50, num_outputs=20, grid=(40,)),)
        text.append(Segment(20, source="audio"))
    text.append(Segment(words))
    return Sample(str(i), {**layouts, "language_model": tuple(text)}, {"language_model": 5})


def small_problem(*, num_devices=4, encoders=("vision", "audio"), frozen=("vision", "audio"), **options):
    """Projectors are trainable. `frozen`: modules whose own layers are not."""
    workloads = {
        "vision": with_projector(module_workload(VISION), "mlp", 128),
        "audio": with_projector(module_workload(AUDIO), "linear", 128),
        "language_model": module_workload(TEXT),
    }
    workloads = {name: workloads[name] for name in (*encoders, "language_model")}
    modules = {}
    for name, workload in workloads.items():
        last = workload.num_layers
        first = 0 if name not in frozen else last if name == "language_model" else last - 1
        modules[name] = ModuleProblem(
            workload=workload,
            trainable=((first, last),) if first < last else (),
            loss_weight=float(name == "language_model"),
        )
    cluster = cpu_cluster(num_devices)
    samples = [sample(i, image=i % 4 != 3, sound=i % 3 != 2, words=10 + i) for i in range(16)]
    if "audio" not in encoders:
        samples = [sample(i, sound=False, words=10 + i) for i in range(16)]
    return PlanningProblem(
        modules=modules,
        edges=tuple(Edge(source=name, target="language_model") for name in encoders),
        cluster=cluster,
        table=analytic_table(workloads, cluster, tp_sizes=(1, 2, 4)),
        samples=tuple(samples),
        **{"num_microbatches": 4, **options},
    )


def with_memory(problem, memory_bytes):
    device = replace(problem.cluster.device, memory_bytes=memory_bytes)
    return replace(problem, cluster=replace(problem.cluster, device=device))
