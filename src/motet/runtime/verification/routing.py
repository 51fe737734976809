"""The routing of mixtures of experts in a run, and its replay in the reference.

Two ways to compute one sum differ by rounding, and where two experts have nearly the same score, rounding decides which
is chosen: the token's gradients are then those of another expert, and the comparison says nothing. So the reference
chooses what the run chose, and compares everything else. Tokens for which it would have chosen otherwise are counted
(flips), and how far from a tie they were: a flip that rounding does not explain fails the check.

A router's choice is its `torch.topk` over all of its experts, the last one if there are several.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from motet.assignment.sample import Sample
from motet.devices import communication_device
from motet.models.stages.causal import CausalStage
from motet.models.stages.routers import ForwardRecord, find_routers
from motet.models.stages.stage import Batch
from motet.runtime.communication.agreement import gather_values

Choices = dict[tuple[str, int], Tensor]
"""By path of the router and index of the sample in the batch: the experts [T, k] that each token was sent to."""


@dataclass
class Flips:
    """Tokens for which the reference would have chosen other experts than the run."""

    num_routed: int = 0
    """Tokens, counted once for each mixture that they pass."""
    num_flipped: int = 0
    worst: float = 0.0
    """Of all flips, the largest distance from a tie: by how much the score of the last expert that the reference would
    have chosen exceeds that of one which the run chose, relative to the spread of the token's scores."""

    def add(self, scores: Tensor, own: Tensor, replayed: Tensor, *, of_groups: Tensor | None = None) -> None:
        """`scores`: [T, experts], -inf for experts of groups that were not chosen, whose scores are in `of_groups`."""
        flipped = (own.sort(-1).values != replayed.sort(-1).values).any(-1)
        self.num_routed += len(own)
        self.num_flipped += int(flipped.sum())
        if flipped.any():
            scores, own, replayed = scores[flipped].double(), own[flipped], replayed[flipped]
            finite = scores.masked_fill(scores.isinf(), 0.0)
            spread = finite.amax(-1) - finite.amin(-1)
            distance = scores.gather(1, own).amin(-1) - scores.gather(1, replayed).amin(-1)
            if of_groups is not None:  # Another group was chosen: sums of scores were nearly tied.
                known = of_groups[flipped].double()
                of_group = known.gather(1, own).mean(-1) - known.gather(1, replayed).mean(-1)
                distance = distance.where(distance.isfinite(), of_group.abs())
            self.worst = max(self.worst, float((distance / spread).max()))


TOPK = (torch.topk, Tensor.topk)


class _TopK(TorchFunctionMode):
    """Hears, or replaces, the choices of one router."""

    def __init__(self, router: Any, replaced: Tensor | None = None) -> None:
        super().__init__()
        matrix = next(parameter for parameter in router.parameters() if parameter.dim() == 2)
        self._num_experts, self._replaced = matrix.shape[0], replaced
        self.scores: Tensor | None = None
        self.of_groups: Tensor | None = None
        """Scores of all experts, where groups are chosen first, by which those of other groups are masked."""
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.dim() == 3 and scores.shape[1] * scores.shape[2] == self._num_experts:
            self.of_groups = scores.detach().flatten(1)
        if scores.dim() != 2 or scores.shape[-1] != self._num_experts:
            return result
        self.scores, self.chosen = scores.detach(), result[1].detach()
        if self._replaced is None:
            return result
        assert self._replaced.shape == result[1].shape, (self._replaced.shape, result[1].shape)
        return torch.return_types.topk((scores.gather(1, self._replaced), self._replaced))


@contextmanager
def _wrapped(router: Any, around: Any) -> Iterator[None]:
    """`around(original, args, kwargs)` in the place of the router's forward."""
    original, own = router.forward, vars(router).get("forward")
    router.forward = lambda *args, **kwargs: around(original, args, kwargs)
    try:
        yield
    finally:
        del router.forward
        if own is not None:
            router.forward = own


