"""DistMM's models and machines as planning problems: Table 2, 8 p3.16xlarge (section 7), and how fast a V100 is.

What the paper leaves out, and what is assumed instead:

* Mixed precision (`Assumed`): 2 bytes for a parameter and 2 for its gradient, 12 for a float32 copy and both moments.
  The 12 are shared by data-parallel ranks, as Megatron-LM's distributed optimizer does: else CLIP of 1.1 B parameters
  would not fit onto one V100, nor CoCa of 26 B into the 16 partitions that section 7.1 gives it.
* Patches of 14 pixels (577 tokens an image), CLIP's vocabulary, MLPs of four times the width, features of 512, heads
  that all degrees of tensor parallelism in the paper divide. Hidden size 5140 is not divisible by 8: 5120.

**The V100.** A matrix product takes `overhead + work / (limit x peak)` (`motet.costs.analytic`). Neither is
fitted to DistMM's bars. The overhead comes from products that DeepBench measured on "Tesla V100 Mixed Precision" (its
README; the one whose width no tensor core takes is left out). The limit is the one with which Megatron-LM trains a
model of 350 M parameters as fast as it did on one GPU of the same machine, a p3.16xlarge: `ALPA`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from scipy.optimize import brentq

from motet.assignment.sample import Sample, Segment
from motet.cluster import DEVICES, LINKS, Cluster
from motet.costs.analytic import Speed, Speeds, analytic_table, default_speeds, layer_flops
from motet.costs.cost_model import LayerCost, Load
from motet.costs.memory import MemoryOptions
from motet.costs.software import SOFTWARE
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import ModuleWorkload, contrastive_loss, with_projector
from papers.shapes import as_tower, module_workload

NUM_DEVICES, DEVICES_PER_NODE = 64, 8
IMAGE_SIDE, PATCH, WORDS, FEATURE_SIZE = 336, 14, 77, 512

MEASURED_PRODUCTS: Mapping[tuple[int, int, int], float] = {
    (1760, 128, 1760): 10.72e12,
    (7860, 64, 2560): 25.94e12,
    (2560, 64, 2560): 10.11e12,
    (3072, 128, 1024): 18.73e12,
}
"""(m, n, k): FLOPs per second."""


@dataclass(frozen=True)
class Training:
    """Megatron-LM trains a GPT of 16 heads on sequences of 1024 tokens, on one V100, recomputing activations."""

    layers: int
    hidden_size: int
    sequences: int
    """A microbatch."""
    utilization: float
    """FLOPs, recomputed ones too, over peak and time."""


ALPA = Training(24, 1024, 16, utilization=47.53 / 125)
"""Alpa's artifact for OSDI 2022, github.com/alpa-projects/alpa: osdi22_artifact/results_e2e.tsv (47.53 teraFLOPs a
second) and megatron/benchmark_gpt.py."""
MEGATRON_2019 = Training(40, 1536, 8, utilization=0.30)
"""Shoeybi et al. 2019, on a DGX-2H."""
MEGATRON_1_0 = replace(MEGATRON_2019, utilization=0.48)
"""The same with more fused kernels: nv-adlr.github.io/MegatronLMV1."""


@dataclass(frozen=True)
class Assumed:
    """Assumptions where the paper says nothing, for both systems."""

    training: Training = ALPA
    """How fast a V100 is."""
    optimizer_bytes: int = 12
    """Kept by the optimizer for each parameter."""
    shared: bool = True
    """Whether data-parallel ranks share the optimizer's state."""


ASSUMED = Assumed()


@dataclass(frozen=True)
class TowerSize:
    """A row of Table 2."""

    layers: int
    hidden_size: int
    heads: int


SIZES: Mapping[str, TowerSize] = {
    "350M": TowerSize(24, 1024, 16),
    "760M": TowerSize(24, 1536, 16),
    "2.7B": TowerSize(32, 2560, 32),
    "6.7B": TowerSize(32, 4096, 32),
    "13B": TowerSize(40, 5120, 32),
}

SCALES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "single device": {"CLIP": ("760M", "350M"), "CoCa": ("760M", "760M"), "LiT": ("350M", "760M")},
    "single node": {"CLIP": ("6.7B", "2.7B"), "CoCa": ("6.7B", "6.7B"), "LiT": ("2.7B", "6.7B")},
    "multi-node": {"CLIP": ("13B", "6.7B"), "CoCa": ("13B", "13B"), "LiT": ("6.7B", "13B")},
}
"""(vision, text)."""


