"""Configurations of the Optimus paper as planning problems, for planners to be compared on.

Models are described by configurations of families that motet knows: the ViT as SigLIP, GPT as Llama with as many
key-value heads as heads and a gated MLP of as many parameters. Each sample has two images of 1024 tokens, half of which
go on into a sequence of 2048 tokens. Costs are computed, not measured.
"""

from collections.abc import Mapping
from typing import Any

from motet.cluster import cluster_from_dict
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.data.sample import Sample, Segment
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.reproduce.optimus_published import HEAD_DIM, MODELS, SEQUENCE_LENGTH
from motet.workload import module_workload, with_projector

PATCHES_PER_SIDE = 32
VOCABULARY = 51200
"""Of Megatron-LM's GPT; the paper names none."""


def problems() -> list[tuple[str, PlanningProblem]]:
    return [
        (
            "ViT-3B + GPT-11B, 8 A100 (appendix C)",
            _problem("ViT-3B", "GPT-11B", device="a100", num_devices=8, batch=16, num_microbatches=8, dp_sizes=(1, 2)),
        ),
        (
            "ViT-11B + LLAMA-70B, 64 H100 (Model A)",
            _problem(
                "ViT-11B", "LLAMA-70B", device="h100", num_devices=64, batch=32, num_microbatches=8, dp_sizes=(2,)
            ),
        ),
    ]


def _problem(
    encoder: str,
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
    width = MODELS[llm].width
    workloads = {
        "vision": with_projector(module_workload(_vit(encoder)), "linear", width),
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
        edges=(Edge(source="vision", target="language_model"),),
        cluster=cluster,
        table=analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=tp_sizes),
        samples=tuple(_sample(i) for i in range(batch)),
        num_microbatches=num_microbatches,
        recompute=("vision", "language_model"),
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


def _sample(index: int) -> Sample:
    tokens = PATCHES_PER_SIDE**2
    image = Segment(tokens, num_outputs=tokens // 2, grid=(PATCHES_PER_SIDE, PATCHES_PER_SIDE))
    words = SEQUENCE_LENGTH - tokens
    return Sample(
        str(index),
        {
            "vision": (image, image),
            "language_model": (*[Segment(tokens // 2, source="vision")] * 2, Segment(words)),
        },
        {"language_model": words},
    )