class RecordedRouting(ForwardRecord[tuple[str, Tensor]]):
    """The choices of one stage in the forwards of an iteration, for the tokens that this rank holds."""

    def __init__(self, stage: CausalStage, batch: Batch) -> None:
        super().__init__()
        self._places = {id(sample): index for index, sample in enumerate(batch.samples)}
        self.rows: list[tuple[str, Tensor]] = []
        """For each call of a router: its path, and [n, 3 + k]: the sample, its tokens, the place in it, the choices."""
        self.routers = routers_of(stage.module)
        self._stage = stage

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the iteration runs."""
        with ExitStack() as wraps:
            for path, router in self.routers:
                wraps.enter_context(_wrapped(router, self._hear(path, router)))
            self._stage.observers.append(self)
            try:
                yield
            finally:
                self._stage.observers.remove(self)

    def _hear(self, path: str, router: nn.Module) -> Any:
        def call(original: Any, args: Any, kwargs: Any) -> Any:
            with _TopK(router) as mode:
                result = original(*args, **kwargs)
            if mode.chosen is not None:
                self.record((path, mode.chosen))
            return result

        return call

    def add(self, samples: Sequence[Sample], sample_of_row: Tensor, place_of_row: Tensor, device: torch.device) -> None:
        (held,) = torch.nonzero(sample_of_row >= 0, as_tuple=True)
        index = torch.tensor([self._places.get(id(sample), -1) for sample in samples])
        lengths = torch.tensor([sample.num_tokens(self._stage.name) for sample in samples])
        owner = sample_of_row[held]
        own = torch.stack([index[owner], lengths[owner], place_of_row[held]], dim=1)
        own, held = own[index[owner] >= 0], held[index[owner] >= 0]  # Idle cells have a token of nobody's.
        for path, chosen in self.recorded:
            self.rows.append((path, torch.cat([own, chosen.cpu()[held]], dim=1)))


@contextmanager
def recorded_routing(stages: Sequence[nn.Module], batch: Batch) -> Iterator[list[RecordedRouting]]:
    """Records the routing of this rank's language models while an iteration runs."""
    records = [RecordedRouting(stage, batch) for stage in stages if isinstance(stage, CausalStage)]
    with ExitStack() as attached:
        for record in records:
            if record.routers:
                attached.enter_context(record.attached())
        yield records


@dataclass(frozen=True)
class Routing:
    """The routing of a whole batch."""

    choices: Choices
    disagreements: list[str]
    """In words: where ranks that hold the same tokens chose differently."""


def collect_routing(records: Sequence[RecordedRouting]) -> Routing | None:
    """The routing of all tokens, on rank 0 (None elsewhere). Collective."""
    rank, device = dist.get_rank(), communication_device()
    mine = [row for record in records for row in record.rows]
    everyone = gather_values(list[tuple[str, tuple[int, int]]], [(path, tuple(rows.shape)) for path, rows in mine])
    choices: Choices = {}
    disagreements: dict[str, None] = {}
    for source, described in enumerate(everyone):
        for number, (path, shape) in enumerate(described):
            if source == rank != 0:
                dist.send(mine[number][1].to(device).contiguous(), 0)
            elif rank == 0:
                rows = mine[number][1] if source == 0 else torch.empty(shape, dtype=torch.long, device=device)
                if source:
                    dist.recv(rows, source)
                _put(choices, path, rows.cpu(), disagreements)
    return Routing(choices, list(disagreements)) if rank == 0 else None


def _put(choices: Choices, path: str, rows: Tensor, disagreements: dict[str, None]) -> None:
    for index in rows[:, 0].unique().tolist():
        own = rows[rows[:, 0] == index]
        length, places, chosen = int(own[0, 1]), own[:, 2], own[:, 3:].sort(dim=1).values
        known = choices.setdefault((path, index), torch.full((length, chosen.shape[1]), -1))
        if ((known[places] != chosen) & (known[places] >= 0)).any():
            disagreements[f"ranks that hold the same tokens send them to different experts in {path}"] = None
        known[places] = chosen


@contextmanager
def replayed_routing(models: Sequence[nn.Module], choices: Choices) -> Iterator[Flips]:
    """Makes the routers of plain transformers models, which run sample by sample, choose as the run did."""
    flips = Flips()
    with ExitStack() as wraps:
        for model in models:
            for path, router in routers_of(model):
                recorded = [chosen for (own, _), chosen in sorted(choices.items(), key=_place) if own == path]
                if recorded:
                    wraps.enter_context(_wrapped(router, _replay(router, iter(recorded), flips)))
        yield flips


def _place(item: tuple[tuple[str, int], Tensor]) -> tuple[str, int]:
    return item[0]


def routers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The routers of a transformers model, and their paths."""
    names = {module: path for path, module in model.named_modules()}
    return [(names[router], router) for router, _ in find_routers(model)]


def _replay(router: nn.Module, recorded: Iterator[Tensor], flips: Flips) -> Any:
    def call(original: Any, args: Any, kwargs: Any) -> Any:
        chosen = next(recorded).to(args[0].device if args else None)
        with _TopK(router, chosen) as mode:
            result = original(*args, **kwargs)
        assert mode.scores is not None
        assert mode.chosen is not None
        flips.add(mode.scores, mode.chosen, chosen, of_groups=mode.of_groups)
        return result

    return call
