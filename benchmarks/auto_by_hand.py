"""Does planner `auto` ever lose to a plan made by hand? Twelve configurations, twenty plans by hand for each.

The plans by hand follow rules of thumb, and know nothing of what the search finds: fully sharded or ZeRO over all
devices with microbatches of 1, 2 or 4 samples; tensor parallelism within a node with pipelines of various depths and
encoders on groups of their own; interleaving; recomputation of everything or nothing. Where these rules fit a
configuration badly it has plans of its own (`OWN_RULES`), which are tried first. Plans are tried until twenty fit or
none is left. Everything but the model, the data and the cluster is left open to `auto`.

`python -m benchmarks.auto_by_hand 8B` does the configurations whose names hold a word.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.reporting import Report
from motet.api import read_problem
from motet.config import RunConfig
from motet.errors import UserError
from motet.planner.choice import Choice
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.degrees import check_degrees
from motet.planner.layouts.layout import Chunk, Layout, build_plan, layout_plan
from motet.planner.layouts.partition import even_partition
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.registry import choose

NUM_BY_HAND = 20
STRIDE = 7
"""Rules that stand next to one another are alike: they are tried in steps of so many."""
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "vision_use_head": False,
}
WHISPER = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
}
DINO = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 448, "patch_size": 14}


def _decoder(config: str, blocks: int, width: int, inner: int, heads: int, keys: int, **more: Any) -> dict[str, Any]:
    values = {
        "vocab_size": 151936 if config.startswith("Qwen") else 128256,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }
    return {"config": config, "values": values}


QWEN_8B = _decoder("Qwen3Config", 36, 4096, 12288, 32, 8, head_dim=128)
LLAMA_8B = _decoder("LlamaConfig", 32, 4096, 14336, 32, 8)
LLAMA_70B = _decoder("LlamaConfig", 80, 8192, 28672, 64, 8)
LLAMA_405B = _decoder("LlamaConfig", 126, 16384, 53248, 128, 8)
MIXTURE_30B = _decoder(
    "Qwen3MoeConfig",
    48,
    2048,
    6144,
    32,
    4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)
SD3 = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "sample_size": 64,
    "patch_size": 2,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "caption_projection_dim": 1536,
}


def _encoder(config: str, values: Mapping[str, Any], trains: bool = True) -> dict[str, Any]:
    return {"config": config, "values": dict(values), "projector": "mlp", "train": {"module": trains}}


@dataclass(frozen=True)
class Case:
    devices: int
    samples: int
    language_model: Mapping[str, Any]
    encoders: Mapping[str, Mapping[str, Any]]
    text_tokens: int = 2048
    images: int = 1
    size: int = 448
    more: Mapping[str, Any] | None = None
    """More of `model`."""
    data: Mapping[str, Any] | None = None
    """More of `data`."""

    def config(self) -> RunConfig:
        seen = [name for name, part in self.encoders.items() if part["config"] != "WhisperConfig"]
        data = {"kind": "described", "text_tokens": self.text_tokens, **(self.data or {})}
        if seen:
            data["images"] = {name: {"height": self.size, "width": self.size, "count": self.images} for name in seen}
        if "audio" in self.encoders:
            data["sounds"] = {"audio": {"seconds": 30.0}}
        model = {"encoders": dict(self.encoders), "language_model": dict(self.language_model), **(self.more or {})}
        nodes = max(1, self.devices // 8)
        return RunConfig.model_validate(
            {
                "model": model,
                "data": data,
                "cluster": {
                    "device": "cuda",
                    "accelerator": "h100",
                    "num_devices": self.devices,
                    "num_nodes": nodes,
                },
                "parallel": {"planner": "auto"},
                "train": {"global_batch_size": self.samples, "dtype": "bfloat16"},
            }
        )


VISION = {"vision": _encoder("SiglipVisionConfig", SIGLIP)}
CASES: Mapping[str, Case] = {
    "Qwen3-VL-8B on 8": Case(8, 128, QWEN_8B, VISION),
    "Qwen3-VL-8B on 64": Case(64, 512, QWEN_8B, VISION),
    "Qwen3-VL-8B on 512": Case(512, 2048, QWEN_8B, VISION),
    "vision, audio and 70B on 256": Case(256, 1024, LLAMA_70B, {**VISION, "audio": _encoder("WhisperConfig", WHISPER)}),
    "three unlike encoders and 8B on 64": Case(
        64,
        512,
        LLAMA_8B,
        {**VISION, "audio": _encoder("WhisperConfig", WHISPER), "detail": _encoder("Dinov2Config", DINO)},
    ),
    "44 images a sample and 8B on 64": Case(64, 128, LLAMA_8B, VISION, images=44, size=224),
    "405B on 8192": Case(8192, 2048, LLAMA_405B, {}, text_tokens=8192),
    "30B-A3B mixture of experts on 64": Case(64, 512, MIXTURE_30B, VISION),
    "LoRA 70B on 8": Case(
        8, 64, {**LLAMA_70B, "train": {"lora": {"rank": 16}}}, {"vision": _encoder("SiglipVisionConfig", SIGLIP, False)}
    ),
    "8B, all frozen but the projector on 16": Case(
        16,
        256,
        {**LLAMA_8B, "train": {"module": False}},
        {"vision": _encoder("SiglipVisionConfig", SIGLIP, False)},
    ),
    "a diffusion generator behind 8B on 16": Case(
        16,
        256,
        LLAMA_8B,
        VISION,
        more={"generators": {"image": {"config": "SD3Transformer2DModel", "values": SD3}}},
        data={"generated": {"image": {"height": 512, "width": 512, "count": 1}}},
    ),
    "text only, 8B on 64": Case(64, 512, LLAMA_8B, {}, text_tokens=4096),
}


@dataclass(frozen=True)
class ByHand:
    """A rule of thumb. Sizes are the language model's; other modules have a group of their own, or all share ranks."""

    tp: int
    pp: int
    samples_each: int
    """Samples of a microbatch."""
    shared: bool = False
    """All modules are on the same ranks, without a pipeline."""
    first_layers: int | None = None
    """Encoders are on the ranks of the language model's first stage, which has so many of its layers; the other stages
    have equally many each."""
    whole_encoders: bool = False
    """With `first_layers`: each of these ranks holds the whole encoders, and they take turns at the samples."""
    fully_sharded: bool = False
    zero1: bool = True
    virtual_stages: int = 1
    recompute: bool = False
    schedule: str = "1f1b"

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}" + (f" x {self.virtual_stages}" if self.virtual_stages > 1 else "")]
        parts += [f"{self.samples_each} samples a microbatch", self.schedule]
        parts += ["one group of ranks"] if self.shared else []
        if self.first_layers is not None:
            parts += [f"encoders {'whole ' if self.whole_encoders else ''}beside the first {self.first_layers} layers"]
        parts += ["fully sharded"] if self.fully_sharded else ["ZeRO-1"] if self.zero1 else []
        parts += ["recomputed"] if self.recompute else []
        return ", ".join(parts)


