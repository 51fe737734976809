"""Executes what each rank would do under the rules by which transports pair sends with receives, to find deadlocks.

| rule | a message is transferred when | like |
|---|---|---|
| `tagged` | both ends have posted it, in any order | gloo with tags, MPI with enough requests |
| `per_pair` | it is first in the queue of the two ranks, at both ends | NCCL, a communicator for each pair |
| `per_rank` | it is first among all that the rank has posted, at both ends | NCCL, one communicator and stream |
| `blocking` | as `per_rank`, and until then the rank does nothing else | plain send and recv |

In all but the last a rank posts and goes on, and blocks only at an action whose inputs have not come. A reduction is
paired like a message, among all that take part (under `per_pair`, in a queue of its own group).

Whether a rank gets stuck does not depend on how long anything takes: no step that can happen ever prevents another, so
one execution in any order decides.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from enum import StrEnum

from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies, Value
from motet.schedule.lower import Message, Program, Step, messages
from motet.schedule.schedule import Schedule, grid


class QueueRule(StrEnum):
    TAGGED = "tagged"
    PER_PAIR = "per_pair"
    PER_RANK = "per_rank"
    BLOCKING = "blocking"


def can_deadlock(program: Program, rule: QueueRule) -> bool:
    """Whether some rank gets stuck when every rank runs its projection of the program."""
    return find_deadlock(program.projections, program.dependencies, rule) is not None


def naive_lists(schedule: Schedule, dependencies: Dependencies) -> tuple[tuple[Step, ...], ...]:
    """Each rank's actions with sends right after the producer and receives right before the consumer.

    What `motet.schedule.lower` does *not* do; without reductions."""
    lists: list[tuple[Step, ...]] = []
    for rank, actions in enumerate(schedule.ranks):
        steps: list[Step] = []
        for action in actions:
            steps += [m for v in dependencies.reads(action) for m in messages(v, dependencies) if m.receiver == rank]
            steps.append(action)
            steps += [m for v in dependencies.writes(action) for m in messages(v, dependencies) if m.sender == rank]
        lists.append(tuple(steps))
    return tuple(lists)


def find_deadlock(lists: Sequence[Sequence[Step]], dependencies: Dependencies, rule: QueueRule) -> str | None:
    """Runs each rank's list, in which no step may stand twice. None if all end; else the grid of where they stand."""
    position = _Execution(lists, dependencies, rule).run()
    if all(at == len(steps) for at, steps in zip(position, lists, strict=True)):
        return None
    return grid(lists, dict(enumerate(position)))


class _Execution:
    def __init__(self, lists: Sequence[Sequence[Step]], dependencies: Dependencies, rule: QueueRule) -> None:
        self.lists, self.dependencies, self.rule = lists, dependencies, rule
        self.position = [0] * len(lists)
        self.available: list[set[Value]] = [set() for _ in lists]
        self.queues: dict[tuple[Hashable, ...], deque[Step]] = defaultdict(deque)
        self.num_arrived: Counter[Step] = Counter()
        """Number of the step's participants that have it first in their queue, or are ready for it."""
        self.arrived: set[tuple[int, Step]] = set()
        self.awake = deque(range(len(lists)))
        self.complete: deque[Step] = deque()

    def run(self) -> list[int]:
        """Each rank's place at the end: that of the step that never ended, or the length of its list."""
        while self.awake or self.complete:
            if self.complete:
                self._end(self.complete.popleft())
            else:
                self._go_on(self.awake.popleft())
        unfinished: list[int] = []
        for rank, steps in enumerate(self.lists):
            pending = {step for key, queue in self.queues.items() if key[0] == rank for step in queue}
            done = self.position[rank]
            unfinished.append(next((i for i in range(done) if steps[i] in pending), done))
        return unfinished

    def _go_on(self, rank: int) -> None:
        steps = self.lists[rank]
        while self.position[rank] < len(steps):
            step = steps[self.position[rank]]
            if not self._can_begin(rank, step):
                return
            if isinstance(step, Compute):
                self._arrive(rank, step)
                return  # It goes on when the action has ended.
            self._post(rank, step)
            if self.rule is QueueRule.BLOCKING:
                return
            self.position[rank] += 1

    def _can_begin(self, rank: int, step: Step) -> bool:
        if (rank, step) in self.arrived:
            return False
        if isinstance(step, Compute):
            return self.available[rank].issuperset(self.dependencies.reads_on(step, rank))
        return not isinstance(step, Message) or rank == step.receiver or step.value in self.available[rank]

    def _queue(self, rank: int, step: Step) -> deque[Step]:
        if self.rule is QueueRule.TAGGED:
            return self.queues[rank, step]
        if self.rule is QueueRule.PER_PAIR:
            return self.queues[rank, frozenset(self._participants(step)), isinstance(step, Message)]
        return self.queues[(rank,)]

    def _participants(self, step: Step) -> tuple[int, ...]:
        return (step.sender, step.receiver) if isinstance(step, Message) else self.dependencies.ranks(step)

    def _post(self, rank: int, step: Step) -> None:
        queue = self._queue(rank, step)
        queue.append(step)
        if len(queue) == 1:
            self._arrive(rank, step)
        else:
            self.arrived.add((rank, step))

    def _arrive(self, rank: int, step: Step) -> None:
        self.arrived.add((rank, step))
        self.num_arrived[step] += 1
        if self.num_arrived[step] == len(self._participants(step)):
            self.complete.append(step)

    def _end(self, step: Step) -> None:
        for rank in self._participants(step):
            if isinstance(step, Compute):
                self.available[rank].update(self.dependencies.writes(step))
                self.position[rank] += 1
            else:
                queue = self._queue(rank, step)
                queue.popleft()
                if isinstance(step, Message) and rank == step.receiver:
                    self.available[rank].add(step.value)
                if self.rule is QueueRule.BLOCKING:
                    self.position[rank] += 1
            self.awake.append(rank)
        for rank in self._participants(step):
            if not isinstance(step, Compute) and (queue := self._queue(rank, step)):
                self._arrive(rank, queue[0])
