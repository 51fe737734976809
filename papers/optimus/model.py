"""Optimus' cluster and models as kernels, with two constants fitted to the Megatron-LM balanced rows of Table 5.

The constants: the rate at which the language model's layers compute (FLOP/s of a GPU), and the seconds of data
parallelism for each parameter that a GPU holds. All else is the paper's or follows from shapes:

* a GPT-175B layer's communications take 300 us each, two all-gathers and two reduce-scatters in each direction (2.2);
  others in proportion to tokens and width;
* a ViT-22B layer takes 1.4 ms forward and 2.0 ms backward (2.3), for a microbatch of 2 x 2048 tokens at TP 8; other
  ViTs compute at the rates that follow from it;
* data parallelism divides into all-gather and reduce-scatter as in Table 1;
* "estimated based on FLOPs" (appendix B): balanced stages are cut by FLOPs.

Left out, as in the paper's own account: embeddings, output head, projector; and in Optimus the encoders' own
data-parallel collectives (section 2.2: those of the first model chunk alone are not hidden), though an encoder that
computes during the language model's all-gather needs its own parameters before. `optimus_with_collectives` counts them,
and a table of its own shows what comes of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

from motet.planner.layouts.partition import partition
from motet.planner.optimus.bubbles import BubbleSchedule, EncoderPipelines, can_take_less, schedule_bubbles
from motet.planner.optimus.timeline import Kernel, Kernels, LlmPipeline, LlmTimeline, llm_timeline
from papers.optimus import published as paper
from papers.optimus.published import MODELS, Model

BALANCED = "rate of the GPUs and seconds of data parallelism: Megatron-LM balanced rows of Table 5"
KERNELS = "ViT-22B layers and tensor-parallel bubbles as in sections 2.2 and 2.3; no embeddings, no head"
WITHOUT_COLLECTIVES = "data parallelism by the language model's parameters on a GPU (section 2.2)"
"""For the rows: what was fitted, and what is assumed."""

STATE_BYTES_PER_PARAMETER = 6
"""Section 4.5: bf16 parameters, fp32 gradients, the optimizer distributed."""
ACTIVATION_BYTES = 34
"""Activation bytes of a layer, per token and unit of width, without scores (Korthikanti et al. 2022, section 4.1)."""
GPU_BYTES = 80e9
ALL_GATHER_SHARE = paper.ALL_GATHER_S / (paper.ALL_GATHER_S + paper.REDUCE_SCATTER_S)
ATTENTION_SHARES, MLP_SHARES = (0.26, 0.06, 0.08), (0.3, 0.3)
"""Shares of a layer's computation: projections in, scores and values, projection out; the MLP's two linears."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One experiment: which models, and how the language model is laid out."""

    encoders: tuple[Model, ...]
    llm: Model
    dp: int
    pp: int
    tp: int = 8
    num_chunks: int = 1
    num_microbatches: int
    tokens: int = paper.MICROBATCH_SIZE * paper.SEQUENCE_LENGTH
    """Tokens of a microbatch in each model."""

    @property
    def reduced_share(self) -> float:
        """Share of data parallelism's time with very many replicas."""
        return (self.dp - 1) / self.dp


@dataclass(frozen=True, kw_only=True)
class Constants:
    flops_per_s: float
    """FLOP/s of the language model's kernels on one GPU."""
    encoder_flops_per_s: tuple[float, float]
    """FLOP/s of the encoders' kernels, forward and backward."""
    reduction_s_per_parameter: float
    """All-gather and reduce-scatter together, for each parameter on a GPU and very many replicas."""
    communication_s: float
    """Seconds of one tensor-parallel collective, per token and unit of width, in a very large group."""


@dataclass(frozen=True)
class Layer:
    forward: Kernels
    backward: Kernels


def layer_flops(model: Model, tokens: float = 1.0) -> float:
    """FLOPs of one layer's forward, on all GPUs."""
    return tokens * (2 * model.parameters_per_layer + 4 * model.width * paper.SEQUENCE_LENGTH)