def rules() -> Iterator[ByHand]:
    """The usual ones first."""
    for recompute, samples, sharded in product((False, True), (1, 2, 4), (True, False)):
        yield ByHand(1, 1, samples, shared=True, fully_sharded=sharded, recompute=recompute)
    for recompute, tp, samples in product((False, True), (2, 4, 8), (1, 4)):
        yield ByHand(tp, 1, samples, shared=True, recompute=recompute)
    for recompute, (tp, pp), samples in product(
        (False, True), ((8, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8)), (1, 2)
    ):
        yield ByHand(tp, pp, samples, recompute=recompute)
    for tp, pp, stages in ((8, 4, 2), (8, 8, 2), (4, 4, 4), (8, 16, 2), (8, 16, 4)):
        yield ByHand(tp, pp, 1, virtual_stages=stages, schedule="interleaved_1f1b_adjusted")
        yield ByHand(tp, pp, 1, virtual_stages=stages, schedule="interleaved_1f1b_adjusted", recompute=True)
    for tp, pp in ((2, 4), (4, 8), (2, 8), (8, 2)):
        yield ByHand(tp, pp, 1, schedule="zero_bubble_h1")


INTERLEAVED = "interleaved_1f1b_adjusted"


def _own_rules_of_70b() -> Iterator[ByHand]:
    """A language model of 82 layers behind two small encoders: tensor parallelism within a node, and the encoders on
    the ranks of the first stage, which has a few layers less."""
    for tp, pp, first in ((8, 4, 19), (4, 8, 9), (8, 2, 39), (4, 4, 18), (2, 8, 8), (2, 16, 4)):
        own = ByHand(tp, pp, 1, first_layers=first, whole_encoders=tp == 8)
        yield own
        yield replace(own, samples_each=2)
        yield replace(own, schedule="zero_bubble_h1")
    yield ByHand(8, 4, 1, first_layers=8, whole_encoders=True, virtual_stages=2, schedule=INTERLEAVED)
    yield ByHand(4, 8, 1, first_layers=4, virtual_stages=2, schedule=INTERLEAVED)
    yield ByHand(4, 4, 1, first_layers=8, virtual_stages=2, schedule=INTERLEAVED)
    yield ByHand(8, 2, 1, first_layers=18, whole_encoders=True, virtual_stages=2, schedule=INTERLEAVED)
    yield ByHand(4, 4, 2, first_layers=18, recompute=True)


