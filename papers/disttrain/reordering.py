"""DistTrain's Figure 18 beside ours: what reordering samples brings.

The paper fills sequences of 8192 tokens with images and captions of LAION-400M (2.3, 8); how uneven they are decides
the gain, and is printed as pictures only. Here images are drawn, with a fixed seed, from a log-normal distribution of
sides that meets the data set's published statistics (a shorter side of at least 256 in 51%, 512 in 16%, 1024 in 2% of
images; a longer one in 65%, 27%, 6%), square and no larger than 1024, with captions of 26 words (4.2: ten images, 256
words), until the next does not fit.

Devices and degrees are the orchestration's (8.2). Each replica of the language model has a pipeline with its share of
the encoder's and the generator's devices, to which the images of a sample are dealt (8.1), and is simulated under 1F1B.
"Random order" is the order in which samples are drawn; reordered is `motet.balancing.disttrain`, the assignment
that training can use. Each gain is the mean over several batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import numpy as np

from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.balancing.disttrain import balanced_groups, reordered
from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.planner.disttrain.orchestration import Orchestration, OrchestrationProblem, UnitDegrees, orchestrate
from motet.ragged_arrays import Floats
from motet.schedule.action import Compute, Kind
from motet.schedule.program import make_program
from motet.schedule.routes import derive_routes
from motet.simulator.simulate import simulate
from papers.cornstarch.given_times import GivenTimes
from papers.disttrain.models import ASSUMED, SEQUENCE, image_tokens, mllm
from papers.disttrain.systems import LARGE, MEGATRON_STAGES, SMALL, megatron_replicas
from papers.tables import Row, Table

PUBLISHED_GAIN = (1.03, 1.11)
MEDIAN_SIDE, SPREAD, LARGEST_SIDE = 296, 0.705, 1024
"""Distribution of the side of a square of an image's area, in pixels; between those of the shorter and of the longer
side."""
CAPTION_TOKENS = 35
NUM_BATCHES = 3
PASSES = 3
"""Forward, input gradient, weight gradient."""

Sides = tuple[int, ...]
"""Sides of a sample's images, in patches of 16 pixels."""
TYPICAL: Sides = (ASSUMED.encoded_side // 16,) * ASSUMED.images


def drawn_samples(num_samples: int, seed: int) -> list[Sides]:
    rng = np.random.default_rng(seed)
    samples: list[Sides] = []
    for _ in range(num_samples):
        sides: list[int] = []
        left = SEQUENCE
        while True:
            pixels = min(LARGEST_SIDE, MEDIAN_SIDE * float(np.exp(SPREAD * rng.standard_normal())))
            side = max(1, round(pixels / 16))
            left -= side**2 + CAPTION_TOKENS
            if left < 0:
                break
            sides.append(side)
        samples.append(tuple(sides))
    return samples


@dataclass(frozen=True)
class Pipeline:
    """One replica of the language model, and the devices around it. Seconds are of all passes."""

    num_replicas: int
    num_stages: int
    stage_s: float
    num_encoders: int
    token_s: float
    num_generators: int
    image_s: float

    def forward_s(self, samples: Sequence[Sides]) -> Floats:
        """[microbatch, stage]; a microbatch is one sample."""
        around = [
            (
                self.token_s * max(_loads([side**2 for side in sides], self.num_encoders)),
                self.image_s * -(-len(sides) // self.num_generators),
            )
            for sides in samples
        ]
        inside = [self.stage_s] * self.num_stages
        return np.array([[encoder_s, *inside, generator_s] for encoder_s, generator_s in around]) / PASSES


@cache
def gains(size: str) -> tuple[float, float]:
    """Random order's iteration over the reordered one's, and over that of samples that are all alike."""
    num_devices, batches = SMALL
    batch = batches[size]
    problem = mllm(size, num_devices, batch, assumed=replace(ASSUMED, vpp_sizes=(1,)))
    best = min(_with_equal_shares(problem), key=lambda found: found.iteration_s)
    pipeline = _pipeline(problem, best.degrees)
    replicas = range(pipeline.num_replicas)
    random_s, reordered_s = [], []
    for seed in range(NUM_BATCHES):
        samples = drawn_samples(batch, seed)
        random_s.append(_iteration_s(pipeline, [samples[r :: len(replicas)] for r in replicas]))
        reordered_s.append(_iteration_s(pipeline, _reordered(pipeline, samples)))
    alike_s = _iteration_s(pipeline, [[TYPICAL] * (batch // len(replicas))])
    return mean(random_s) / mean(reordered_s), mean(random_s) / alike_s


@cache
def megatron_slowdown(size: str) -> float:
    """Megatron-LM's iteration on samples as they are drawn, over that on samples that are all alike (8.1)."""
    num_devices, batches = LARGE
    dp = megatron_replicas(size, num_devices, batches[size])
    alone, backbone = UnitDegrees(tp=1, pp=1, dp=8 * dp), UnitDegrees(tp=8, pp=MEGATRON_STAGES[size], dp=dp)
    degrees = {"encoder": alone, "language_model": backbone, "generator": alone}
    pipeline = _pipeline(mllm(size, num_devices, batches[size], overlapped=False), degrees)
    samples = drawn_samples(batches[size], seed=0)
    drawn_s = _iteration_s(pipeline, [samples[r::dp] for r in range(dp)])
    return drawn_s / _iteration_s(pipeline, [[TYPICAL] * (batches[size] // dp)])


def _pipeline(problem: OrchestrationProblem, degrees: Mapping[str, UnitDegrees]) -> Pipeline:
    units, backbone = problem.units, degrees["language_model"]
    return Pipeline(
        num_replicas=backbone.dp,
        num_stages=backbone.pp,
        stage_s=units["language_model"].seconds[backbone.tp] / backbone.pp,
        num_encoders=degrees["encoder"].dp // backbone.dp,
        token_s=units["encoder"].seconds[1] / (ASSUMED.images * image_tokens(ASSUMED)),
        num_generators=degrees["generator"].dp // backbone.dp,
        image_s=units["generator"].seconds[1] / ASSUMED.images,
    )


def _with_equal_shares(problem: OrchestrationProblem) -> list[Orchestration]:
    """The best for each number of replicas, all of which get equally many encoders and generators, of one stage."""
    found = []
    most = problem.num_devices
    for dp in (dp for dp in range(1, most) if problem.global_batch_size % dp == 0):
        units = {
            name: replace(unit, dp_sizes=(dp,))
            if unit.role == "language_model"
            else replace(unit, dp_sizes=tuple(range(dp, most, dp)), max_stages=1)
            for name, unit in problem.units.items()
        }
        try:
            found.append(orchestrate(replace(problem, units=units)))
        except UserError:
            continue
    return found


def _reordered(pipeline: Pipeline, samples: Sequence[Sides]) -> list[list[Sides]]:
    """Over replicas (Algorithm 2), then within each (Algorithm 3)."""
    groups = balanced_groups(pipeline.forward_s(samples).sum(axis=1), pipeline.num_replicas)
    result = []
    for group in ([samples[i] for i in sorted(members)] for members in groups):
        forward_s = pipeline.forward_s(group)
        order = reordered(forward_s, (PASSES - 1) * forward_s, forward_s.shape[1])
        result.append([group[i] for i in order])
    return result


def _loads(tokens: Sequence[int], num_devices: int) -> list[float]:
    groups = balanced_groups(np.array(tokens, dtype=float), num_devices, equal_counts=False)
    return [float(sum(tokens[i] for i in group)) for group in groups]


def _iteration_s(pipeline: Pipeline, replicas: Sequence[Sequence[Sides]]) -> float:
    """Seconds of an iteration, which the slowest replica determines."""
    return max(_simulated_s(pipeline.forward_s(samples)) for samples in replicas)


def _simulated_s(forward_s: Floats) -> float:
    """1F1B of [microbatch, stage] seconds; backwards take twice as long."""
    num_microbatches, num_stages = forward_s.shape
    chain = ModulePlan(
        kind="language_model",
        num_layers=num_stages,
        replicas=(Replica(stages=tuple(Stage(layers=(s, s + 1), ranks=(s,)) for s in range(num_stages))),),
        trainable=((0, num_stages),),
        loss_weight=1.0,
    )
    plan = Plan(modules={"chain": chain}, edges=(), num_microbatches=num_microbatches, planner="published")
    samples = [Sample(str(i), {"chain": (Segment(1),)}, {"chain": 1}) for i in range(num_microbatches)]

    def seconds(action: Compute) -> float:
        once = float(forward_s[action.cell.microbatch, action.cell.stage])
        return once if action.kind is Kind.FORWARD else (PASSES - 1) * once

    costs = GivenTimes(seconds)
    routes = derive_routes(plan, contiguous_assignment(plan, samples), samples)
    return simulate(make_program(plan.schedule, routes, costs.compute_s), costs).iteration_time_s


def reordering_table() -> Table:
    rows = []
    by_size = {size: gains(size) for size in SMALL[1]}
    ours = [gain for gain, _ in by_size.values()]
    assumptions = "LAION-400M's sizes, log-normal; 1F1B; microbatches of one sample, its images dealt to all devices"
    for which, published, value in zip(("least", "most"), PUBLISHED_GAIN, (min(ours), max(ours)), strict=True):
        rows.append(Row(f"gain over random order, {which}", published, value, "nothing", True, assumptions))
    for size, (gain, headroom) in by_size.items():
        rows.append(Row(f"gain over random order, MLLM-{size}", None, gain, "nothing", False, assumptions))
        rows.append(Row(f"gain if samples were alike, MLLM-{size}", None, headroom, "nothing", False, assumptions))
    for size in SMALL[1]:
        what = f"Megatron-LM's iteration as drawn over alike, MLLM-{size}, 1296 GPUs"
        rows.append(Row(what, None, megatron_slowdown(size), "nothing", False, assumptions))
    return Table(
        "Figure 18: reordering samples",
        tuple(rows),
        notes=(
            "How uneven the data are decides the gain; the paper shows its own as pictures. Samples that are all the "
            "typical one are what any order could gain at most. As published, the smallest model gains "
            "most: it has the most replicas, and waits for the slowest. Uneven samples do not explain what separates "
            "our Megatron-LM from the paper's: its encoder and generator wait for the language model anyhow."
        ),
    )
