"""What mapping layers to devices is given, and which runs of layers fit on them
(`motet.planner.templates.stage_mapping`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from motet.planner.templates.node_tables import Group, Segments
from motet.ragged_arrays import Floats


class CutCosts(NamedTuple):
    """By the layer before which a stage ends, and for the whole chain's end: seconds until what it has made of one
    microbatch is where the next stage is, and until the gradients of it are back."""

    within: Sequence[float]
    """The next stage is on the same node."""
    between: Sequence[float]
    """It is on the next one. At the chain's end: the last module may be on another node, as there are several."""


@dataclass(frozen=True, kw_only=True)
class ChainCosts:
    """One module's layers, for each number of devices that a stage may have under one context-parallel size."""

    seconds: Mapping[int, Sequence[float]]
    """Forward and backward of one microbatch, as far as there is one (frozen layers), on so many devices."""
    static_bytes: Mapping[int, Sequence[float]] | None = None
    """On each of so many devices, whatever is in flight; None: nothing."""
    saved_bytes: Mapping[int, Sequence[float]] | None = None
    """On each of so many devices, for each microbatch in flight."""
    fixed_bytes: Mapping[int, float] | None = None
    """On each of so many devices, whatever layers a stage has; None: nothing."""
    cut_s: CutCosts | None = None
    """None: nothing."""
    cp_size: int = 1
    others: tuple["ChainCosts", ...] = ()
    """The same layers' under other context-parallel sizes: each stage may choose."""

    @property
    def layers(self) -> range:
        return range(len(next(iter(self.seconds.values()))))

    @property
    def all(self) -> tuple["ChainCosts", ...]:
        """Under each context-parallel size."""
        return self, *self.others

    def groups(self) -> Iterator[tuple[Group, "ChainCosts"]]:
        """All that a stage may have, and the costs that say what it takes there."""
        for costs in self.all:
            for size in costs.seconds:
                yield Group(size, costs.cp_size), costs


@dataclass(frozen=True, kw_only=True)
class MappingProblem:
    modules: Mapping[str, ChainCosts]
    """Encoders first; all of them enter the last."""
    devices_per_node: int
    num_microbatches: int | None
    device_bytes: float = inf


def segments_of(
    problem: MappingProblem, costs: ChainCosts, least_in_flight: int, *, num_nodes: int, is_on_every_path: bool
) -> Segments:
    """The stages that fit with so many microbatches in flight."""
    num_layers = len(costs.layers)
    by_group, cut_s, in_flight = {}, {}, {}
    for group, of_group in costs.groups():
        # Rounded, so that runs of the same layers at other places take exactly as long.
        table = _rounded(_sums(of_group.seconds[group.size]))
        table[np.tril_indices(num_layers + 1)] = inf
        in_flight[group] = in_flight_of(problem, of_group, group.size)
        table[in_flight[group] < least_in_flight] = inf
        by_group[group] = table
        if of_group.cut_s is not None:
            last_s = (of_group.cut_s.between if num_nodes > 1 else of_group.cut_s.within)[-1]
            cut_s[group] = np.array([[*cut[:-1], last_s] for cut in of_group.cut_s])
    return Segments(num_layers, by_group, in_flight, cut_s, is_on_every_path)


def in_flight_of(problem: MappingProblem, costs: ChainCosts, size: int) -> Floats:
    """[u, v]: how many microbatches may be in flight in a stage with these layers; less than 1: it does not fit."""
    if costs.static_bytes is None or costs.saved_bytes is None:
        return np.full((len(costs.layers) + 1, len(costs.layers) + 1), inf)
    fixed = 0.0 if costs.fixed_bytes is None else costs.fixed_bytes[size]
    left = problem.device_bytes - fixed - _sums(costs.static_bytes[size])
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.floor(left / np.maximum(_sums(costs.saved_bytes[size]), 0.0) * (1 + 1e-12))
    return np.where(left < 0, 0.0, np.where(np.isnan(fitting), inf, fitting))


def _sums(values: Sequence[float]) -> Floats:
    """[u, v]: of those from u to before v."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table: Floats = sums[None, :] - sums[:, None]
    return table


def _rounded(seconds: Floats) -> Floats:
    """To 40 of a float's 53 bits, of the largest. All are 0 if no sample has the module's modality."""
    largest = seconds.max()
    if largest == 0:
        return seconds
    unit = 2.0 ** (np.ceil(np.log2(largest)) - 40)
    return np.round(seconds / unit) * unit
