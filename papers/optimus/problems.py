"""Configurations of the Optimus paper as planning problems, for planners to be compared on.

Models are described by configurations of families that motet knows: the ViT as SigLIP, GPT as Llama with as many
key-value heads as heads and a gated MLP of as many parameters. Each sample has two images of 1024 tokens for every
encoder; half of their tokens go on into a sequence of 2048, a quarter where there are two encoders. Microbatches and
data parallelism are the paper's (Tables 11 and 12, appendix D.3). Costs are computed, not measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from motet.assignment.sample import Sample, Segment
from motet.cluster import cluster_from_dict
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import with_projector
from papers.optimus.published import (
    BATCH,
    FIGURE_15,
    FIGURE_16,
    HEAD_DIM,
    MICROBATCH_SIZE,
    MODELS,
    SEQUENCE_LENGTH,
    TABLE_5,
    StrongScaling,
    WeakScaling,
)
from papers.shapes import module_workload

PATCHES_PER_SIDE = 32
VOCABULARY = 51200
"""Vocabulary of Megatron-LM's GPT; the paper names none."""
ENCODERS = ("vision", "vision2")


def problems() -> list[tuple[str, PlanningProblem]]:
    """Table 4's, those of Figures 15 and 16, and Table 5's."""
    small = _problem(
        ("ViT-3B",), "GPT-11B", device="a100", num_devices=8, batch=16, num_microbatches=8, dp_sizes=(1, 2)
    )
    return [
        ("ViT-3B + GPT-11B, 8 A100 (appendix C)", small),
        *((f"{_models(row)}, {row.gpus} H100 ({row.name})", _weak_scaling(row)) for row in FIGURE_15),
        *((f"{_models(row)}, {row.gpus} H100 (Figure 16)", _weak_scaling(row)) for row, _ in FIGURE_16),
        *((f"ViT-22B + GPT-175B, {row.gpus} H100, batch {BATCH}", _strong_scaling(row)) for row in TABLE_5),
    ]


def _models(row: WeakScaling) -> str:
    return " + ".join((*row.encoders, row.llm))


def _weak_scaling(row: WeakScaling) -> PlanningProblem:
    return _on_h100(row.encoders, row.llm, row.gpus, row.batch, row.dp)


def _strong_scaling(row: StrongScaling) -> PlanningProblem:
    return _on_h100(("ViT-22B",), "GPT-175B", row.gpus, BATCH, row.dp)


def _on_h100(encoders: Sequence[str], llm: str, num_devices: int, batch: int, dp: int) -> PlanningProblem:
    return _problem(
        encoders,
        llm,
        device="h100",
        num_devices=num_devices,
        batch=batch,
        num_microbatches=batch // dp // MICROBATCH_SIZE,
        dp_sizes=(dp,),
    )


def _problem(
    encoders: Sequence[str],
    llm: str,
    *,
    device: str,
    num_devices: int,
    batch: int,
    num_microbatches: int,
    dp_sizes: tuple[int, ...],
) -> PlanningProblem:
    cluster = cluster_from_dict(
        {
            "num_devices": num_devices,
            "device": device,
            "devices_per_node": 8,
            "between_nodes": "infiniband400",
        }
    )
    names, width = ENCODERS[: len(encoders)], MODELS[llm].width
    workloads = {
        **{
            name: with_projector(module_workload(_vit(encoder)), "linear", width)
            for name, encoder in zip(names, encoders, strict=True)
        },
        "language_model": module_workload(_decoder(llm)),
    }
    tp_sizes = (1, 2, 4, 8)
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=((0, workload.num_layers),),
                loss_weight=float(name == "language_model"),
                tp_sizes=tp_sizes,
            )
            for name, workload in workloads.items()
        },
        edges=tuple(Edge(source=name, target="language_model") for name in names),
        cluster=cluster,
        table=analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=tp_sizes),
        samples=tuple(_sample(i, names) for i in range(batch)),
        num_microbatches=num_microbatches,
        recompute=tuple(workloads),
        memory=MemoryOptions(parameter_bytes=4, activation_bytes=2, zero1=True),
        dp_sizes=dp_sizes,
    )


def _vit(name: str) -> Mapping[str, Any]:
    model = MODELS[name]
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": model.width,
        "num_attention_heads": model.width // HEAD_DIM,
        "num_hidden_layers": model.depth,
        "intermediate_size": 4 * model.width,
        "image_size": 14 * PATCHES_PER_SIDE,
        "patch_size": 14,
        "vision_use_head": False,
    }


def _decoder(name: str) -> Mapping[str, Any]:
    model = MODELS[name]
    heads = model.width // HEAD_DIM
    key_value_heads = 8 if name.startswith("LLAMA") else heads
    attention = 2 * model.width**2 + 2 * model.width * key_value_heads * HEAD_DIM
    return {
        "model_type": "llama",
        "hidden_size": model.width,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "num_hidden_layers": model.depth,
        "intermediate_size": round((model.parameters_per_layer - attention) / (3 * model.width)),
        "vocab_size": VOCABULARY,
    }


def _sample(index: int, encoders: Sequence[str]) -> Sample:
    tokens = PATCHES_PER_SIDE**2
    entering = tokens // 2 // len(encoders)
    image = Segment(tokens, num_outputs=entering, grid=(PATCHES_PER_SIDE, PATCHES_PER_SIDE))
    words = SEQUENCE_LENGTH - tokens
    entered = [Segment(entering, source=name) for name in encoders for _ in range(2)]
    return Sample(
        str(index),
        {**dict.fromkeys(encoders, (image, image)), "language_model": (*entered, Segment(words))},
        {"language_model": words},
    )