def _own_rules_of_405b() -> Iterator[ByHand]:
    """Text only: tensor parallelism of a node, 16 stages as Llama 3 was trained with, and its neighbours."""
    for pp, samples, recompute in product((16, 8, 32), (1, 2), (False, True)):
        yield ByHand(8, pp, samples, recompute=recompute)
    for pp, stages in ((16, 2), (16, 4), (16, 7), (8, 2), (8, 4), (32, 2)):
        yield ByHand(8, pp, 1, virtual_stages=stages, schedule=INTERLEAVED)
        yield ByHand(8, pp, 1, virtual_stages=stages, schedule=INTERLEAVED, recompute=True)
    for tp, pp in ((8, 16), (8, 32), (4, 32)):
        yield ByHand(tp, pp, 1, schedule="zero_bubble_h1")


def _own_rules_of_many_images() -> Iterator[ByHand]:
    """Two samples for each device, of 13,000 tokens each: tensor parallelism for memory, few stages, since there are
    few microbatches, and a first stage that has fewer layers, since the encoder has much to do."""
    for tp, pp, first in ((2, 2, 14), (4, 2, 14), (2, 4, 5), (1, 4, 5), (1, 2, 14), (4, 4, 5), (1, 8, 2)):
        for recompute in (False, True):
            yield ByHand(tp, pp, 1, first_layers=first, recompute=recompute)
    for tp, samples in product((2, 4, 8), (1, 2)):
        yield ByHand(tp, 1, samples, shared=True)
    for tp, pp, first in ((2, 2, 14), (4, 2, 14), (2, 4, 5)):
        yield ByHand(tp, pp, 1, first_layers=first, schedule="zero_bubble_h1")
        yield ByHand(tp, pp, 1, first_layers=first // 2, virtual_stages=2, schedule=INTERLEAVED)


OWN_RULES: Mapping[str, Callable[[], Iterator[ByHand]]] = {
    "vision, audio and 70B on 256": _own_rules_of_70b,
    "405B on 8192": _own_rules_of_405b,
    "44 images a sample and 8B on 64": _own_rules_of_many_images,
}
"""Plans for single configurations, by name."""


def tried_by_hand(problem: PlanningProblem, most: int, own: Iterable[ByHand] = ()) -> list[tuple[ByHand, Evaluation]]:
    """Plans by all rules, the configuration's own first, then the others in an order that mixes them, until `most` of
    them fit or all were tried."""
    given = list(rules())
    in_order = [*own, *(rule for first in range(STRIDE) for rule in given[first::STRIDE])]
    found: list[tuple[ByHand, Evaluation]] = []
    for rule in in_order:
        if sum(evaluation.fits for _, evaluation in found) >= most:
            break
        with suppress(UserError):
            found.append((rule, by_hand(problem, rule)))
    return found


def by_hand(problem: PlanningProblem, rule: ByHand) -> Evaluation:
    """Raises `UserError` if the configuration has no such plan."""
    others = [name for name in problem.modules if name != "language_model"]
    per_replica = rule.tp * rule.pp
    if not rule.shared and rule.first_layers is None:
        per_replica += len(others) * rule.tp
    dp = problem.num_devices // per_replica
    if not dp:
        raise UserError("too few devices")
    if rule.shared and rule.fully_sharded and dp == 1:
        raise UserError("one replica")
    number = max(1, len(problem.samples) // (dp * rule.samples_each))
    if dp * number > len(problem.samples):
        raise UserError("too few samples")
    changed = replace(
        problem,
        num_microbatches=number,
        schedule=rule.schedule,
        recompute=tuple(problem.modules) if rule.recompute else (),
        memory=replace(problem.memory, zero1=rule.zero1 and not rule.fully_sharded),
    )
    if rule.first_layers is not None:
        return evaluate(changed, layout_plan(changed, _encoders_first(problem, rule, rule.first_layers, dp)))
    shards = {"fully_sharded": True, "sharded_replicas": dp} if rule.fully_sharded else {}

    def degrees(tp: int, pp: int = 1, virtual_stages: int = 1) -> Degrees:
        return Degrees(tp=tp, pp=pp, dp=dp, virtual_stages=virtual_stages, sequence_parallel=tp > 1, **shards)

    own = degrees(rule.tp, rule.pp, rule.virtual_stages)
    placement = "replicated" if rule.shared and others else "parallel"
    plan = build_plan(
        changed, {**{name: degrees(rule.tp) for name in others}, "language_model": own}, placement=placement
    )
    return evaluate(changed, plan)


def _encoders_first(problem: PlanningProblem, rule: ByHand, first_layers: int, dp: int) -> Layout:
    name, num_runs = "language_model", rule.pp * rule.virtual_stages
    num_layers, others = problem.modules[name].workload.num_layers, [n for n in problem.modules if n != name]
    if first_layers + num_runs - 1 > num_layers:
        raise UserError("too few layers")
    check_degrees(problem, name, Degrees(tp=rule.tp, pp=rule.pp, dp=dp, virtual_stages=rule.virtual_stages))
    runs = [(0, first_layers)]
    runs += [(first_layers + a, first_layers + b) for a, b in even_partition(num_layers - first_layers, num_runs - 1)]
    chunks = [Chunk(other, (0, problem.modules[other].workload.num_layers), 0) for other in others]
    for other in others:
        check_degrees(problem, other, Degrees(tp=1 if rule.whole_encoders else rule.tp, dp=dp))
    return Layout(
        planner="by hand",
        chunks=(*chunks, *(Chunk(name, run, i % rule.pp) for i, run in enumerate(runs))),
        group_sizes=(rule.tp,) * rule.pp,
        dp=dp,
        split=frozenset(others if rule.whole_encoders else ()),
        sequence_parallel=rule.tp > 1,
    )


@dataclass(frozen=True)
class Outcome:
    name: str
    choice: Choice
    cpu_s: float
    first_s: float
    """Seconds until the first plan that fits."""
    hands: Sequence[tuple[ByHand, Evaluation]]

    @property
    def best_by_hand(self) -> tuple[ByHand, Evaluation] | None:
        fitting = [each for each in self.hands if each[1].fits]
        return min(fitting, key=lambda each: each[1].iteration_time_s, default=None)

    @property
    def is_beaten(self) -> bool:
        best, own = self.best_by_hand, self.choice.evaluation
        return best is not None and (not own.fits or own.iteration_time_s > best[1].iteration_time_s * (1 + 1e-9))

    def row(self) -> tuple[str, ...]:
        own, best = self.choice.evaluation, self.best_by_hand
        hand = "none fits" if best is None else f"{best[1].iteration_time_s:.3f}"
        gain = "" if best is None else f"{best[1].iteration_time_s / own.iteration_time_s - 1:+.1%}"
        bound = self.choice.lower_bound_s
        return (
            self.name,
            f"{own.iteration_time_s:.3f}",
            "yes" if own.fits else "no",
            hand,
            gain,
            "" if best is None else str(best[0]),
            f"{sum(each.fits for _, each in self.hands)} of {len(self.hands)}",
            "" if not bound else f"{own.iteration_time_s / bound - 1:.0%}",
            f"{self.cpu_s:.1f}",
            f"{self.first_s:.1f}",
        )


COLUMNS = (
    "configuration",
    "auto [s]",
    "fits",
    "best by hand [s]",
    "auto faster by",
    "the best by hand",
    "by hand that fit",
    "above bound",
    "CPU [s]",
    "first [s]",
)


def outcome(name: str, case: Case, num_by_hand: int) -> Outcome:
    problem = read_problem(case.config())
    own = OWN_RULES[name]() if name in OWN_RULES else ()
    hands = tried_by_hand(problem, num_by_hand, own)
    begin_s, first_s = time.process_time(), []

    def progress(line: str) -> None:
        if " ms" in line and "does not fit" not in line:
            first_s.append(time.process_time() - begin_s)

    choice = choose(problem, progress=progress)
    cpu_s = time.process_time() - begin_s
    return Outcome(name, choice, cpu_s, first_s[0] if first_s else cpu_s, hands)


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only configurations whose name holds one of them")
    parser.add_argument("--plans", type=int, default=NUM_BY_HAND, help="plans by hand for each configuration")
    options = parser.parse_args(arguments)
    report = Report("auto-by-hand", "Planner auto against plans made by hand")
    outcomes = []
    for name, case in CASES.items():
        if not options.words or any(word in name for word in options.words):
            outcomes.append(outcome(name, case, options.plans))
            print(" | ".join(outcomes[-1].row()), file=sys.stderr, flush=True)
    report.add(
        f"Plans by hand for each configuration: all {len(list(rules()))} rules in a mixed order, until {options.plans} "
        "plans fit; those that cannot be built are left out."
    )
    report.table(COLUMNS, [each.row() for each in outcomes])
    beaten = [each.name for each in outcomes if each.is_beaten]
    report.goal("never slower than a plan by hand that fits", not beaten, ", ".join(beaten))
    report.add("\n".join(f"* {each.name}: {each.choice.why}." for each in outcomes))
    return report


if __name__ == "__main__":
    main().write()