def parameters(models: Iterable[Model]) -> float:
    return sum(model.parameters_per_layer * model.depth for model in models)


def hopper(flops_per_s: float, reduction_s_per_parameter: float) -> Constants:
    """The large cluster, as sections 2.2 and 2.3 describe it."""
    case = strong_scaling(16)
    group = (case.tp - 1) / case.tp
    communication_s = paper.TENSOR_PARALLEL_BUBBLE_S / (case.tokens * case.llm.width * group)
    (vit,) = case.encoders
    communicates_s = 4 * communication_s * case.tokens * vit.width * group
    flops = layer_flops(vit, case.tokens) / case.tp
    return Constants(
        flops_per_s=flops_per_s,
        encoder_flops_per_s=(
            flops / (paper.VIT_22B_LAYER_FORWARD_S - communicates_s),
            2 * flops / (paper.VIT_22B_LAYER_BACKWARD_S - communicates_s),
        ),
        reduction_s_per_parameter=reduction_s_per_parameter,
        communication_s=communication_s,
    )


def strong_scaling(num_microbatches: int) -> Setting:
    """The setting of Tables 5 and 7."""
    return Setting(
        encoders=(MODELS["ViT-22B"],),
        llm=MODELS["GPT-175B"],
        dp=paper.BATCH // paper.MICROBATCH_SIZE // num_microbatches,
        pp=8,
        num_chunks=12,
        num_microbatches=num_microbatches,
    )


def llm_layer(case: Setting, constants: Constants) -> Layer:
    rates = (constants.flops_per_s, constants.flops_per_s)
    return _layer(case.llm, case.tokens, case.tp, rates, constants)


def encoder_layer(model: Model, case: Setting, constants: Constants, tp: int | None = None) -> Layer:
    return _layer(model, case.tokens, tp or case.tp, constants.encoder_flops_per_s, constants)


def _layer(model: Model, tokens: int, tp: int, rates: tuple[float, float], constants: Constants) -> Layer:
    """Attention and MLP, each between an all-gather and a reduce-scatter."""
    seconds = constants.communication_s * tokens * model.width * (tp - 1) / tp
    collective = (Kernel(seconds, True),) if seconds else ()
    directions = []
    for compute_s in (layer_flops(model, tokens) / tp / rates[0], 2 * layer_flops(model, tokens) / tp / rates[1]):
        attention, mlp = (
            tuple(Kernel(compute_s * share) for share in shares) for shares in (ATTENTION_SHARES, MLP_SHARES)
        )
        directions.append(collective + attention + collective + collective + mlp + collective)
    return Layer(*directions)


# Baselines ------------------------------------------------------------------------------------------------------------


def balanced(case: Setting, constants: Constants) -> LlmTimeline:
    """Megatron-LM balanced: all layers in a row, cut by FLOPs into chunks x PP virtual stages (appendix B)."""
    layers = [(m, encoder_layer(m, case, constants)) for m in case.encoders for _ in range(m.depth)]
    layers += [(case.llm, llm_layer(case, constants))] * case.llm.depth
    runs = partition([layer_flops(model) for model, _ in layers], case.pp * case.num_chunks)
    return pipeline_timeline(case, constants, [[layer for _, layer in layers[first:last]] for first, last in runs])


def balanced_s(case: Setting, constants: Constants) -> float:
    return balanced(case, constants).iteration_s


def first_stage_s(case: Setting, constants: Constants) -> float:
    """Megatron-LM: all encoders inside the first of PP stages, the language model evenly over all, 1F1B."""
    own = [encoder_layer(m, case, constants) for m in case.encoders for _ in range(m.depth)]
    backbone, size = llm_layer(case, constants), case.llm.depth // case.pp
    stages = [own + [backbone] * size] + [[backbone] * size] * (case.pp - 1)
    return pipeline_timeline(case, constants, stages).iteration_s


def layers_moved_s(case: Setting, constants: Constants) -> float:
    """Megatron-LM, read so that later stages take over language model layers: cut by FLOPs into PP stages, 1F1B."""
    return balanced_s(replace(case, num_chunks=1), constants)


