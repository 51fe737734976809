"""Estimates of a layout's time and memory without simulation, to decide which layouts are worth a simulation.

`bound_s` is a lower bound of the layout's iteration under *any* schedule. A group of ranks cannot begin before the
input of its first layers has been computed (head), then does all of its own work, and after its last action other
groups still have theirs (tail). The same holds for some of its runs of layers by themselves. Heads and tails are those
of the lightest microbatch. Work is exact if the batch is cut evenly, because costs are linear in the loads, and a lower
bound otherwise. Messages, reductions and exchanges of context-parallel groups count as free, and memory is ignored.
`needed_bytes` is an estimate of static bytes and of what 1F1B saves for typical microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import itemgetter

from motet.costs.estimator import LayerTime
from motet.costs.memory import usable_bytes
from motet.planner.layouts.degrees import largest_ep
from motet.planner.layouts.layout import Chunk, Layout
from motet.planner.problem import PlanningProblem


@dataclass(frozen=True)
class _Sums:
    """Prefix sums over a module's layers; layers [a, b) cost sums[b] - sums[a]."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float]
    """Weight gradients, which no other stage waits for."""
    lightest_forward_s: Sequence[float]
    lightest_backward_s: Sequence[float]
    """Excludes weight gradients."""
    static_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    updated: Sequence[float]
    """Parameters that the optimizer updates on each rank without ZeRO."""


_Part = tuple[Chunk, _Sums, int, int]
"""A chunk, the sums of its module, its first layer and the one after its last."""


_Run = tuple[float, float, float, float]
"""Of a chunk: seconds before it, seconds after it, its work, and the part of it that may come after everything else."""


def _end_s(runs: list[_Run]) -> float:
    """Lower bound of a group's end: the largest, over sets of its runs, of least head + work + least tail (one machine
    with heads and tails). Sets are the runs with the latest heads, and those with the longest tails."""
    latest = 0.0
    for key in (0, 1):
        work = free = 0.0
        least = inf
        for run in sorted(runs, key=itemgetter(key), reverse=True):
            work += run[2]
            free += run[3]
            least = min(least, run[1 - key])
            head, tail = (run[0], least) if key == 0 else (least, run[1])
            latest = max(latest, head + work + max(0.0, tail - free))
    return latest


