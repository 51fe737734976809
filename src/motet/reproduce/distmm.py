"""DistMM's Figures 7 to 10 beside ours: its iteration times, GPU utilization and communication against Megatron-LM.

The bars carry no numbers; what is published are the ranges in section 7.1 and some sizes in section 7.2. Ours come from
simulated plans (`motet.reproduce.distmm_systems`) on the models and machines of `motet.reproduce.distmm_models`.
Nothing is fitted to DistMM's numbers.

What decides is the global batch, which the paper does not give. At 25 Gbit/s between nodes the sum of gradients takes
longer than the computation of the batches that fit into 16 GB, so the speedup comes near the ratio of what is summed
(CoCa: 2), and falls as the batch grows; it rises where Megatron-LM's tensor parallelism crosses nodes. The second table
shows what larger steps would change.
"""

from collections.abc import Sequence
from itertools import chain

from motet.planner.problem import PlanningProblem
from motet.reproduce.distmm_models import SCALES
from motet.reproduce.distmm_systems import (
    Outcome,
    Setting,
    accumulated,
    distmm_outcome,
    megatron_outcome,
    own_outcome,
    separated_outcome,
    setting,
)
from motet.reproduce.tables import Row, Table

__all__ = ["problems", "tables"]

PUBLISHED_SPEEDUPS = {"single device": (1.32, 1.39), "single node": (1.48, 1.67), "multi-node": (None, 3.27)}
PUBLISHED_REPLICAS = {"CLIP": (60, 4), "CoCa": (48, 16)}
"""(vision, text) at single-device scale, section 7.2.2. CLIP's follow from its batches: 10 and 150 samples a replica, 8
without DistMM, on 64 GPUs."""

ACCUMULATED = (1, 2, 4, 8)
CALIBRATED = "nothing"
ASSUMPTIONS = (
    "8 bytes a parameter; one batch for both systems: 512 (8 a GPU, as CLIP has them) at single-device scale, else the "
    "most samples a replica that fit Megatron-LM; activations recomputed where nothing fits otherwise and "
    "beyond one device; gradients summed after the backward; DistMM's partitions leave half of the memory free"
)


def problems() -> Sequence[tuple[str, PlanningProblem]]:
    """Every model at its scale, as a planning problem."""
    return [(_name(each), each.problem) for each in _settings()]


def tables() -> Sequence[Table]:
    return [
        _speedups(),
        _accumulated(),
        _replicas(),
        _utilization("single node", "8"),
        _utilization("single device", "9"),
        _communication(),
    ]


def _settings(scale: str | None = None) -> list[Setting]:
    return [setting(each, model) for each in (SCALES if scale is None else [scale]) for model in SCALES[each]]


def _name(each: Setting) -> str:
    return f"{each.model}({each.vision}, {each.text})"


def _row(what: str, published: float | None, ours: float) -> Row:
    return Row(what, published, ours, CALIBRATED, published is not None, ASSUMPTIONS)


def _speedups() -> Table:
    rows: list[Row] = []
    for scale, (lowest, highest) in PUBLISHED_SPEEDUPS.items():
        settings = _settings(scale)
        megatron = [megatron_outcome(each).iteration_s for each in settings]
        speedups = [slow / distmm_outcome(each).iteration_s for slow, each in zip(megatron, settings, strict=True)]
        own = [slow / own_outcome(each).iteration_s for slow, each in zip(megatron, settings, strict=True)]
        if lowest is not None:
            rows.append(_row(f"{scale}, lowest speedup", lowest, min(speedups)))
        rows.append(_row(f"{scale}, highest speedup", highest, max(speedups)))
        for each, speedup, of_own in zip(settings, speedups, own, strict=True):
            rows.append(_row(f"  {_name(each)}, batch {each.batch}", None, speedup))
            rows.append(_row("    motet's own plan", None, of_own))
    return Table(
        "Figure 7: speedup over Megatron-LM",
        tuple(rows),
        "The paper does not give its batches. At single-node scale a larger one lowers the speedup, as computation "
        "gains on the sum of gradients: ours is highest, and beyond the published range, for CoCa(6.7B, 6.7B), whose "
        "parameters leave Megatron-LM memory for 7 samples a replica. At multi-node scale a larger one raises it: the "
        "next table. motet's own plan takes fewer replicas where summing gradients costs more than they bring, which "
        "DistMM's balancer does not see.",
    )


def _accumulated() -> Table:
    rows = []
    for scale, model in (("single node", "CoCa"), ("multi-node", "CLIP")):
        each = setting(scale, model)
        for number in ACCUMULATED:
            longer = accumulated(each, number)
            speedup = megatron_outcome(longer).iteration_s / distmm_outcome(longer).iteration_s
            rows.append(_row(f"{_name(each)}, {number} x {each.batch} samples", None, speedup))
    return Table(
        "Figure 7, if gradients are summed once for several contrastive batches (published: no numbers)",
        tuple(rows),
        "What the highest speedups at the larger scales depend on. Computation gains on the sum of gradients as steps "
        "grow: DistMM computes the first model's as fast as Megatron-LM, so its speedup falls; the second one's "
        "without tensor parallelism over the network, so its speedup rises. Both published figures lie within, at "
        "different numbers of samples.",
    )


def _replicas() -> Table:
    rows = []
    for model, published in PUBLISHED_REPLICAS.items():
        each = setting("single device", model)
        modules = distmm_outcome(each).evaluation.plan.modules
        for tower, number in zip(("vision", "text"), published, strict=True):
            rows.append(_row(f"{_name(each)}, replicas of {tower}", number, len(modules[tower].replicas)))
    return Table(
        "Section 7.2.2: replicas that the load balancer gives each tower",
        tuple(rows),
        "Ours balances computation alone, as the paper says it does, and so gives CoCa's text tower fewer replicas: 77 "
        "of its tokens stand against 577 of an image. The paper's 16 and 48 are whole nodes.",
    )


def _utilization(scale: str, figure: str) -> Table:
    """Of towers: model FLOPs over peak and the time that their devices compute them."""
    rows = []
    for each in _settings(scale):
        for tower in ("vision", "text"):
            for system, outcome in (("Megatron-LM", megatron_outcome(each)), ("DistMM", distmm_outcome(each))):
                rows.append(_row(f"{_name(each)}, {tower}, {system}", None, outcome.utilization(tower)))
    return Table(
        f"Figure {figure}: GPU utilization by tower, {scale} scale (shape only: the bars carry no numbers)",
        tuple(rows),
        "As in the paper, text towers gain most: their kernels are small under Megatron-LM.",
    )


def _communication() -> Table:
    rows = []
    for each in _settings("single device"):
        systems: Sequence[tuple[str, Outcome]] = (
            ("Megatron-LM", megatron_outcome(each)),
            ("placed, not balanced", separated_outcome(each)),
        )
        rows.append([_row(f"{_name(each)}, {system}", None, out.communication_share) for system, out in systems])
    return Table(
        "Figure 10: share of communication in the iteration (shape only: the bars carry no numbers)",
        tuple(chain.from_iterable(rows)),
        "As in the paper, placing towers apart lowers it, and most for CoCa, whose towers are of equal size.",
    )
