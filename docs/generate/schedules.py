"""Generates the timelines in docs/schedules.md.

A timeline stands in a code block after a comment `<!-- timeline: NAME -->`; `DRAWN` holds the timeline of each name.
A column is a second. Letters are the language model's microbatches, digits an encoder's; `u` and on are an encoder's of
the next batch.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.next_batch import NO_RUN_AHEAD, RunAhead
from motet.assignment.sample import Sample, Segment
from motet.plan import Edge, ModuleKind, ModulePlan, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind, parse_action
from motet.schedule.generators import GENERATORS
from motet.schedule.program import make_program
from motet.schedule.routes import derive_routes
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate

BUBBLE, WEIGHT, ENCODER_BACKWARD = ".", "+", "="
DEEP = "llm"
"""The module whose microbatches are letters."""
LOSS = "loss"


class Drawn(NamedTuple):
    schedule: str
    llm: Sequence[int]
    """Rank of each stage of the language model."""
    num_microbatches: int
    encoder: Sequence[int] = ()
    """Rank of each stage of the encoder, if there is one."""
    llm_forward_s: int = 1
    """Seconds of a stage's forward (1 for an encoder's); a backward takes twice as long."""
    num_batches: int = 0
    """Number of contrastive batches, if `llm` is a tower. Batch-syncs take no time."""
    frozen: bool = False
    """Whether the encoder is frozen."""
    run_ahead: bool = False
    """Whether it is one iteration of many in which the encoder runs ahead."""


FOUR = (0, 1, 2, 3)
DRAWN = {
    "gpipe": Drawn("gpipe", FOUR, 6),
    "1f1b": Drawn("1f1b", FOUR, 6),
    "1f1b after an encoder": Drawn("1f1b", (1, 2, 3), 6, encoder=(0,)),
    "eager_1f1b": Drawn("eager_1f1b", FOUR, 6),
    "interleaved_1f1b": Drawn("interleaved_1f1b", FOUR * 2, 8),
    "interleaved_1f1b_adjusted": Drawn("interleaved_1f1b_adjusted", FOUR * 2, 8),
    "zero_bubble_h1": Drawn("zero_bubble_h1", FOUR, 8),
    "zero_bubble_h2": Drawn("zero_bubble_h2", FOUR, 8),
    "zero_bubble_v": Drawn("zero_bubble_v", (*FOUR, *reversed(FOUR)), 8),
    "distmm_pipe": Drawn("distmm_pipe", FOUR, 8, num_batches=2),
    "gpipe, contrasted": Drawn("gpipe", FOUR, 8, num_batches=2),
    "1f1b, contrasted": Drawn("1f1b", FOUR, 8, num_batches=2),
    "colocated, 1f1b": Drawn("1f1b", FOUR, 6, encoder=FOUR, llm_forward_s=3),
    "dip": Drawn("dip", FOUR, 6, encoder=FOUR, llm_forward_s=3),
    "bubble_filling": Drawn("bubble_filling", FOUR, 6, encoder=FOUR, llm_forward_s=3),
    "frozen encoder": Drawn("bubble_filling", FOUR, 6, encoder=FOUR, llm_forward_s=3, frozen=True),
    "run-ahead": Drawn("bubble_filling", FOUR, 6, encoder=FOUR, llm_forward_s=3, frozen=True, run_ahead=True),
    "frozen encoder beside": Drawn("1f1b", (1, 2, 3), 6, encoder=(0,), frozen=True),
    "run-ahead beside": Drawn("1f1b", (1, 2, 3), 6, encoder=(0,), frozen=True, run_ahead=True),
}


class _Costs(UniformCosts):
    def compute_s(self, action: Compute) -> float:
        if action.cell.module == LOSS:
            return 0.0
        return super().compute_s(action) if action.cell.module == DEEP else {Kind.FORWARD: 1.0}.get(action.kind, 2.0)


def draw(drawn: Drawn) -> str:
    """One line per rank, and the iteration time."""
    plan = Plan(
        modules=_modules(drawn),
        edges=_edges(drawn),
        num_microbatches=drawn.num_microbatches,
        run_ahead=drawn.run_ahead,
    )
    layouts = {name: (Segment(1),) for name in plan.modules}
    samples = [Sample(str(i), layouts, {DEEP: 1}) for i in range(drawn.num_microbatches)]
    assignment = contiguous_assignment(plan, samples)
    ahead = RunAhead(True, assignment, samples) if drawn.run_ahead else NO_RUN_AHEAD
    routes = derive_routes(plan, assignment, samples, ahead=ahead)
    costs = _Costs(forward_s=drawn.llm_forward_s, backward_s=2 * drawn.llm_forward_s)
    assert drawn.schedule in GENERATORS
    timeline = simulate(make_program(drawn.schedule, routes, costs.compute_s), costs).timeline
    columns = round(timeline.iteration_time_s)
    lines = [[BUBBLE] * columns for _ in range(plan.num_ranks)]
    for span in timeline.spans:
        if span.kind in "FBIW":
            action = parse_action(span.name)
            assert isinstance(action, Compute)
            if action.cell.module == LOSS:
                continue
            start, end = round(span.start), round(span.end)
            symbol = _symbol(action)
            if action.cell in routes.ahead:
                symbol = chr(ord("u") + routes.next_name(action.cell).microbatch)
            lines[span.rank][start:end] = [symbol] * (end - start)
    return "\n".join([*(f"{rank} {''.join(line)}" for rank, line in enumerate(lines)), f"  {columns} s"])


def _symbol(action: Compute) -> str:
    kind, (module, _, _, microbatch) = action
    if module != DEEP:
        return str(microbatch) if kind is Kind.FORWARD else ENCODER_BACKWARD
    if kind is Kind.WEIGHT:
        return WEIGHT
    return chr(ord("a" if kind is Kind.FORWARD else "A") + microbatch)


def _modules(drawn: Drawn) -> dict[str, ModulePlan]:
    if drawn.num_batches:
        loss = replace(_module("loss", drawn.llm[-1:], 1.0), num_microbatches=drawn.num_batches)
        return {DEEP: _module("tower", drawn.llm, 0.0), LOSS: loss}
    modules = {"encoder": _module("encoder", drawn.encoder, 0.0)} if drawn.encoder else {}
    if drawn.frozen:
        modules = {name: replace(encoder, trainable=()) for name, encoder in modules.items()}
    return modules | {DEEP: _module("language_model", drawn.llm, 1.0)}


def _module(kind: ModuleKind, ranks: Sequence[int], loss_weight: float) -> ModulePlan:
    """A module with one layer per stage, all trainable."""
    stages = tuple(Stage(layers=(i, i + 1), ranks=(rank,)) for i, rank in enumerate(ranks))
    return ModulePlan(
        kind=kind,
        num_layers=len(ranks),
        replicas=(Replica(stages=stages),),
        trainable=((0, len(ranks)),),
        loss_weight=loss_weight,
    )


def _edges(drawn: Drawn) -> tuple[Edge, ...]:
    if drawn.num_batches:
        return (Edge(source=DEEP, target=LOSS),)
    return (Edge(source="encoder", target=DEEP),) if drawn.encoder else ()


def describe(page: str) -> str:
    """The page with new timelines."""
    return re.sub(
        r"(<!-- timeline: (.+?) -->\n\n```text\n).*?(\n```)",
        lambda match: f"{match[1]}{draw(DRAWN[match[2]])}{match[3]}",
        page,
        flags=re.DOTALL,
    )
