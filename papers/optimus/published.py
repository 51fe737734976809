"""Published numbers of the Optimus paper (Feng et al. 2025): its tables, and the maxima of figures that its text
names."""

from typing import NamedTuple


class Model(NamedTuple):
    """A row of Table 8 or 9."""

    width: int
    depth: int
    parameters_per_layer: float


def _plain(width: int, depth: int) -> Model:
    """Four projections of attention and an MLP four times as wide."""
    return Model(width, depth, 12 * width**2)


MODELS = {
    "ViT-3B": _plain(2304, 48),
    "ViT-5B": _plain(3072, 48),
    "ViT-11B": _plain(4096, 48),  # Table 8 calls it ViT-10B
    "ViT-22B": _plain(6144, 48),
    "GPT-11B": _plain(3072, 80),
    # Grouped queries (8 of 64 heads) and a gated MLP of 28672, as in LLaMA-2's configuration; Table 9 names neither.
    "LLAMA-70B": Model(8192, 80, 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672),
    "GPT-175B": _plain(12288, 96),
}

HEAD_DIM = 128
"""Head dimension of all models in Tables 8 and 9."""
SEQUENCE_LENGTH = 2048
BATCH = 1536
"""Global batch of Tables 5 and 7."""
MICROBATCH_SIZE = 2

VIT_22B_LAYER_FORWARD_S, VIT_22B_LAYER_BACKWARD_S = 1.4e-3, 2.0e-3
"""Section 2.3."""
TENSOR_PARALLEL_BUBBLE_S = 300e-6
"""Section 2.2, GPT-175B."""

TABLE_1 = {
    "DP all-gather": (3.3, 0.167),
    "DP reduce-scatter": (8.9, 0.458),
    "PP warm-up": (5.0, 0.291),
    "PP cool-down": (9.2, 0.471),
    "PP other": (8.7, 0.445),
    "TP": (11.2, 0.585),
}
"""Percent of a step, and seconds."""
ALL_GATHER_S, REDUCE_SCATTER_S = TABLE_1["DP all-gather"][1], TABLE_1["DP reduce-scatter"][1]


class StrongScaling(NamedTuple):
    """A row of Table 5: ViT-22B + GPT-175B, global batch 1536; degrees from Table 12."""

    gpus: int
    dp: int
    num_microbatches: int
    megatron_s: float
    balanced_s: float
    optimus_s: float


TABLE_5 = (
    StrongScaling(1536, 24, 32, 10.65, 10.43, 9.80),
    StrongScaling(2048, 32, 24, 8.26, 8.06, 7.29),
    StrongScaling(3072, 48, 16, 5.91, 5.87, 4.87),
)


class Efficiency(NamedTuple):
    """A row of Table 7; its last row says 3172 GPUs."""

    gpus: int
    num_microbatches: int
    coarse: float
    fine: float
    runtime_s: float


TABLE_7 = (
    Efficiency(1536, 32, 0.343, 0.575, 322.2),
    Efficiency(2048, 24, 0.458, 0.693, 89.6),
    Efficiency(3072, 16, 0.687, 0.850, 15.1),
)

TABLE_10 = {"Alpa": 8.61, "FSDP": 3.20, "Megatron-LM": 3.42, "Megatron-LM balanced": 3.04, "Optimus": 2.78}
"""Seconds, ViT-3B + GPT-11B, 8 A100, global batch 16; Table 4 is the same table."""


class WeakScaling(NamedTuple):
    """A row of Tables 3, 6 and 11."""

    name: str
    encoders: tuple[str, ...]
    llm: str
    gpus: int
    batch: int
    dp: int
    pp: int
    num_chunks: int
    """Model chunks of Megatron-LM balanced."""


FIGURE_15 = (
    WeakScaling("Model A", ("ViT-11B",), "LLAMA-70B", 64, 32, 2, 4, 6),
    WeakScaling("Model B", ("ViT-22B",), "LLAMA-70B", 128, 64, 4, 4, 6),
    WeakScaling("Model C", ("ViT-11B",), "GPT-175B", 256, 128, 4, 8, 12),
    WeakScaling("Model D", ("ViT-22B",), "GPT-175B", 512, 256, 8, 8, 12),
)
FIGURE_15_MAX_OVER_MEGATRON, FIGURE_15_MAX_OVER_BALANCED = 1.22, 1.18

FIGURE_16 = (
    (WeakScaling("DualEnc(11B, 5B)", ("ViT-11B", "ViT-5B"), "GPT-175B", 512, 256, 8, 8, 12), 1.25),
    (WeakScaling("DualEnc(22B, 5B)", ("ViT-22B", "ViT-5B"), "GPT-175B", 512, 256, 8, 8, 12), 1.26),
    (WeakScaling("DualEnc(22B, 11B)", ("ViT-22B", "ViT-11B"), "GPT-175B", 512, 256, 8, 8, 12), 1.27),
)
"""Rows with the speedup over Megatron-LM."""