def cluster() -> Cluster:
    """Section 7: NVLink within, 25 Gbit/s between the nodes, which all GPUs of a node share."""
    return Cluster(
        num_devices=NUM_DEVICES,
        device=DEVICES["v100-16"],
        devices_per_node=DEVICES_PER_NODE,
        within_node=LINKS["nvlink2"],
        between_nodes=LINKS["ethernet25"],
        nics_per_node=1,
    )


@cache
def v100_speeds(training: Training = ALPA) -> Speeds:
    """Speeds of kernels with which a V100 trains as fast as measured."""
    device = DEVICES["v100-16"]
    peak, assumed = device.peak("float16"), default_speeds(device, "float16", SOFTWARE["megatron"])

    def speeds(limit: float) -> Speeds:
        excess = [2.0 * m * n * k * (1 / rate - 1 / (limit * peak)) for (m, n, k), rate in MEASURED_PRODUCTS.items()]
        product = Speed(limit=limit, overhead_s=sum(excess) / len(excess))
        share = assumed.attention.limit / assumed.gemm.limit
        attention = replace(product, limit=limit * share)
        return Speeds(gemm=product, convolution=product, attention=attention, memory=assumed.memory, source=__name__)

    def too_fast(limit: float) -> float:
        return utilization(speeds(limit), training) - training.utilization

    return speeds(brentq(too_fast, 0.2, 1.0))


def utilization(speeds: Speeds, training: Training) -> float:
    """Utilization that these speeds give."""
    size, sequences = training.hidden_size, training.sequences
    body = {
        "hidden_size": size,
        "intermediate_size": 4 * size,
        "num_hidden_layers": training.layers,
        "num_attention_heads": 16,
    }
    model = {"gpt": module_workload({"model_type": "clip_text_model", **body})}
    load = Load(tokens=sequences * 1024, pairs=sequences * 1024**2, sequences=sequences)
    (costs,) = (
        analytic_table(model, cluster(), dtype="float16", dtype_bytes=2, speeds=speeds, software=SOFTWARE["megatron"])
        .modules["gpt"]
        .values()
    )

    def step(layers: Iterable[LayerCost]) -> float:
        return sum(
            2 * layer.forward.seconds(load)
            + layer.passes(input_gradient=True, weight_gradient=True).backward.seconds(load)
            for layer in layers
        )

    flops = step(map(layer_flops, model["gpt"].layers))
    return flops / step(costs.layers) / DEVICES["v100-16"].peak("float16")


def tower(modality: str, size: str) -> ModuleWorkload:
    shape = SIZES[size]
    body = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
    }
    if modality == "vision":
        config = {"model_type": "clip_vision_model", "image_size": IMAGE_SIDE, "patch_size": PATCH, **body}
    else:
        config = {"model_type": "clip_text_model", "max_position_embeddings": WORDS, **body}
    return as_tower(with_projector(module_workload(config), "linear", FEATURE_SIZE))


@cache
def problem(
    vision: str, text: str, global_batch_size: int, *, recompute: bool = False, assumed: Assumed = ASSUMED
) -> PlanningProblem:
    """A model of Table 2, by the sizes of its towers, on the 64 GPUs."""
    towers = {"vision": tower("vision", vision), "text": tower("text", text)}
    workloads = {**towers, "loss": contrastive_loss([("vision", "text")], FEATURE_SIZE)}
    side = IMAGE_SIDE // PATCH
    layouts = {
        "vision": (Segment(1 + side**2, num_outputs=1, grid=(side, side)),),
        "text": (Segment(WORDS, num_outputs=1, grid=(WORDS,)),),
    }
    machines = cluster()
    table = analytic_table(
        workloads,
        machines,
        dtype="float16",
        dtype_bytes=2,
        tp_sizes=(1, 2, 4, 8, 16),
        speeds=v100_speeds(assumed.training),
        software=SOFTWARE["megatron"],
    )
    memory = MemoryOptions(
        parameter_bytes=2, activation_bytes=2, zero1=assumed.shared, optimizer_bytes=assumed.optimizer_bytes
    )
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=((0, workload.num_layers),),
                loss_weight=float(name == "loss"),
                tp_sizes=(1, 2, 4, 8),
                max_stages=8,
            )
            for name, workload in workloads.items()
        },
        edges=tuple(Edge(source=name, target="loss") for name in towers),
        cluster=machines,
        table=table,
        samples=tuple(Sample(str(i), layouts) for i in range(global_batch_size)),
        num_microbatches=1,
        recompute=tuple(towers) if recompute else (),
        memory=memory,
    )
