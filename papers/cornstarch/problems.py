"""Cornstarch's models on its cluster as planning problems (table 1, section 6.1), for planners to be compared on.

EVA-CLIP is described as a CLIP vision model, Whisper and Llama 3.1 as they are; where table 1 gives no MLP, it is four
times the width (Llama's own for the medium size), heads are 64 wide in Whisper, 128 in Llama and EVA-CLIP's large ones.
A sample has 1000 text tokens, an image of 1196 tokens and 30 s of sound, which are 1500 tokens. Everything but the
projectors is frozen; 24 microbatches of one sample. Costs are computed, not measured.
"""

from collections.abc import Mapping
from typing import Any

from motet.assignment.sample import Sample, Segment
from motet.cluster import Cluster, cluster_from_dict
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import ModuleWorkload, with_projector
from papers.shapes import module_workload

VISION: Mapping[str, tuple[int, int, int]] = {"S": (40, 1408, 16), "M": (32, 4096, 32), "L": (48, 5120, 40)}
AUDIO: Mapping[str, tuple[int, int, int]] = {"S": (32, 1920, 30), "M": (40, 3840, 60), "L": (48, 5120, 80)}
LLM: Mapping[str, tuple[int, int, int, int]] = {
    "S": (16, 2048, 32, 8192),
    "M": (32, 4096, 32, 14336),
    "L": (64, 5120, 40, 27648),
}
"""Table 1: layers and width; heads, and the language model's MLP."""
GRID = (26, 46)
"""Patches of 28 pixels in an image of 1280 x 720."""
NUM_FRAMES, NUM_SOUND_TOKENS, NUM_TEXT_TOKENS = 3000, 1500, 1000
NUM_DEVICES, NUM_SAMPLES = 24, 24


SIZES: Mapping[str, str] = {"S": "small", "M": "medium", "L": "large"}


def problems() -> list[tuple[str, PlanningProblem]]:
    """Every model that the paper evaluates: Figures 9 and 10, appendix B."""
    one = [f"{kind}-{size}" for kind in ("VLM", "ALM") for size in SIZES]
    models = [*one, *(f"VALM-{vision}{audio}" for vision in SIZES for audio in SIZES)]
    return [
        (f"{model} with the {size} LLM, {NUM_DEVICES} A40", problem(model, llm=llm))
        for llm, size in SIZES.items()
        for model in models
    ]


def problem(model: str, *, llm: str = "M", num_devices: int = NUM_DEVICES) -> PlanningProblem:
    """`model`: as the paper writes it, like VALM-SL (small vision, large audio)."""
    kinds, sizes = model.split("-")
    encoders = dict(
        zip([name for name, letter in (("vision", "V"), ("audio", "A")) if letter in kinds], sizes, strict=True)
    )
    workloads = _workloads(encoders, llm)
    cluster = a40_cluster(num_devices)
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=() if name == "language_model" else ((workload.num_layers - 1, workload.num_layers),),
                loss_weight=float(name == "language_model"),
                tp_sizes=(1, 2, 4),
            )
            for name, workload in workloads.items()
        },
        edges=tuple(Edge(source=name, target="language_model") for name in encoders),
        cluster=cluster,
        table=analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=(1, 2, 4)),
        samples=tuple(_sample(i, encoders) for i in range(NUM_SAMPLES)),
        num_microbatches=NUM_SAMPLES,
        memory=MemoryOptions(parameter_bytes=4, activation_bytes=2),
    )


def a40_cluster(num_devices: int) -> Cluster:
    """Nodes of four A40s, pairs of which have NVLink; a link has one speed here, PCI Express's, which four need."""
    return cluster_from_dict(
        {
            "num_devices": num_devices,
            "devices_per_node": 4,
            "device": "a40",
            "within_node": "pcie4",
            "between_nodes": "infiniband200",
        }
    )


def _workloads(encoders: Mapping[str, str], llm: str) -> dict[str, ModuleWorkload]:
    layers, width, heads, inner = LLM[llm]
    language_model = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128256,
    }
    configs: dict[str, dict[str, Any]] = {}
    if "vision" in encoders:
        layers, size, heads = VISION[encoders["vision"]]
        configs["vision"] = {
            "model_type": "clip_vision_model",
            "num_hidden_layers": layers,
            "hidden_size": size,
            "num_attention_heads": heads,
            "intermediate_size": 4 * size,
            "image_size": 28 * GRID[1],
            "patch_size": 28,
        }
    if "audio" in encoders:
        layers, size, heads = AUDIO[encoders["audio"]]
        configs["audio"] = {
            "model_type": "whisper",
            "encoder_layers": layers,
            "d_model": size,
            "encoder_attention_heads": heads,
            "encoder_ffn_dim": 4 * size,
        }
    workloads = {name: with_projector(module_workload(config), "linear", width) for name, config in configs.items()}
    return {**workloads, "language_model": module_workload(language_model)}


def _sample(index: int, encoders: Mapping[str, str]) -> Sample:
    layouts: dict[str, tuple[Segment, ...]] = {}
    text = []
    num_patches = GRID[0] * GRID[1]
    if "vision" in encoders:
        layouts["vision"] = (Segment(num_patches, grid=GRID),)
        text.append(Segment(num_patches, source="vision"))
    if "audio" in encoders:
        layouts["audio"] = (Segment(NUM_SOUND_TOKENS, num_outputs=NUM_SOUND_TOKENS, grid=(NUM_FRAMES,)),)
        text.append(Segment(NUM_SOUND_TOKENS, source="audio"))
    layouts["language_model"] = (*text, Segment(NUM_TEXT_TOKENS))
    return Sample(f"{index}", layouts, {"language_model": NUM_TEXT_TOKENS})
