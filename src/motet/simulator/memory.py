"""Memory of each rank over time, from the begin and end of each step of a program.

| what | from | to |
|---|---|---|
| what a forward saves | the forward's start | the backward's end, or the input half's |
| what the input half leaves | the input half's end | the weight half's end |
| the buffer of a message, at its sender | the producer's end | the message's end |
| the buffer of a message, at its receiver | the message's start | the end of the action that reads it |
| parameters and other static bytes | always | |

Limits: tensors between two stages on the same rank count as saved by them; the cost model adds temporary memory inside
an action and fragmentation to the static part.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from motet.ragged_arrays import Floats, Ints, Rows, starts_of
from motet.schedule.action import Kind
from motet.schedule.dependencies import KINDS, NOTHING
from motet.schedule.lower import Program
from motet.simulator.clock import Times
from motet.simulator.costs import ArrayCosts, Costs, KindCosts, StepCosts
from motet.timeline import MemoryCurve


@dataclass(frozen=True, eq=False)
class _Holds:
    """Tensors that a rank holds from a begin to an end."""

    rank: Ints
    size: Ints
    begin: Floats
    end: Floats

    def selected(self, places: Ints | slice) -> "_Holds":
        return _Holds(self.rank[places], self.size[places], self.begin[places], self.end[places])

    def held_at(self, moment: float) -> int:
        """Bytes held from this moment on."""
        return int(self.size[(self.begin <= moment) & (moment < self.end)].sum())

    def of_ranks(self, ranks: Iterable[int], num_ranks: int) -> dict[int, "_Holds"]:
        """Returns the holds with a size and a duration, by rank."""
        lasting = (self.size != 0) & (self.begin < self.end)
        holds = self if lasting.all() else self.selected(np.flatnonzero(lasting))
        # Radix sort of small numbers is faster.
        number = np.uint16 if num_ranks < 2**16 else np.int64
        holds = holds.selected(np.argsort(holds.rank.astype(number), kind="stable"))
        bounds = starts_of(np.bincount(holds.rank, minlength=num_ranks)).tolist()
        return {rank: holds.selected(slice(bounds[rank], bounds[rank + 1])) for rank in ranks}


def memory_curves(
    program: Program, costs: Costs, seconds: StepCosts, times: Times, ranks: Iterable[int] | None = None
) -> dict[int, MemoryCurve]:
    """Memory by rank. `ranks`: None: all."""
    num_ranks = len(program.lanes.of_rank)
    wanted = range(num_ranks) if ranks is None else sorted(ranks)
    everything = (_saved(program, costs, times), *_buffers(program, seconds, times))
    holds = [hold.of_ranks(wanted, num_ranks) for hold in everything]
    return {rank: _curve([hold[rank] for hold in holds], costs.static_bytes(rank)) for rank in wanted}


def peak_by_kind(
    program: Program, costs: Costs, seconds: StepCosts, times: Times, ranks: Iterable[int]
) -> dict[int, dict[str, int]]:
    """What each of these ranks holds at the moment when it holds most, by kind: those of `KindCosts.static_by_kind`
    (else `static`), `activations`, `logits` and `messages`. Each adds up to the rank's peak."""
    num_ranks, wanted = len(program.lanes.of_rank), sorted(ranks)
    saved, (sent, received) = _saved(program, costs, times), _buffers(program, seconds, times)
    kinds = {"activations": [saved], "messages": [sent, received]}
    if isinstance(costs, KindCosts):
        logits = _saved(program, costs, times, costs.saved_logits(program.dependencies))
        activations = _Holds(saved.rank, saved.size - logits.size, saved.begin, saved.end)
        kinds = {"activations": [activations], "logits": [logits], "messages": [sent, received]}
    of_ranks = {kind: [hold.of_ranks(wanted, num_ranks) for hold in holds] for kind, holds in kinds.items()}
    result = {}
    for rank in wanted:
        by_kind = {kind: [hold[rank] for hold in holds] for kind, holds in of_ranks.items()}
        curve = _curve([hold for holds in by_kind.values() for hold in holds], costs.static_bytes(rank))
        moment = curve.times_s[int(np.argmax(curve.bytes_held))]
        static = costs.static_by_kind(rank) if isinstance(costs, KindCosts) else {"static": costs.static_bytes(rank)}
        result[rank] = {
            **static,
            **{kind: sum(hold.held_at(moment) for hold in holds) for kind, holds in by_kind.items()},
        }
    return result


