"""Oobleck's models (thesis table 2.1) as planning problems on its 30 nodes of one A40, while none has failed.

All are described as Llama models with a plain model's attention, a gated MLP of as many parameters, and words tied to
the head. There are as many replicas as nodes allow that hold one each (n0 of the templates), or fewer; with the most,
microbatches have the size that the artifact gives, or less. Replicas keep whole optimizer states, which is what their
survival rests on, and everything is recomputed. Costs are computed, not measured.
"""

from dataclasses import replace

from motet.assignment.sample import Sample, Segment
from motet.cluster import cluster_from_dict
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.planner.problem import ModuleProblem, PlanningProblem
from papers.oobleck.published import MODELS, NUM_NODES, Model
from papers.oobleck.replay_model import DEVICE_BYTES, num_microbatches, unit_templates
from papers.shapes import module_workload

HEAD_DIM = 64
VOCABULARY = {"BERT-Large": 30522}
GPT_VOCABULARY = 50257


def problems() -> list[tuple[str, PlanningProblem]]:
    return [(f"{model.name} on {NUM_NODES} A40, global batch {model.global_batch}", problem(model)) for model in MODELS]


def problem(model: Model) -> PlanningProblem:
    most = NUM_NODES // min(unit_templates(model).by_nodes)
    dp_sizes = tuple(dp for dp in range(1, most + 1) if NUM_NODES % dp == 0)
    heads = model.hidden_size // HEAD_DIM
    workload = module_workload(
        {
            "model_type": "llama",
            "hidden_size": model.hidden_size,
            "intermediate_size": round(8 * model.hidden_size / 3),
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": VOCABULARY.get(model.name, GPT_VOCABULARY),
            "tie_word_embeddings": True,
        }
    )
    cluster = cluster_from_dict(
        {"num_devices": NUM_NODES, "devices_per_node": 1, "device": "a40", "between_nodes": "infiniband200"}
    )
    length = model.sequence_length
    return PlanningProblem(
        modules={
            "language_model": ModuleProblem(
                workload=workload, trainable=((0, workload.num_layers),), loss_weight=1.0, tp_sizes=(1,)
            )
        },
        edges=(),
        cluster=replace(cluster, device=replace(cluster.device, memory_bytes=DEVICE_BYTES)),
        table=analytic_table({"language_model": workload}, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=(1,)),
        samples=tuple(
            Sample(str(i), {"language_model": (Segment(length),)}, {"language_model": length})
            for i in range(model.global_batch)
        ),
        num_microbatches=-(-num_microbatches(model) // max(dp_sizes)),
        recompute=("language_model",),
        memory=MemoryOptions(parameter_bytes=4, activation_bytes=2),
        dp_sizes=dp_sizes,
    )
