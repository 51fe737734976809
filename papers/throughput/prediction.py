"""Predicts the step of a published row: its model and layout as a planning problem and a plan, simulated.

Rows without full sharding are simulated as they are. Of fully sharded ones one replica's computation is simulated, and
the gathers and scatters of parameters over all replicas are added in closed form, overlapped with the computation. A
chain of stages is cut as Megatron-LM cuts it: equally many blocks, the embedding with the first and the head with the
last, or equally many layers where only that is possible. Optimus' own rows are laid out by its planner.

Limits: selective recomputation, where a source names it, is charged as more seconds of each block's backward. The sums
of gradients of rows without full sharding are all-reduces, also where a distributed optimizer scatters them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from motet.assignment.sample import Sample, Segment
from motet.cluster import DEVICES, Cluster, Device, cluster_from_dict
from motet.costs.analytic import AnalyticCosts, analytic_table, default_speeds
from motet.costs.communication import collective_seconds
from motet.costs.cost_model import CostTable, LayerCost, ModuleCosts
from motet.costs.memory import MemoryOptions
from motet.costs.software import SOFTWARE, Software, with_unfused_attention
from motet.plan import Edge, LayerRange, Plan, Replica, Stage
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.partition import partition
from motet.planner.optimus.planner import optimus
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.shapes.diffusion import generator_workload
from motet.shapes.module_shape import LayerShape, ModuleWorkload, contrastive_loss, with_projector
from papers.shapes import as_tower, module_workload
from papers.throughput.published import Measurement, Sizes

NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "opa100x4": {"between_nodes": "infiniband100", "nics_per_node": 4},
    "infiniband": {"between_nodes": "infiniband200"},
    "": {"between_nodes": "infiniband200"},
}
"""Networks that are no link of the catalogue; rows without one lie on one node."""
NAMES: Mapping[str, str] = {"h100gt": "h100"}
"""Devices that are called otherwise; Grand Teton's H100 has slower memory and less power."""
IMAGE_TOKENS = 1024
"""Optimus: tokens of an image in its ViT, of which half go on."""
STABLE_DIFFUSION: Mapping[str, Any] = {"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768}
LATENT_SIDE = 64
CLIP_TOKENS = 77


@dataclass(frozen=True)
class Prediction:
    row: Measurement
    seconds: float
    compute_s: float
    """Seconds of one replica's computation, without the exchange between replicas."""
    evaluation: Evaluation

    @property
    def error(self) -> float:
        """Relative error of the step's time."""
        assert self.row.seconds is not None
        return self.seconds / self.row.seconds - 1


def predict(row: Measurement, device: Device | None = None, software: Software | None = None) -> Prediction:
    """`device`, `software`: None: those of the catalogue that the row names or implies."""
    device, software = device or device_of(row), software or software_of(row)
    problem = problem_of(row, device, software)
    plan = optimus(problem) if row.method == "optimus" else plan_of(row, problem)
    evaluation = evaluate(problem, plan)
    seconds = evaluation.iteration_time_s
    if not row.is_fully_sharded:
        return Prediction(row, seconds, seconds, evaluation)
    fixed_s = evaluation.costs.fixed_s
    compute_s = seconds - fixed_s
    exchange_s, first_s = _exchange_s(row, problem, cluster_of(row, device))
    total_s = max(compute_s, exchange_s) + software.contention * min(compute_s, exchange_s) + first_s
    return Prediction(row, total_s + fixed_s / row.dp, compute_s, evaluation)


def device_of(row: Measurement) -> Device:
    return DEVICES[NAMES.get(row.device, row.device)]


def software_of(row: Measurement) -> Software:
    """The row's profile; with the attention kernel that writes scores where the source says so."""
    profile = SOFTWARE[row.software]
    return with_unfused_attention(profile) if row.unfused_attention else profile


def _exchange_s(row: Measurement, problem: PlanningProblem, cluster: Cluster) -> tuple[float, float]:
    """Seconds of all gathers and scatters of a fully sharded row, and of the first gather, which nothing hides.

    Each layer is gathered twice a microbatch. Plain modules sum gradients after every microbatch, compiled ones after
    the last."""
    ranks = range(0, row.gpus, row.tp * row.cp)
    shapes = [module.workload for module in problem.modules.values()]
    parameters = sum(shape.num_parameters for shape in shapes) / row.tp
    trainable = sum(
        layer.num_parameters
        for module in problem.modules.values()
        for index, layer in enumerate(module.workload.layers)
        if module.is_trainable(index)
    )
    num_layers = sum(shape.num_layers for shape in shapes)
    gather_s = collective_seconds(cluster, "all_gather", ranks, 2 * parameters / num_layers)
    gradient_bytes = (row.grad_bytes or 4) * trainable / row.tp / num_layers
    scatter_s = collective_seconds(cluster, "reduce_scatter", ranks, gradient_bytes)
    num_scatters = row.num_microbatches if row.eager else 1
    return num_layers * (2 * row.num_microbatches * gather_s + num_scatters * scatter_s), gather_s


def cluster_of(row: Measurement, device: Device) -> Cluster:
    values = {
        "num_devices": row.gpus,
        "device": device.name,
        "devices_per_node": row.gpus_per_node,
        **NETWORKS.get(row.net, {"between_nodes": row.net}),
    }
    return replace(cluster_from_dict(values), device=device)


def problem_of(row: Measurement, device: Device, software: Software) -> PlanningProblem:
    """Returns the planning problem of a row; for a fully sharded row, that of one replica."""
    assert row.mbs is not None
    cluster = cluster_of(row, device)
    num_replicas = 1 if row.is_fully_sharded else row.dp
    if row.is_fully_sharded:
        cluster = replace(cluster, num_devices=row.tp * row.cp * row.pp)
    workloads, edges, sample = _model(row)
    # Optimus chooses its encoders' layout.
    tp_sizes = (1, 2, 4, 8) if row.method == "optimus" else tuple(sorted({1, row.tp}))
    dtype = "float8" if row.precision == "fp8" else "bfloat16"
    table = analytic_table(workloads, cluster, dtype=dtype, dtype_bytes=2, tp_sizes=tp_sizes, software=software)
    costs = AnalyticCosts(
        cluster=cluster,
        dtype=dtype,
        message_bytes=2,
        speeds=default_speeds(device, dtype, software),
        software=software,
    )
    num_microbatches = row.num_microbatches
    frozen = {"vision": row.enc_frozen, "language_model": row.llm_frozen, "text": row.unet}
    modules = {}
    for name, workload in workloads.items():
        last = workload.num_layers
        # The projector of a frozen encoder is trained.
        trainable = ((last - 1, last),) if name == "vision" and frozen[name] else ((0, last),)
        modules[name] = ModuleProblem(
            workload=workload,
            trainable=() if frozen.get(name) and name != "vision" else trainable,
            loss_weight=float(name in ("language_model", "unet", "contrastive")),
            tp_sizes=tp_sizes,
            cp_sizes=(row.cp,) if name == "language_model" else (1,),
        )
    return PlanningProblem(
        modules=modules,
        edges=edges,
        cluster=cluster,
        table=_with_recomputation(table, row.recompute, costs, workloads),
        samples=tuple(replace(sample, id=str(i)) for i in range(row.mbs * num_microbatches * num_replicas)),
        num_microbatches=num_microbatches,
        schedule="1f1b" if row.vp == 1 else "interleaved_1f1b",
        recompute=tuple(workloads) if row.recompute == "full" else (),
        memory=MemoryOptions(parameter_bytes=4, activation_bytes=2, zero1=bool(row.zero1) or bool(row.fsdp)),
        dp_sizes=(num_replicas,),
    )


def _model(row: Measurement) -> tuple[dict[str, ModuleWorkload], tuple[Edge, ...], Sample]:
    if row.towers:
        return _towers(row)
    if row.unet:
        return _diffusion()
    assert row.model is not None
    text = _decoder(row.model)
    if row.encoder is None:
        return {"language_model": text}, (), _sample({"language_model": (Segment(row.seq),)}, row.seq)
    vision, images, entering = _encoder(row)
    width = text.hidden_size
    workloads = {"vision": with_projector(vision, "mlp" if row.enc_frozen else "linear", width), "language_model": text}
    words = row.seq - len(images) * entering
    layout = (*(Segment(entering, source="vision", item=i) for i in range(len(images))), Segment(words))
    sample = _sample({"vision": images, "language_model": layout}, words)
    return workloads, (Edge(source="vision", target="language_model"),), sample


def _sample(layouts: Mapping[str, tuple[Segment, ...]], num_loss_tokens: int) -> Sample:
    return Sample("", dict(layouts), {"language_model": num_loss_tokens})


def _decoder(sizes: Sizes) -> ModuleWorkload:
    return module_workload(
        {
            "model_type": "llama" if sizes["gated"] else "gpt2",
            "hidden_size": sizes["hidden"],
            "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["kv_heads"],
            "intermediate_size": sizes["ff"],
            "num_hidden_layers": sizes["layers"],
            "vocab_size": sizes["vocab"],
        }
    )


def _encoder(row: Measurement) -> tuple[ModuleWorkload, tuple[Segment, ...], int]:
    """Shape, images and the tokens of each that enter the language model: those of LLaVA's CLIP, or Optimus'."""
    assert row.encoder is not None
    if row.enc_tokens == 577:
        image = Segment(577, num_outputs=576, grid=(24, 24))
        return module_workload(_vit(row.encoder, "clip_vision_model", 24)), (image,), 576
    num_images = row.enc_tokens // IMAGE_TOKENS
    image = Segment(IMAGE_TOKENS, num_outputs=IMAGE_TOKENS // 2, grid=(32, 32))
    images = tuple(replace(image, item=i) for i in range(num_images))
    return module_workload(_vit(row.encoder, "siglip_vision_model", 32)), images, IMAGE_TOKENS // 2


def _vit(sizes: Sizes, family: str, patches_per_side: int) -> Mapping[str, Any]:
    return {
        "model_type": family,
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "num_hidden_layers": sizes["layers"],
        "intermediate_size": sizes["ff"],
        "image_size": 14 * patches_per_side,
        "patch_size": 14,
        "vision_use_head": False,
    }


def _towers(row: Measurement) -> tuple[dict[str, ModuleWorkload], tuple[Edge, ...], Sample]:
    (vision, image_tokens), (text, _) = row.towers
    side = round((image_tokens - 1) ** 0.5)
    features = text["hidden"]
    image = module_workload(_vit(vision, "clip_vision_model", side))
    words = module_workload({**_vit(text, "clip_text_model", 1), "vocab_size": 49408})
    workloads = {
        "vision": as_tower(with_projector(image, "projection", features)),
        "text": as_tower(with_projector(words, "projection", features)),
        "contrastive": contrastive_loss([("vision", "text")], features),
    }
    layouts = {
        "vision": (Segment(image_tokens, num_outputs=1, grid=(side, side)),),
        "text": (Segment(CLIP_TOKENS, num_outputs=1, grid=(CLIP_TOKENS,)),),
    }
    edges = tuple(Edge(source=name, target="contrastive") for name in ("vision", "text"))
    return workloads, edges, Sample("", layouts, {})


def _diffusion() -> tuple[dict[str, ModuleWorkload], tuple[Edge, ...], Sample]:
    """Stable Diffusion at 512 x 512 behind a frozen text encoder; latents are taken to be computed before."""
    unet = generator_workload(STABLE_DIFFUSION)
    sizes = {"hidden": 768, "heads": 12, "layers": 12, "ff": 3072}
    text = module_workload({**_vit(sizes, "clip_text_model", 1), "vocab_size": 49408})
    layouts = {
        "text": (Segment(CLIP_TOKENS, grid=(CLIP_TOKENS,)),),
        "unet": (Segment(LATENT_SIDE**2),),
    }
    cross = next(i for i, layer in enumerate(unet.layers) if any(a.reads_encoder for a in layer.attentions))
    edge = Edge(source="text", target="unet", layers=(cross,))
    return {"text": text, "unet": unet}, (edge,), Sample("", layouts, {"unet": LATENT_SIDE**2})


def _with_recomputation(
    table: CostTable, recompute: str, costs: AnalyticCosts, workloads: Mapping[str, ModuleWorkload]
) -> CostTable:
    """Selective recomputation: what a block's backward computes once more of its forward."""
    if recompute in ("none", "full"):
        return table

    def more(layer: LayerShape, cost: LayerCost, tp: int) -> LayerCost:
        if recompute == "selective-attn":
            again = costs.attention(layer, tp_size=tp)
        else:
            again = cost.forward.times(SHARE_OF_FORWARD[recompute])
        return replace(cost, input_gradient=cost.input_gradient.plus(again)) if layer.part == "block" else cost

    def of_all(modules: Mapping[str, Mapping[int, ModuleCosts]]) -> dict[str, dict[int, ModuleCosts]]:
        return {
            name: {
                tp: replace(
                    module,
                    layers=tuple(
                        more(layer, cost, tp) for layer, cost in zip(workloads[name].layers, module.layers, strict=True)
                    ),
                )
                for tp, module in sizes.items()
            }
            for name, sizes in modules.items()
        }

    return replace(table, modules=of_all(table.modules), sequence_parallel=of_all(table.sequence_parallel))


SHARE_OF_FORWARD: Mapping[str, float] = {"selective-layer": 0.5, "selective-op": 0.5}
"""torchtitan: every second layer, or every second matrix product of a layer."""


def plan_of(row: Measurement, problem: PlanningProblem) -> Plan:
    if row.towers:
        layouts = {name: TowerLayout(degrees=Degrees(dp=row.dp), per_batch=1) for name in problem.towers}
        return tower_plan(problem, layouts, together=[problem.towers])
    num_replicas = 1 if row.is_fully_sharded else row.dp
    size, num_chunks = row.tp * row.cp, row.pp * row.vp
    runs = _runs(problem, row, num_chunks)

    def ranks(chunk: int, replica: int) -> tuple[int, ...]:
        first = ((chunk % row.pp) * num_replicas + replica) * size
        return tuple(range(first, first + size))

    modules = {}
    for name, module in problem.modules.items():
        replicas = [
            Replica(
                stages=tuple(
                    Stage(layers=layers, ranks=ranks(chunk, r), tp_size=row.tp, cp_size=row.cp)
                    for chunk, layers in runs[name]
                )
            )
            for r in range(num_replicas)
        ]
        modules[name] = module.planned(replicas, sequence_parallel=row.sp and row.tp > 1)
    return problem.plan(modules, planner="explicit")


def _runs(problem: PlanningProblem, row: Measurement, num_chunks: int) -> Mapping[str, list[tuple[int, LayerRange]]]:
    """For each module, its runs of layers and the chunk of the chain that each belongs to."""
    text = problem.modules.get("language_model")
    if text is None or num_chunks == 1:
        return {name: [(0, (0, module.workload.num_layers))] for name, module in problem.modules.items()}
    if len(problem.modules) == 1:
        return {"language_model": list(enumerate(_even(text.workload.num_blocks, num_chunks)))}
    costs = [
        (name, index, seconds)
        for name in problem.modules
        for index, seconds in enumerate(problem.estimator.layer_seconds(name, row.tp, row.dp))
    ]
    found: dict[str, list[tuple[int, LayerRange]]] = {name: [] for name in problem.modules}
    for chunk, (first, last) in enumerate(partition([seconds for *_, seconds in costs], num_chunks)):
        for name in problem.modules:
            own = [index for owner, index, _ in costs[first:last] if owner == name]
            if own:
                found[name].append((chunk, (own[0], own[-1] + 1)))
    return found


def _even(num_blocks: int, num_chunks: int) -> list[LayerRange]:
    total = num_blocks + 2
    if num_blocks % num_chunks and total % num_chunks == 0:
        sizes = [total // num_chunks] * num_chunks
    else:
        sizes = [num_blocks // num_chunks + (i < num_blocks % num_chunks) for i in range(num_chunks)]
        sizes[0] += 1
        sizes[-1] += 1
    bounds = list(accumulate(sizes, initial=0))
    return list(pairwise(bounds))