def most_saved(program: Program, costs: Costs, times: Times, ranks: Iterable[int]) -> dict[int, int]:
    """The most activations and logits that each of these ranks keeps at once, which need not be when it holds most of
    everything."""
    saved = _saved(program, costs, times).of_ranks(ranks, len(program.lanes.of_rank))
    return {rank: int(_curve([holds], 0).bytes_held.max()) for rank, holds in saved.items()}


def _saved(program: Program, costs: Costs, times: Times, sizes: Ints | None = None) -> _Holds:
    """Tensors that forwards and input halves save. `sizes`: by half and cell; None: those of the costs."""
    dependencies, routes = program.dependencies, program.dependencies.routes
    num_cells, first_saved = routes.num_cells, 2 * routes.num_routes
    freed_s = np.full(2 * num_cells, np.nan)  # By saved value: the end of the action that reads it.
    read = dependencies.kept_read[program.actions]
    freed_s[read[read != NOTHING] - first_saved] = times.action_end[read != NOTHING]
    written = dependencies.kept_write[program.actions] - first_saved
    kind = program.actions // max(1, num_cells)
    saving = np.flatnonzero((kind == KINDS.index(Kind.FORWARD)) | (kind == KINDS.index(Kind.INPUT)))
    saving = saving[written[saving] >= 0]
    saving = saving[~np.isnan(freed_s[written[saving]])]
    value = written[saving]
    begin = np.where(kind[saving] == KINDS.index(Kind.FORWARD), times.action_start[saving], times.action_end[saving])
    if sizes is not None:
        size = sizes.reshape(-1)[value]
    elif isinstance(costs, ArrayCosts):
        size = costs.saved_sizes(dependencies).reshape(-1)[value]
    else:
        cells = routes.cells
        size = np.array(
            [costs.saved_bytes(cells[v % num_cells], v >= num_cells) for v in value.tolist()], dtype=np.int64
        )
    groups = [stage.planned.ranks for stage in routes.stages]
    ranks_of_stage = Rows(
        starts_of(np.array([len(group) for group in groups], dtype=np.int64)),
        np.array([rank for group in groups for rank in group], dtype=np.int64),
    )
    ranks = ranks_of_stage.selected(routes.cell_stage[value % max(1, num_cells)])
    per_rank = np.repeat(np.arange(len(saving)), ranks.lengths)
    return _Holds(ranks.values, size[per_rank], begin[per_rank], freed_s[value][per_rank])


def _buffers(program: Program, seconds: StepCosts, times: Times) -> tuple[_Holds, _Holds]:
    """Buffers of messages at their senders and at their receivers."""
    made_s = np.repeat(times.action_end, np.diff(program.message_starts))
    reads = program.dependencies.carried_reads.selected(program.actions)
    read_s = np.zeros(2 * program.dependencies.routes.num_routes)
    read_s[reads.values] = np.repeat(times.action_end, reads.lengths)
    sizes = seconds.message_bytes
    return (
        _Holds(program.message_sender, sizes, made_s, times.message_end),
        _Holds(program.message_receiver, sizes, times.message_start, read_s[program.message_value]),
    )


def _curve(holds: list[_Holds], static_bytes: int) -> MemoryCurve:
    moments = np.concatenate([ends for hold in holds for ends in (hold.begin, hold.end)])
    changes = np.concatenate([sizes for hold in holds for sizes in (hold.size, -hold.size)])
    in_order = np.argsort(moments, kind="stable")
    times, held = moments[in_order], np.cumsum(changes[in_order]) + static_bytes
    # Changes at the same time are added up.
    final = np.flatnonzero(times[1:] != times[:-1])
    final = np.append(final, len(times) - 1) if len(times) else final
    times, held = times[final], held[final]
    if not len(times) or times[0] > 0:
        times, held = np.append(0.0, times), np.append(static_bytes, held)
    return MemoryCurve(times, held)
