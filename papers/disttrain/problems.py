"""DistTrain's models as planning problems: with layers, kernels, messages and memory, so that plans can be simulated.

ViT-Huge with a projector, a Llama 3 backbone and Stable Diffusion 2.1's U-Net on A800s, as `papers.disttrain.tables`
assumes them; here costs are motet's analytic ones instead of one efficiency for all kernels of a module. Clusters,
batches and what is frozen are those of Figures 15 to 20; the paper prints neither microbatches nor data parallelism.
"""

from collections.abc import Iterator, Mapping

from motet.assignment.sample import Sample, Segment
from motet.cluster import DEVICES, LINKS, Cluster
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.plan import Edge, LayerRange
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import ModuleWorkload, with_projector
from papers.disttrain.models import (
    ASSUMED,
    FROZEN_SETTINGS,
    IMAGE_SIDE,
    SEQUENCE,
    TRAINED,
    Passes,
    backbone,
    unet,
    vit_huge,
)
from papers.disttrain.systems import LARGE, SMALL

LARGE_REPLICAS: Mapping[str, tuple[int, ...]] = {
    "9B": (24, 48, 80, 96, 160),
    "15B": (24, 48, 80, 96, 160),
    "72B": (16, 24, 32, 48),
}
SMALL_REPLICAS: Mapping[str, tuple[int, ...]] = {"9B": (2, 4, 8, 16), "15B": (2, 4, 8, 16), "72B": (1, 2, 4)}
"""Data parallelism that planners may choose: divisors of the batch. The fewest have microbatches of one sample."""


def problems() -> list[tuple[str, PlanningProblem]]:
    """Two small ones, and those of Figures 15 to 20."""
    return [
        ("MLLM-9B on 16 A800, global batch 32", problem("9B", 16, 32, 16, dp_sizes=(1, 2, 4))),
        ("MLLM-15B on 32 A800, global batch 64", problem("15B", 32, 64, 32, dp_sizes=(1, 2, 4))),
        *_of_figures(SMALL, SMALL_REPLICAS, "everything trained", TRAINED),
        *(each for setting in FROZEN_SETTINGS.items() for each in _of_figures(SMALL, SMALL_REPLICAS, *setting)),
        *_of_figures(LARGE, LARGE_REPLICAS, "everything trained", TRAINED),
    ]


def _of_figures(
    cluster: tuple[int, Mapping[str, int]], replicas: Mapping[str, tuple[int, ...]], setting: str, passes: Passes
) -> Iterator[tuple[str, PlanningProblem]]:
    num_devices, batches = cluster
    for size, batch in batches.items():
        num_microbatches, dp_sizes = batch // replicas[size][0], replicas[size]
        found = problem(size, num_devices, batch, num_microbatches, dp_sizes=dp_sizes, passes=passes)
        yield f"MLLM-{size} on {num_devices} A800, global batch {batch}, {setting}", found


def problem(
    size: str,
    num_devices: int,
    global_batch_size: int,
    num_microbatches: int,
    *,
    dp_sizes: tuple[int, ...],
    passes: Passes = TRAINED,
) -> PlanningProblem:
    """`passes`: of encoder, language model and generator; three where it is trained. The projector always is. Encoder
    and generator without tensor parallelism (section 8.1), everything recomputed."""
    text = backbone(size)
    workloads: Mapping[str, ModuleWorkload] = {
        "vision": with_projector(vit_huge(), "mlp", text.hidden_size),
        "language_model": text,
        "image": unet(),
    }
    cluster = Cluster(
        num_devices=num_devices,
        device=DEVICES["a800"],
        devices_per_node=8,
        within_node=LINKS["nvlink-a800"],
        between_nodes=LINKS["roce200"],
        nics_per_node=4,
    )
    tp_sizes = {"vision": (1,), "language_model": (1, 2, 4, 8), "image": (1,)}
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=_trainable(name, workload, trained=num_passes == 3),
                loss_weight=float(name != "vision"),
                tp_sizes=tp_sizes[name],
            )
            for (name, workload), num_passes in zip(workloads.items(), passes, strict=True)
        },
        edges=(Edge(source="vision", target="language_model"), Edge(source="language_model", target="image")),
        cluster=cluster,
        table=analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=(1, 2, 4, 8)),
        samples=tuple(_sample(size, i) for i in range(global_batch_size)),
        num_microbatches=num_microbatches,
        recompute=tuple(workloads),
        memory=MemoryOptions(parameter_bytes=4, activation_bytes=2, zero1=True),
        dp_sizes=dp_sizes,
    )


def _trainable(name: str, workload: ModuleWorkload, *, trained: bool) -> tuple[LayerRange, ...]:
    if trained:
        return ((0, workload.num_layers),)
    return ((workload.num_layers - 1, workload.num_layers),) if name == "vision" else ()


def _sample(size: str, index: int) -> Sample:
    """First its images, then text, 8192 tokens together; each image is made again by the generator."""
    images, side, latents = range(ASSUMED.images), ASSUMED.encoded_side // 16, (IMAGE_SIDE[size] // 8) ** 2
    num_text_tokens = SEQUENCE - len(images) * side**2
    return Sample(
        str(index),
        {
            "vision": tuple(Segment(1 + side**2, item=i, num_outputs=side**2, grid=(side, side)) for i in images),
            "language_model": (
                *(Segment(side**2, source="vision", item=i) for i in images),
                Segment(num_text_tokens),
            ),
            "image": tuple(Segment(latents, item=i) for i in images),
        },
        {"language_model": num_text_tokens, "image": len(images) * latents},
    )