class LayoutCosts:
    """Estimates for the layouts of one problem; results are remembered."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._sums: dict[tuple[str, int, int, int, bool, bool], _Sums] = {}
        self._last: tuple[Layout | None, list[_Part]] = (None, [])
        self._entries = {
            name: [(edge.source, min(edge.layers)) for edge in problem.edges if edge.target == name]
            for name in problem.modules
        }

    def bound_s(self, layout: Layout, *, split_backward: bool = True) -> float:
        """Lower bound of one iteration. `split_backward`: it also holds for schedules that split backwards."""
        key = ("bound", *layout.content, split_backward)
        return self.problem.remembered(key, lambda: self._bound_s(layout, split_backward))

    def _bound_s(self, layout: Layout, split_backward: bool) -> float:
        return self.fixed_s(layout) + max(self.ends_s(layout, split_backward=split_backward))

    def ends_s(self, layout: Layout, *, split_backward: bool) -> list[float]:
        """For each group, a lower bound of the time until all that must follow its work is done."""
        heads, tails = self._heads_and_tails(layout)
        number = self.problem.num_microbatches
        runs: list[list[_Run]] = [[] for _ in layout.group_sizes]
        for (chunk, sums, a, b), head, tail in zip(self._parts(layout), heads, tails, strict=True):
            seconds = sums.forward_s[b] - sums.forward_s[a] + sums.backward_s[b] - sums.backward_s[a]
            weight_s = sums.weight_s[b] - sums.weight_s[a] if split_backward else 0.0
            runs[chunk.group].append((head, tail, number * seconds, number * weight_s))
        return [_end_s(own) for own in runs]

    def _parts(self, layout: Layout) -> list[_Part]:
        """The chunks with their sums and layers. Those of the last layout are kept, as several estimates need them."""
        last, parts = self._last
        if last is not layout:
            alike: dict[tuple[str, int], _Sums] = {}
            parts = []
            for chunk in layout.chunks:
                key = chunk.module, layout.group_sizes[chunk.group]
                if key not in alike:
                    alike[key] = self._sums_of(chunk, layout)
                parts.append((chunk, alike[key], *chunk.layers))
            self._last = layout, parts
        return parts

    def _sums_of(self, chunk: Chunk, layout: Layout) -> _Sums:
        name = chunk.module
        tp, cp = layout.tp(name, chunk.group), layout.cp(name)
        sequence_parallel = layout.sequence_parallel and self.problem.modules[name].workload.shares_sequences
        num_replicas = layout.num_replicas(name)
        key = (name, tp, cp, num_replicas, num_replicas == layout.dp, sequence_parallel and tp > 1)
        if key not in self._sums:
            remembered = ("layout sums", *key, self.problem.max_ep)
            self._sums[key] = self.problem.remembered(remembered, lambda: self._sum_layers(*key))
        return self._sums[key]

    def _sum_layers(self, name: str, tp: int, cp: int, dp: int, alone: bool, sequence_parallel: bool) -> _Sums:
        problem = self.problem
        times, lightest = (
            problem.estimator.lower_bound_times(
                name, tp, dp, cp=cp, alone=alone, lightest=lightest, sequence_parallel=sequence_parallel
            )
            for lightest in (False, True)
        )
        ep = largest_ep(problem, name, tp, dp)
        static = problem.estimator.static_bytes(name, tp, dp, cp=cp, ep=ep)
        saved = problem.estimator.saved_bytes(name, tp, dp, cp=cp, sequence_parallel=sequence_parallel)

        def prefix(values: Sequence[float]) -> list[float]:
            return [0.0, *accumulate(values)]

        def half(time: LayerTime) -> float:
            return time.backward_s - time.weight_s

        return _Sums(
            forward_s=prefix([time.forward_s for time in times]),
            backward_s=prefix([time.backward_s for time in times]),
            weight_s=prefix([time.weight_s for time in times]),
            lightest_forward_s=prefix([time.forward_s for time in lightest]),
            lightest_backward_s=prefix([half(time) for time in lightest]),
            static_bytes=prefix(static),
            saved_bytes=prefix(saved),
            updated=prefix(problem.estimator.num_trainable(name, tp=tp, ep=ep)),
        )

    def _heads_and_tails(self, layout: Layout) -> tuple[list[float], list[float]]:
        """For each chunk, the least time before its first action and after its last one."""
        forward, backward, before = [], [], []
        end_of: dict[str, float] = {}
        for chunk, sums, a, b in self._parts(layout):
            forward.append(sums.lightest_forward_s[b] - sums.lightest_forward_s[a])
            backward.append(sums.lightest_backward_s[b] - sums.lightest_backward_s[a])
            entered = [end_of.get(source, 0.0) for source, layer in self._entries[chunk.module] if layer < b]
            before.append(max([end_of.get(chunk.module, 0.0) if a else 0.0, *entered]))
            end_of[chunk.module] = before[-1] + forward[-1]
        after = [0.0] * len(layout.chunks)
        # The backward of a chunk is followed by those of earlier chunks.
        way_back: dict[str, float] = {}
        for i, chunk in enumerate(layout.chunks):
            entered = [
                way_back.get(source, 0.0) for source, layer in self._entries[chunk.module] if layer < chunk.layers[1]
            ]
            after[i] = max([way_back.get(chunk.module, 0.0) if chunk.layers[0] else 0.0, *entered])
            way_back[chunk.module] = after[i] + backward[i]
        return before, self._with_forward_only(layout, forward, backward, after)

    def _with_forward_only(
        self, layout: Layout, forward: Sequence[float], backward: Sequence[float], after: list[float]
    ) -> list[float]:
        """Tails in which a chunk without a backward is followed by forwards and backwards of later chunks."""
        rest: dict[str, float] = {}
        entering: dict[str, list[tuple[str, int]]] = {}
        for target, sources in self._entries.items():
            for source, layer in sources:
                entering.setdefault(source, []).append((target, layer))
        from_layer: dict[str, list[tuple[int, float]]] = {}
        for i in reversed(range(len(layout.chunks))):
            chunk = layout.chunks[i]
            fed = [
                next((s for first, s in reversed(from_layer.get(target, [])) if first <= layer), 0.0)
                for target, layer in entering.get(chunk.module, [])
            ]
            downstream = rest.get(chunk.module, max(fed, default=0.0))
            if not self.problem.estimator.has_backward(chunk.module, chunk.layers):
                after[i] = downstream
            rest[chunk.module] = downstream + forward[i] + backward[i]
            from_layer.setdefault(chunk.module, []).insert(0, (chunk.layers[0], rest[chunk.module]))
        return after

    def fixed_s(self, layout: Layout) -> float:
        """The optimizer's step of the rank that updates most."""
        return self.problem.estimator.optimizer_seconds(max(self._updated(layout)))

    def _updated(self, layout: Layout) -> list[float]:
        updated = [0.0] * len(layout.group_sizes)
        for chunk, sums, a, b in self._parts(layout):
            holders = layout.num_replicas(chunk.module) * layout.cp(chunk.module)
            share = self.problem.memory.num_keepers(holders) / holders
            updated[chunk.group] += (sums.updated[b] - sums.updated[a]) * share
        return updated

    def num_summed(self, layout: Layout) -> float:
        """Parameters of the group with most, whose gradients the replicas sum."""
        updated = [0.0] * len(layout.group_sizes)
        for chunk, sums, a, b in self._parts(layout):
            updated[chunk.group] += sums.updated[b] - sums.updated[a]
        return max(updated)

    def excess_bytes(self, layout: Layout) -> float:
        """Estimated bytes by which the fullest rank exceeds its memory; 0 if all fit."""
        return max(0.0, self.needed_bytes(layout) - usable_bytes(self.problem.cluster))

    def needed_bytes(self, layout: Layout, *, remembered: bool = True) -> float:
        """Estimated memory of the fullest rank. `remembered`: False for one of very many layouts."""
        if not remembered:
            return self._needed_bytes(layout)
        return self.problem.remembered(("needed bytes", *layout.content), lambda: self._needed_bytes(layout))

    def _needed_bytes(self, layout: Layout) -> float:
        problem = self.problem
        behind: dict[str, int] = {}
        needed = [0.0] * len(layout.group_sizes)
        targets = {name: [edge.target for edge in problem.edges if edge.source == name] for name in problem.modules}
        for chunk, sums, a, b in reversed(self._parts(layout)):
            following = [behind[target] for target in targets[chunk.module]]
            distance = behind.get(chunk.module, max(following, default=0))
            in_flight = problem.num_microbatches if problem.schedule == "gpipe" else distance + 1
            needed[chunk.group] += sums.static_bytes[b] - sums.static_bytes[a]
            needed[chunk.group] += min(in_flight, problem.num_microbatches) * (
                sums.saved_bytes[b] - sums.saved_bytes[a]
            )
            behind[chunk.module] = distance + 1
        return max(needed)
