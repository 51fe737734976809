"""DistTrain's models as planning problems: with layers, kernels, messages and memory, so that plans can be simulated.

ViT-Huge with a projector, a Llama 3 backbone and Stable Diffusion 2.1's U-Net on A800s, as `motet.reproduce.disttrain`
assumes them; here costs are motet's analytic ones instead of one efficiency for all kernels of a module.
"""

from collections.abc import Mapping

from motet.cluster import DEVICES, LINKS, Cluster
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.data.sample import Sample, Segment
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.reproduce.disttrain_models import ASSUMED, IMAGE_SIDE, SEQUENCE, backbone, unet, vit_huge
from motet.workload import ModuleWorkload, with_projector


def problems() -> list[tuple[str, PlanningProblem]]:
    """Small ones, to compare planners on."""
    return [
        ("MLLM-9B on 16 A800, global batch 32", problem("9B", 16, 32, 16, dp_sizes=(1, 2, 4))),
        ("MLLM-15B on 32 A800, global batch 64", problem("15B", 32, 64, 32, dp_sizes=(1, 2, 4))),
    ]


def problem(
    size: str, num_devices: int, global_batch_size: int, num_microbatches: int, *, dp_sizes: tuple[int, ...]
) -> PlanningProblem:
    """All modules trained; encoder and generator without tensor parallelism (section 8.1), everything recomputed."""
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
                trainable=((0, workload.num_layers),),
                loss_weight=float(name != "vision"),
                tp_sizes=tp_sizes[name],
            )
            for name, workload in workloads.items()
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
