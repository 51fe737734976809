"""Seconds of each rank by cause, with communication by link and by whether computation hides it.

A rank's time divides into computation, the optimizer's step, exchanges within computation (tensor, context and expert
parallelism, gathers of sharded parameters), and bubbles by cause (`motet.simulator.result`). Messages between stages,
sums of gradients and gathers of new parameters run beside it: seconds in which a rank sends or receives and computes
too are hidden, the others exposed. Exposed seconds lie within the bubbles and are no further part of the iteration.

Limits: exchanges within computation count as exposed and by the slowest link between the ranks of a stage's groups.
Ranks that compute the same at the same time are shown by the first of them, whose links may differ from the others'.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from motet.planner.evaluate import Evaluation
from motet.ragged_arrays import Floats

WITHIN, BETWEEN = "within a node", "between nodes"
Intervals = list[tuple[float, float]]


@dataclass
class LinkSeconds:
    """Seconds in which a rank uses one kind of link."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True)
class RankTime:
    ranks: tuple[int, ...]
    """Ranks that compute the same at the same time; the values are those of the first."""
    holds: str
    """Its stages, such as `vision 0-5, language_model 0-3`."""
    seconds: dict[str, float]
    """By cause (`TimeShares`); they add up to the iteration."""
    links: dict[str, LinkSeconds] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by kind when the rank holds most."""


def times_of_ranks(evaluation: Evaluation, most: int = 64) -> list[RankTime]:
    """One entry for each group of ranks that compute the same at the same time, at most the first `most` of them."""
    result = evaluation.result
    groups = result.alike_ranks[:most]
    shares = asdict(result.time_shares)
    firsts = [ranks[0] for ranks in groups]
    communication = _communication(evaluation, firsts)
    memory = result.peak_memory_by_kind(firsts)
    return [
        RankTime(
            ranks=ranks,
            holds=_holds(evaluation, ranks[0]),
            seconds={cause: float(seconds[ranks[0]]) for cause, seconds in shares.items()},
            links=communication[ranks[0]],
            memory={kind: size for kind, size in memory[ranks[0]].items() if size},
        )
        for ranks in groups
    ]


def _holds(evaluation: Evaluation, rank: int) -> str:
    runs: dict[str, list[str]] = {}
    for name, _, _, stage in evaluation.plan.stages_of_rank(rank):
        first, last = stage.layers
        runs.setdefault(name, []).append(f"{first}-{last - 1}" if last - first > 1 else f"{first}")
    return ", ".join(f"{name} {' and '.join(layers)}" for name, layers in runs.items())


def _communication(evaluation: Evaluation, ranks: Sequence[int]) -> dict[int, dict[str, LinkSeconds]]:
    result, program, node = evaluation.result, evaluation.program, evaluation.problem.cluster.node
    stands_for = {rank: rank if result.folding is None else int(result.folding.rank_of[rank]) for rank in ranks}
    wanted = set(stands_for.values())
    used: dict[int, dict[str, Intervals]] = {rank: defaultdict(list) for rank in wanted}
    messages = zip(
        program.message_sender.tolist(),
        program.message_receiver.tolist(),
        result.times.message_start.tolist(),
        result.times.message_end.tolist(),
        strict=True,
    )
    for sender, receiver, begin, end in messages:
        link = WITHIN if node(sender) == node(receiver) else BETWEEN
        for rank in {sender, receiver} & wanted:
            used[rank][link].append((begin, end))
    sums = zip(result.times.reduction_start.tolist(), result.times.reduction_end.tolist(), strict=True)
    for reduce, times, gather in zip(program.reductions, sums, result.gathers, strict=True):
        members = program.participants(reduce)
        link = WITHIN if len({node(rank) for rank in members}) == 1 else BETWEEN
        for rank in wanted.intersection(members):
            used[rank][link] += [times, gather]
    busy = _busy(evaluation, wanted)
    within = result.time_shares.tensor_parallel
    found = {}
    for rank, representative in stands_for.items():
        links = {link: _split(times, busy[representative]) for link, times in used[representative].items()}
        if within[rank] > 0:
            links.setdefault(_link_of_stages(evaluation, rank), LinkSeconds()).exposed_s += float(within[rank])
        found[rank] = {link: links[link] for link in (WITHIN, BETWEEN) if link in links}
    return found


def _busy(evaluation: Evaluation, ranks: Iterable[int]) -> dict[int, Floats]:
    """Begin and end of each of a rank's computations, in order."""
    result, program = evaluation.result, evaluation.program
    place = np.empty(program.dependencies.num_actions, dtype=np.int64)
    place[program.actions] = np.arange(len(program.actions))
    step_end = result.times.end_s + result.costs.fixed_s
    busy = {}
    for rank in ranks:
        own = place[program.lanes.actions[program.lanes.of_rank[rank]]]
        times = np.stack([result.times.action_start[own], result.times.action_end[own]], axis=1)
        times = np.concatenate([times, [[result.times.end_s, step_end]]])
        busy[rank] = times[np.argsort(times[:, 0], kind="stable")]
    return busy


def _split(used: Intervals, busy: Floats) -> LinkSeconds:
    union: Intervals = []
    for begin, end in sorted(used):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > begin:
            union.append((begin, end))
    if not union:
        return LinkSeconds()
    # What of the time up to a moment is busy grows linearly within busy intervals only.
    moments = busy.reshape(-1)
    done = np.concatenate([[0.0], np.cumsum(busy[:, 1] - busy[:, 0])])
    so_far = np.stack([done[:-1], done[1:]], axis=1).reshape(-1)
    begins, ends = np.array(union).T
    hidden = float((np.interp(ends, moments, so_far) - np.interp(begins, moments, so_far)).sum())
    whole = float((ends - begins).sum())
    return LinkSeconds(exposed_s=max(0.0, whole - hidden), hidden_s=min(whole, hidden))


def _link_of_stages(evaluation: Evaluation, rank: int) -> str:
    """The slowest link between ranks with which this one exchanges within computation."""
    node, plan = evaluation.problem.cluster.node, evaluation.plan
    for name, r, s, stage in plan.stages_of_rank(rank):
        module = plan.modules[name]
        groups = [stage.ranks]
        if module.shares_over_replicas:
            groups += module.sharing_groups(r, s)
        if module.replicas_sharing_experts > 1:
            first = r // module.replicas_sharing_experts * module.replicas_sharing_experts
            together = module.replicas[first : first + module.replicas_sharing_experts]
            groups.append(tuple(member for replica in together for member in replica.stages[s].ranks))
        if any(len({node(member) for member in group}) > 1 for group in groups):
            return BETWEEN
    return WITHIN