def pipeline_timeline(case: Setting, constants: Constants, stages: Sequence[Sequence[Layer]]) -> LlmTimeline:
    """The usual warm-up, and data parallelism around it."""
    held = parameters((*case.encoders, case.llm)) / (case.pp * case.tp)
    reduction_s = constants.reduction_s_per_parameter * held * case.reduced_share
    pipeline = LlmPipeline(
        num_places=case.pp,
        forward=[tuple(kernel for layer in stage for kernel in layer.forward) for stage in stages],
        backward=[tuple(kernel for layer in reversed(stage) for kernel in layer.backward) for stage in stages],
        num_microbatches=case.num_microbatches,
        all_gather_s=reduction_s * ALL_GATHER_SHARE,
        reduce_scatter_s=reduction_s * (1 - ALL_GATHER_SHARE),
    )
    return llm_timeline(pipeline, adjust_warm_up=False)


# Optimus --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Result of Algorithm 1."""

    pp: int
    tp: int
    schedule: BubbleSchedule


def optimus_llm(
    case: Setting, constants: Constants, *, encoder_parameters: float = 0.0, reduction_s: float | None = None
) -> LlmTimeline:
    """`encoder_parameters`: on each GPU; they are gathered before the language model's own. `reduction_s`: what data
    parallelism takes, if that is not to follow from the constants."""
    layer = llm_layer(case, constants)
    sizes = [last - first for first, last in partition([1.0] * case.llm.depth, case.pp * case.num_chunks)]
    own = parameters([case.llm]) / (case.pp * case.tp)
    per_parameter = (
        constants.reduction_s_per_parameter * case.reduced_share if reduction_s is None else reduction_s / own
    )
    return llm_timeline(
        LlmPipeline(
            num_places=case.pp,
            forward=[layer.forward * size for size in sizes],
            backward=[layer.backward * size for size in sizes],
            num_microbatches=case.num_microbatches,
            all_gather_s=per_parameter * ALL_GATHER_SHARE * (own + encoder_parameters),
            reduce_scatter_s=per_parameter * (1 - ALL_GATHER_SHARE) * own,
        )
    )


