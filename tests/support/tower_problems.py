"""Small planning problems of towers of unequal work."""

from dataclasses import replace

from tiny_configs import EVERY_MODEL

from motet.assignment.sample import Sample, Segment
from motet.cluster import DEVICES, LINKS, Cluster
from motet.costs.analytic import analytic_table
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.shapes.module_shape import contrastive_loss, with_projector

CLUSTER = Cluster(
    num_devices=8,
    device=replace(DEVICES["v100-16"], memory_bytes=400e6),
    devices_per_node=4,
    within_node=LINKS["nvlink2"],
    between_nodes=LINKS["ethernet25"],
    nics_per_node=1,
)
CAPTIONS = {"hidden_size": 32, "is_decoder": True, "add_cross_attention": True}


def tower_problem(
    *,
    num_samples: int = 64,
    num_devices: int = 8,
    memory_bytes: float = 400e6,
    towers: int = 2,
    batch: int | None = None,
    latency_s: float = 4e-6,
    decoder: bool = False,
) -> PlanningProblem:
    """Small towers of unequal work: 145 tokens of an image, 16 of a text, 16 of another text. `decoder`: captions of 16
    tokens are written from the image's."""
    families = {"image": "clip", "text": "clip_text", "caption": "siglip_text"}
    names = list(families)[:towers]
    workloads = {
        name: with_projector(module_workload(EVERY_MODEL[families[name]][0], role="tower"), "linear", 32)
        for name in names
    }
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    workloads["loss"] = contrastive_loss(pairs, 32)
    layouts = {name: (Segment(16, num_outputs=1, grid=(16,)),) for name in names}
    layouts["image"] = (Segment(145, num_outputs=1, grid=(12, 12)),)
    edges = [Edge(source=name, target="loss") for name in names]
    if decoder:
        workloads["decoder"] = module_workload({**EVERY_MODEL["bert"][0].to_dict(), **CAPTIONS}, role="decoder")
        layouts["image"] = (Segment(145, num_outputs=146, grid=(12, 12)),)
        layouts["decoder"] = (Segment(16),)
        edges.append(Edge(source="image", target="decoder", layers=workloads["decoder"].blocks))
    cluster = replace(
        CLUSTER,
        num_devices=num_devices,
        device=replace(CLUSTER.device, memory_bytes=memory_bytes),
        within_node=replace(CLUSTER.within_node, latency_s=latency_s),
        between_nodes=replace(CLUSTER.between_nodes, latency_s=latency_s),
    )
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=((0, workload.num_layers),),
                loss_weight=float(name in ("loss", "decoder")),
                tp_sizes=(1, 2, 4),
                max_stages=3,
            )
            for name, workload in workloads.items()
        },
        edges=tuple(edges),
        cluster=cluster,
        table=analytic_table(workloads, cluster, tp_sizes=(1, 2, 4)),
        samples=tuple(Sample(str(i), layouts) for i in range(num_samples)),
        num_microbatches=4,
        contrastive_batch_size=batch,
    )
