"""Entrain's models as planning problems: Qwen2.5-VL's vision tower and Llama 3.2 on A40s (thesis 4.7.1), everything
trained, with samples drawn here, because the thesis prints its data sets' distributions as pictures only."""

from dataclasses import replace

import numpy as np

from motet.assignment.sample import Sample, Segment
from motet.cluster import DEVICES, LINKS, Cluster
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.families.encoders.token_counts import encoder_segment
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import with_projector
from papers.shapes import module_workload

VISION = {
    "model_type": "qwen2_5_vl_vision",
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
BACKBONES = {"1b": (16, 2048, 8192, 32, 8), "3b": (28, 3072, 8192, 24, 8)}
"""Llama 3.2: layers, hidden size, MLP size, heads, groups."""


def problems() -> list[tuple[str, PlanningProblem]]:
    """One replica's devices and samples, dealt out as they come and as Entrain does."""
    named = [(f"Qwen2.5-VL vision + Llama3-{model} on 16 A40", problem(model)) for model in BACKBONES]
    return [*named, *((f"{what}, assignment entrain", replace(each, assignment="entrain")) for what, each in named)]


def problem(model: str, *, num_devices: int = 16, num_samples: int = 128, seed: int = 0) -> PlanningProblem:
    """32 microbatches of 4; images and texts of log-normal sizes, each by itself."""
    layers, hidden, mlp, heads, groups = BACKBONES[model]
    workloads = {
        "vision": with_projector(module_workload(VISION), "linear", hidden),
        "language_model": module_workload(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": mlp,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": groups,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            }
        ),
    }
    cluster = Cluster(
        num_devices=num_devices,
        device=DEVICES["a40"],
        devices_per_node=4,
        within_node=LINKS["pcie4"],
        between_nodes=LINKS["infiniband200"],
        nics_per_node=1,
    )
    rng = np.random.default_rng(seed)
    sides = 2 * np.clip(np.round(rng.lognormal(np.log(12), 0.4, (num_samples, 2))), 2, 40).astype(int)
    words = np.clip(np.round(rng.lognormal(np.log(250), 0.8, num_samples)), 10, 3000).astype(int)
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=((0, workload.num_layers),),
                loss_weight=float(name == "language_model"),
                tp_sizes=(1, 2),
            )
            for name, workload in workloads.items()
        },
        edges=(Edge(source="vision", target="language_model"),),
        cluster=cluster,
        table=analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=(1, 2)),
        samples=tuple(
            _sample(i, (1, int(rows), int(columns)), int(count))
            for i, ((rows, columns), count) in enumerate(zip(sides, words, strict=True))
        ),
        num_microbatches=32,
        memory=MemoryOptions(parameter_bytes=4, activation_bytes=2, zero1=True),
    )


def _sample(index: int, grid: tuple[int, ...], num_words: int) -> Sample:
    image = encoder_segment(VISION, item=0, grid=grid)
    text = (Segment(image.outputs, source="vision"), Segment(num_words))
    return Sample(str(index), {"vision": (image,), "language_model": text}, {"language_model": num_words})