def encoder_pipelines(case: Setting, pp: int, tp: int, constants: Constants, *, reduces: bool) -> EncoderPipelines:
    """`reduces`: gathers its parameters and sums its gradients; the paper's own account leaves that out."""
    layers = [(model, encoder_layer(model, case, constants, tp)) for model in case.encoders]
    num_replicas = case.dp * case.pp * case.tp // (pp * tp)
    seconds = (
        constants.reduction_s_per_parameter * _encoder_parameters(case, pp, tp) * (num_replicas - 1) / num_replicas
    )
    return EncoderPipelines(
        places=tuple(tuple(range(first, first + pp)) for first in range(0, case.pp, pp)),
        copies=case.tp // tp,
        forward=(tuple(k for model, layer in layers for k in layer.forward * (model.depth // pp)),) * pp,
        backward=(tuple(k for model, layer in reversed(layers) for k in layer.backward * (model.depth // pp)),) * pp,
        opening_s=seconds * ALL_GATHER_SHARE if reduces else 0.0,
        closing_s=seconds * (1 - ALL_GATHER_SHARE) if reduces else 0.0,
    )


def _encoder_parameters(case: Setting, pp: int, tp: int) -> float:
    return parameters(case.encoders) / (pp * tp)


def encoder_layouts(case: Setting) -> list[tuple[int, int]]:
    """(PP, TP) that divide the language model's and fit beside its states and activations (4.1, 4.5)."""
    passes = (case.num_chunks - 1) * case.pp + min(case.num_microbatches, case.pp)
    activations = passes * case.llm.depth / (case.pp * case.num_chunks) * case.tokens * case.llm.width / case.tp
    states = STATE_BYTES_PER_PARAMETER * parameters([case.llm]) / (case.pp * case.tp)
    left = GPU_BYTES - ACTIVATION_BYTES * activations - states
    return [
        (pp, tp)
        for pp, tp in product(_divisors(case.pp), reversed(_divisors(case.tp)))
        if STATE_BYTES_PER_PARAMETER * _encoder_parameters(case, pp, tp) <= left
    ]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def optimus(case: Setting, constants: Constants, timeline: LlmTimeline | None = None) -> Found:
    """Algorithm 1 by the paper's account, in which the encoders' own data-parallel collectives take no time.

    `timeline`: the language model's, if it is not to follow from the constants."""
    timeline = timeline or optimus_llm(case, constants)
    best: Found | None = None
    for pp, tp in encoder_layouts(case):
        best = _better(best, pp, tp, timeline, encoder_pipelines(case, pp, tp, constants, reduces=False))
    assert best is not None, "no encoder layout fits"
    return best


def optimus_with_collectives(case: Setting, constants: Constants) -> Found:
    """The same where encoders gather their parameters before all else, and sum their gradients after it."""
    best: Found | None = None
    for pp, tp in encoder_layouts(case):
        timeline = optimus_llm(case, constants, encoder_parameters=_encoder_parameters(case, pp, tp))
        best = _better(best, pp, tp, timeline, encoder_pipelines(case, pp, tp, constants, reduces=True))
    assert best is not None, "no encoder layout fits"
    return best


def _better(best: Found | None, pp: int, tp: int, timeline: LlmTimeline, pipelines: EncoderPipelines) -> Found | None:
    best_s = best.schedule.iteration_s if best else inf
    if best_s < inf and not can_take_less(timeline, pipelines, best_s):
        return best
    schedule = schedule_bubbles(timeline, pipelines)
    return Found(pp, tp, schedule) if schedule.iteration_s < best_s else best


# Fitting --------------------------------------------------------------------------------------------------------------


@cache
def fit_constants() -> Constants:
    """Least squares of the relative error over the balanced rows of Table 5."""
    from scipy.optimize import minimize_scalar

    cases = [(strong_scaling(row.num_microbatches), row.balanced_s) for row in paper.TABLE_5]
    held = parameters((*cases[0][0].encoders, cases[0][0].llm)) / (cases[0][0].pp * cases[0][0].tp)

    def fit_reduction(flops_per_s: float) -> tuple[float, Constants]:
        """Fits the seconds per parameter for this rate; returns (squared error, constants)."""
        own = [balanced_s(case, hopper(flops_per_s, 0.0)) for case, _ in cases]
        shares = [case.reduced_share / published for case, published in cases]
        wanted = [1 - seconds / published for (_, published), seconds in zip(cases, own, strict=True)]
        reduction_s = sum(s * w for s, w in zip(shares, wanted, strict=True)) / sum(s * s for s in shares)
        error = sum((w - s * reduction_s) ** 2 for s, w in zip(shares, wanted, strict=True))
        return error, hopper(flops_per_s, reduction_s / held)

    rate = minimize_scalar(
        lambda flops_per_s: fit_reduction(flops_per_s)[0],
        bounds=(200e12, 600e12),
        method="bounded",
        options={"xatol": 1e12},
    ).x
    return fit_reduction(float(rate))[1]


@cache
def fit_bubble_width(constants: Constants) -> float:
    """Seconds of all-gather and reduce-scatter with which the coarse schedule hides what Table 7's first row says, with
    one encoder pipeline on each group."""
    from scipy.optimize import brentq

    row = paper.TABLE_7[0]

    def too_much(seconds: float) -> float:
        return coarse_efficiency(strong_scaling(row.num_microbatches), constants, seconds) - row.coarse

    return float(brentq(too_much, 0.0, paper.ALL_GATHER_S + paper.REDUCE_SCATTER_S, xtol=1e-5))


def coarse_efficiency(case: Setting, constants: Constants, reduction_s: float) -> float:
    timeline = optimus_llm(case, constants, reduction_s=reduction_s).coarse()
    return schedule_bubbles(timeline, encoder_pipelines(case, 1, case.tp, constants, reduces=False)).efficiency
