"""How many nodes each pipeline has after nodes were lost or joined (thesis 2.5.1): simple, borrow, merge.

1. Simple: a pipeline with at least n0 nodes left takes the template of that size.
2. Borrow: one with fewer takes nodes, one by one, from the pipeline that has most.
3. Merge: where nobody can yield enough, incomplete ones merge with one another, the last with the smallest pipeline.

The thesis merges any two pipelines; incomplete ones go first here, because then f + 1 pipelines remain whenever there
are (f + 1) n0 nodes: somebody merges only while all together have fewer than n0 nodes to spare, and still do after it,
so h pipelines with (f + 1) n0 <= N' < (h + 1) n0 nodes are at least f + 1. A pipeline without a node is given up; where
that leaves fewer than f + 1, others can spare the nodes of a new one.

Nodes that join complete pipelines first; then they make new pipelines or let pipelines grow, whichever is faster by
`estimate`. A node that no template takes is a spare (what has merged may be more than the largest), and so is one that
could only begin a pipeline that cannot be run: there are never more pipelines than microbatches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

StepKind = Literal["simple", "borrow", "merge", "give_up", "fill", "grow", "new", "spare"]


@dataclass(frozen=True)
class Step:
    """What was done for one pipeline."""

    kind: StepKind
    pipeline: int | None
    """By its number before; new ones are numbered on. None: `num_nodes` wait outside."""
    num_nodes: int
    """That it has after the step."""
    other: int | None = None
    """Whom it borrowed from or merged with."""

    def __str__(self) -> str:
        if self.pipeline is None:
            return f"{self.num_nodes} nodes wait"
        partner = "" if self.other is None else f" with {self.other}" if self.kind == "merge" else f" from {self.other}"
        return f"{self.kind}{partner}: pipeline {self.pipeline} has {self.num_nodes} nodes"


Estimate = Callable[[Sequence[int]], float]
"""Numbers of nodes of all pipelines -> seconds of an iteration; infinite if they cannot be run."""


@dataclass
class _Sizes:
    fewest: int
    most: int
    num_needed: int
    """f + 1."""
    nodes: dict[int, int]
    next_number: int
    steps: list[Step] = field(default_factory=list)

    def note(self, kind: StepKind, pipeline: int, other: int | None = None) -> None:
        self.steps.append(Step(kind, pipeline, self.nodes.get(pipeline, 0), other))

    @property
    def incomplete(self) -> list[int]:
        """The fullest first."""
        return sorted((p for p, n in self.nodes.items() if n < self.fewest), key=lambda p: (-self.nodes[p], p))

    @property
    def complete(self) -> list[int]:
        """The largest first."""
        return sorted((p for p, n in self.nodes.items() if n >= self.fewest), key=lambda p: (-self.nodes[p], p))

    @property
    def to_spare(self) -> int:
        return sum(self.nodes[p] - self.fewest for p in self.complete)

    def borrow(self, pipeline: int) -> None:
        while self.nodes[pipeline] < self.fewest:
            lender = self.complete[0]
            self.nodes[lender] -= 1
            self.nodes[pipeline] += 1
            self.note("borrow", pipeline, lender)

    def merge(self, pipeline: int, other: int) -> int:
        """Into `other`. Returns how many nodes are more than a template takes."""
        together = self.nodes[other] + self.nodes.pop(pipeline)
        self.nodes[other] = min(together, self.most)
        self.note("merge", other, pipeline)
        return together - self.nodes[other]

    def begin(self, num_nodes: int, kind: StepKind) -> int:
        """A new pipeline."""
        pipeline, self.next_number = self.next_number, self.next_number + 1
        self.nodes[pipeline] = num_nodes
        self.note(kind, pipeline)
        return pipeline

    def give_up_empty(self) -> None:
        for pipeline in [p for p, n in self.nodes.items() if n == 0]:
            del self.nodes[pipeline]
            self.note("give_up", pipeline)

    def fill(self, num_free: int) -> int:
        """Incomplete pipelines take free nodes. Returns how many remain."""
        for pipeline in self.incomplete:
            taken = min(num_free, self.fewest - self.nodes[pipeline])
            if taken:
                self.nodes[pipeline] += taken
                num_free -= taken
                self.note("fill", pipeline)
        return num_free

    def complete_all(self, num_free: int) -> int:
        """Returns how many nodes are free then."""
        while self.incomplete:
            pipeline, *others = self.incomplete
            if self.fewest - self.nodes[pipeline] <= self.to_spare:
                self.borrow(pipeline)
            elif others:
                num_free += self.merge(others[0], pipeline)
            else:
                num_free += self.merge(pipeline, self.complete[-1])
            num_free = self.fill(num_free)
        return num_free

    def begin_needed(self, num_free: int) -> int:
        """Pipelines in the place of those given up, as far as f + 1 need them. Returns the free nodes that remain."""
        while len(self.nodes) < self.num_needed:
            taken = min(num_free, self.fewest)
            num_free -= taken
            self.borrow(self.begin(taken, "new"))
        return num_free

    def take_in(self, num_free: int, estimate: Estimate) -> int:
        """Free nodes make pipelines grow or make new ones. Returns how many remain as spares."""
        options = []
        for num_new in range(num_free // self.fewest + 1):
            idle, nodes = self._grown(num_free, num_new)
            seconds = estimate(list(nodes.values()))
            if num_new == 0 or math.isfinite(seconds):
                options.append((idle, seconds, num_new, nodes))
        # What leaves fewer nodes idle goes first.
        idle, _, num_new, grown = min(options, key=lambda option: option[:2])
        for pipeline, num_nodes in grown.items():
            if pipeline in self.nodes and self.nodes[pipeline] < num_nodes:
                self.nodes[pipeline] = num_nodes
                self.note("grow", pipeline)
        for _ in range(num_new):
            self.begin(grown[self.next_number], "new")
        one_more = math.isfinite(estimate([*self.nodes.values(), self.fewest]))
        if idle and one_more and self.fewest - idle <= self.to_spare:
            self.borrow(self.begin(idle, "new"))
            return 0
        if idle:
            self.steps.append(Step("spare", None, idle))
        return idle

    def _grown(self, num_free: int, num_new: int) -> tuple[int, dict[int, int]]:
        """(nodes that nobody can take, the nodes of all pipelines) if so many new pipelines are begun."""
        nodes = {**self.nodes, **{self.next_number + i: self.fewest for i in range(num_new)}}
        idle = num_free - num_new * self.fewest
        while idle and min(nodes.values()) < self.most:
            smallest = min(nodes, key=lambda p: (nodes[p], p))
            nodes[smallest] += 1
            idle -= 1
        return idle, nodes


def new_sizes(
    before: Sequence[int],
    left: Sequence[int],
    num_joined: int,
    *,
    fewest: int,
    most: int,
    num_needed: int,
    estimate: Estimate,
) -> tuple[dict[int, int], list[Step], int]:
    """Nodes of each pipeline, by its number; the steps that led there; spare nodes.

    `before`, `left`: nodes of each pipeline before and after the losses. `fewest`, `most`: n0 and the largest template.
    `num_needed`: f + 1. All together there must be at least `num_needed * fewest` nodes."""
    assert sum(left) + num_joined >= num_needed * fewest
    sizes = _Sizes(fewest, most, num_needed, dict(enumerate(left)), next_number=len(left))
    for pipeline, (was, now) in enumerate(zip(before, left, strict=True)):
        if fewest <= now < was:
            sizes.note("simple", pipeline)
    sizes.give_up_empty()
    num_free = sizes.begin_needed(sizes.complete_all(sizes.fill(num_joined)))
    spares = sizes.take_in(num_free, estimate) if num_free else 0
    return sizes.nodes, sizes.steps, spares
