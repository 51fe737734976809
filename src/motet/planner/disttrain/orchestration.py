"""DistTrain's orchestration: the optimal number of devices and degrees of each module (DistTrain 5.1-5.2).

Modules are parallelism units with tensor, pipeline and data parallelism of their own. With M microbatches, b samples in
a module's microbatch, C(tp) seconds of forward and backward of a sample through the whole module, and s the share of
its slowest stage,

    fill   w = b C(tp) / vpp + messages between its stages
    stage  t = b C(tp) s
    reduce r = reduction of its gradients over its replicas
    T_iter   = max over encoders (w) + w of the language model + max over generators (w)
               + (M - 1) max over all (t) + max over all (r)

subject to the number of devices (sum of tp pp dp <= N) and to the memory of each (parameters and gradients, optimizer
state, activations of the microbatches in flight).

Deviations: stages hold whole layers and microbatches whole items, so nothing is relaxed or rounded, whereas the paper
solves a convex relaxation in the numbers of devices. Several encoders (generators) run side by side, so the longest of
them counts. Microbatches of all later stages are in flight as well (the paper omits the generator's). Interleaving
increases activations (Narayanan et al. 2021, 2.2).

Exactness: for each number of microbatches, every choice of every module is a row (devices, t, w, r, stages, room for
later stages). A row that another row beats in every column is never needed, neither alone nor in a sum or maximum with
others. The remaining rows are combined in the order of a lower bound until the bound reaches the best result.

Limits: samples cost the same; modules reduce side by side, but only after the last backward of all; tensor-parallel and
data-parallel groups have the same bandwidth wherever they are placed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from motet.errors import UserError
from motet.planner.layouts.partition import bottlenecks

Role = Literal["encoder", "language_model", "generator"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One parallelism unit: the costs of a whole module, and the degrees that it may have."""

    role: Role
    layer_costs: tuple[float, ...]
    """Cost of each layer in any measure, which decides how evenly stages can be cut."""
    seconds: Mapping[int, float]
    """C(tp) by allowed tensor-parallel size: forward and backward of one sample, under the frozen rule."""
    microbatch_s: Mapping[int, float] = field(default_factory=dict)
    """Additional time of each microbatch, by tensor-parallel size; 0 without an entry."""
    items_per_sample: int = 1
    """Items (images, clips) of a sample, between which microbatches may be cut; C is the cost of all of them."""
    state_bytes: float = 0.0
    """Parameters and gradients."""
    optimizer_bytes: float = 0.0
    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    """Activations of one sample on each rank of a tensor-parallel group, by its size; 0 without an entry."""
    boundary_s: Mapping[int, float] = field(default_factory=dict)
    """One sample's message to the next stage, and the message of its gradient, by tensor-parallel size; 0 without an
    entry."""
    reduce_s: float = 0.0
    """All gradients' bytes over the bandwidth of one device."""
    dp_sizes: tuple[int, ...] | None = None
    """None: all divisors of the global batch's items."""
    max_stages: int | None = None
    """Includes virtual stages."""
    equal_stages: bool = False
    """All stages, including virtual ones, hold equally many layers, as Megatron-LM requires."""
    max_devices: int | None = None
    vpp_sizes: tuple[int, ...] = (1,)
    """Stages of the module that a rank may hold (interleaved 1F1B)."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_costs)

    @cached_property
    def slowest_shares(self) -> np.ndarray:
        """[pp - 1]: share of the slowest stage in the module's time; infinite for an impossible number of stages."""
        limit = min(self.num_layers, self.max_stages or self.num_layers)
        # A module that no sample of the batch uses costs nothing; its layers then count as equal.
        layer_costs = self.layer_costs if any(self.layer_costs) else (1.0,) * self.num_layers
        if not self.equal_stages:
            return bottlenecks(layer_costs, limit) / sum(layer_costs)
        costs = np.array(layer_costs)
        slowest = [
            costs.reshape(pp, -1).sum(axis=1).max() if self.num_layers % pp == 0 else inf for pp in range(1, limit + 1)
        ]
        return np.array(slowest) / costs.sum()


class UnitDegrees(NamedTuple):
    tp: int
    pp: int
    dp: int
    vpp: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class OrchestrationProblem:
    units: Mapping[str, Unit]
    """Exactly one is the language model."""
    num_devices: int
    global_batch_size: int
    microbatch_size: int = 1
    """Samples in the language model's microbatch."""
    num_microbatches: int | None = None
    """Per replica, for all modules; None: follows from `microbatch_size`."""
    device_bytes: float = inf
    zero1: bool = True
    """Optimizer state is sharded over the module's replicas."""
    state_copies: int = 1
    """Number of replicas that keep the same shard, with `zero1`."""

    def __post_init__(self) -> None:
        if [unit.role for unit in self.units.values()].count("language_model") != 1:
            raise UserError("parallel.planner: disttrain needs exactly one language model")

    @property
    def language_model(self) -> Unit:
        return next(unit for unit in self.units.values() if unit.role == "language_model")


@dataclass(frozen=True, kw_only=True)
class Orchestration:
    degrees: Mapping[str, UnitDegrees]
    num_microbatches: int
    iteration_s: float

    @property
    def num_devices(self) -> int:
        return sum(degrees.num_devices for degrees in self.degrees.values())


SLACK = 1 + 1e-9
"""Tolerance, so that rounding does not decide whether a choice fits."""


@dataclass(frozen=True)
class _Rows:
    """Choices of one module or of several together, one per row."""

    devices: np.ndarray
    stage_s: np.ndarray
    fill_s: np.ndarray
    reduce_s: np.ndarray
    stages: np.ndarray
    """Number of stages of the longest chain."""
    room: np.ndarray
    """Number of later stages with which it still fits into memory."""
    degrees: Mapping[str, np.ndarray]
    """Degrees [rows, 4] of each module: tp, pp, dp, vpp."""

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, index: np.ndarray) -> "_Rows":
        return _Rows(
            self.devices[index],
            self.stage_s[index],
            self.fill_s[index],
            self.reduce_s[index],
            self.stages[index],
            self.room[index],
            {name: sizes[index] for name, sizes in self.degrees.items()},
        )

    def undominated(self, *, counts_stages: bool = True) -> "_Rows":
        """The rows that no other row dominates. `counts_stages`: earlier modules' memory depends on the stages."""
        stages = self.stages if counts_stages else np.zeros_like(self.stages)
        columns = np.stack([self.devices, self.stage_s, self.fill_s, self.reduce_s, stages, -self.room], axis=1)
        left = np.lexsort(columns.T[::-1])
        kept = []
        while len(left):
            kept.append(left[0])
            left = left[(columns[left] < columns[left[0]]).any(axis=1)]
        return self.take(np.array(kept, dtype=int))

    def beside(self, other: "_Rows") -> "_Rows":
        """Every row of one with every row of the other, side by side."""
        a, b = (index.ravel() for index in np.indices((len(self), len(other))))
        mine, its = self.take(a), other.take(b)
        return _Rows(
            mine.devices + its.devices,
            np.maximum(mine.stage_s, its.stage_s),
            np.maximum(mine.fill_s, its.fill_s),
            np.maximum(mine.reduce_s, its.reduce_s),
            np.maximum(mine.stages, its.stages),
            np.minimum(mine.room, its.room),
            {**mine.degrees, **its.degrees},
        )


_ZERO = np.zeros(1)
NOTHING = _Rows(_ZERO, _ZERO, _ZERO, _ZERO, _ZERO, np.full(1, inf), {})


def orchestrate(problem: OrchestrationProblem) -> Orchestration:
    """The choice with the least T_iter; of equal ones, one with the fewest devices.

    Raises `ValueError` if no choice fits into devices and memory.
    """
    grids = [_grid(problem, name) for name in problem.units]
    searches = []
    for count, dp_sizes in _microbatch_counts(problem):
        rows = {grid.name: _choices(grid, count, dp_sizes) for grid in grids}
        if all(map(len, rows.values())):
            floors = {name: _floor_s(problem, count, name, rows) for name in rows}
            searches.append((max(floor.min() for floor in floors.values()), count, rows, floors))
    best: Orchestration | None = None
    for bound, count, rows, floors in sorted(searches, key=lambda search: search[:2]):
        limit = inf if best is None else best.iteration_s * SLACK
        if bound > limit:
            break
        near = {name: r.take((floors[name] <= limit) & (floors[name] < inf)) for name, r in rows.items()}
        found = _best_combination(problem, count, near, limit) if all(map(len, near.values())) else None
        if found is not None and (best is None or _rank(found) < _rank(best)):
            best = found
    if best is None:
        raise UserError(
            f"parallel.planner: no layout of {', '.join(problem.units)} fits into {problem.num_devices} devices of "
            f"{problem.device_bytes / 2**30:.1f} GiB; give more devices, recompute or smaller microbatches"
        )
    return best


def evaluate_degrees(problem: OrchestrationProblem, degrees: Mapping[str, UnitDegrees]) -> Orchestration:
    """T_iter of a given choice, for comparisons. Raises `ValueError` if it is not allowed, or does not fit."""
    fixed = {
        name: replace(
            unit,
            seconds={degrees[name].tp: unit.seconds[degrees[name].tp]},
            dp_sizes=(degrees[name].dp,),
            vpp_sizes=(degrees[name].vpp,),
        )
        for name, unit in problem.units.items()
    }
    num_devices = sum(d.num_devices for d in degrees.values())
    restricted = replace(problem, units=fixed, num_devices=num_devices)
    for count, dp_sizes in _microbatch_counts(restricted):
        grids = [_grid(restricted, name, pp=degrees[name].pp) for name in restricted.units]
        rows = {grid.name: _choices(grid, count, dp_sizes) for grid in grids}
        found = _best_combination(restricted, count, rows, inf) if all(map(len, rows.values())) else None
        if found is not None:
            return found
    raise UserError(f"parallel: {dict(degrees)} does not fit into devices and memory, or is not allowed")


def _microbatch_counts(problem: OrchestrationProblem) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of microbatches, each with the language model's data-parallel sizes that result in it."""
    allowed = problem.language_model.dp_sizes or range(1, problem.num_devices + 1)
    if problem.num_microbatches is not None:
        dp_sizes = tuple(dp for dp in allowed if problem.global_batch_size % dp == 0)
        yield problem.num_microbatches, dp_sizes
        return
    for dp in allowed:
        if problem.global_batch_size % (dp * problem.microbatch_size) == 0:
            yield problem.global_batch_size // (dp * problem.microbatch_size), (dp,)


def _floor_s(problem: OrchestrationProblem, num_microbatches: int, name: str, rows: Mapping[str, _Rows]) -> np.ndarray:
    """Lower bound of the time of all combinations with each choice of one module; infinite if there is none.

    The other modules have their shortest fills and share the remaining devices without remainder."""
    mine, unit = rows[name], problem.units[name]
    fills: dict[Role, np.ndarray] = {unit.role: mine.fill_s}
    others = [(problem.units[other].role, r) for other, r in rows.items() if other != name]
    for role, r in others:
        fills[role] = np.maximum(fills.get(role, np.zeros(1)), r.fill_s.min())
    left = problem.num_devices - mine.devices
    enough = left >= sum(r.devices.min() for _, r in others)
    work = sum(float((r.stage_s * r.devices).min()) for _, r in others)
    stage_s = np.maximum(mine.stage_s, work / np.maximum(left, 1))
    reduce_s = np.maximum(mine.reduce_s, max((float(r.reduce_s.min()) for _, r in others), default=0.0))
    floor: np.ndarray = np.where(enough, sum(fills.values()) + (num_microbatches - 1) * stage_s + reduce_s, inf)
    return floor / SLACK


def _rank(orchestration: Orchestration) -> tuple[float, int]:
    """Times that differ by rounding are equal."""
    return float(f"{orchestration.iteration_s:.9g}"), orchestration.num_devices


@dataclass(frozen=True)
class _Grid:
    """All degrees of one module that the devices allow, with everything independent of the number of microbatches."""

    name: str
    unit: Unit
    num_items: int
    tp: np.ndarray
    dp: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    sample_s: np.ndarray
    microbatch_s: np.ndarray
    boundary_s: np.ndarray
    activation_bytes: np.ndarray
    layer_share: np.ndarray
    """Share of the stage with the most layers."""
    reduce_s: np.ndarray
    free_bytes: np.ndarray
    """Memory that parameters, gradients and optimizer state leave for activations."""

    def with_dp(self, dp_sizes: Sequence[int]) -> "_Grid":
        chosen = np.isin(self.dp, dp_sizes)
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.type is np.ndarray}
        return replace(self, **arrays)


def _grid(problem: OrchestrationProblem, name: str, *, pp: int | None = None) -> _Grid:
    """`pp`: only so many stages."""
    unit = problem.units[name]
    num_items = problem.global_batch_size * unit.items_per_sample
    most = min(num_items, problem.num_devices)
    dp_sizes = [dp for dp in unit.dp_sizes or range(1, most + 1) if num_items % dp == 0]
    axes = (list(unit.seconds), dp_sizes, _useful_stage_counts(unit) if pp is None else [pp], unit.vpp_sizes)
    grid = [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]
    tp, dp, pp_, vpp = grid
    most_devices = min(problem.num_devices, unit.max_devices or problem.num_devices)
    allowed = (tp * dp * pp_ <= most_devices) & ((vpp == 1) | ((pp_ * vpp <= unit.num_layers) & (pp_ > 1)))
    allowed &= pp_ * vpp <= (unit.max_stages or unit.num_layers)
    if unit.equal_stages:
        allowed &= unit.num_layers % (pp_ * vpp) == 0
    tp, dp, pp_, vpp = (axis[allowed] for axis in grid)
    layer_share = -(-unit.num_layers // pp_) / unit.num_layers
    kept_share = np.minimum(1.0, problem.state_copies / dp) if problem.zero1 else 1.0
    state = unit.state_bytes + unit.optimizer_bytes * kept_share
    return _Grid(
        name,
        unit,
        num_items,
        *(tp, dp, pp_, vpp),
        sample_s=np.array([unit.seconds[size] for size in tp.tolist()]),
        microbatch_s=np.array([unit.microbatch_s.get(size, 0.0) for size in tp.tolist()]),
        boundary_s=np.array([unit.boundary_s.get(size, 0.0) for size in tp.tolist()]),
        activation_bytes=np.array([unit.activation_bytes.get(size, 0.0) for size in tp.tolist()]),
        layer_share=layer_share,
        reduce_s=unit.reduce_s * layer_share / tp * 2 * (dp - 1) / dp,
        free_bytes=problem.device_bytes * SLACK - state * layer_share / tp,
    )


def _useful_stage_counts(unit: Unit) -> list[int]:
    """The smallest of those numbers of stages that have the same time and memory per stage."""
    first: dict[tuple[float, int], int] = {}
    for pp, share in enumerate(unit.slowest_shares.tolist(), start=1):
        first.setdefault((share, -(-unit.num_layers // pp)), pp)
    return list(first.values())


def _choices(grid: _Grid, num_microbatches: int, lm_dp_sizes: Sequence[int]) -> _Rows:
    """Every choice of one module that fits into memory on its own."""
    unit = grid.unit
    if unit.role == "language_model":
        grid = grid.with_dp(lm_dp_sizes)
    samples = -(-grid.num_items // (grid.dp * num_microbatches)) / unit.items_per_sample
    seconds = grid.sample_s * samples + grid.microbatch_s
    fill_s = seconds / grid.vpp + grid.pp * grid.boundary_s * samples
    per_microbatch = grid.activation_bytes * samples * grid.layer_share
    in_flight = grid.pp + np.where(grid.vpp > 1, (grid.pp - 1) / grid.vpp, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.floor(grid.free_bytes / per_microbatch - in_flight)
    room[per_microbatch * num_microbatches <= grid.free_bytes] = inf
    fits = (room >= 0) & (grid.free_bytes >= 0)
    rows = _Rows(
        (grid.tp * grid.dp * grid.pp).astype(float),
        seconds * unit.slowest_shares[grid.pp - 1],
        fill_s,
        grid.reduce_s,
        grid.pp.astype(float),
        room,
        {grid.name: np.stack([grid.tp, grid.pp, grid.dp, grid.vpp], axis=1)},
    )
    return rows.take(fits)


def _best_combination(
    problem: OrchestrationProblem, num_microbatches: int, rows: Mapping[str, _Rows], limit: float
) -> Orchestration | None:
    """The best combination of at most `limit` seconds."""
    encoders, generators, backbone = _by_role(problem, rows)
    if not (len(encoders) and len(generators) and len(backbone)):
        return None
    around = _around(encoders, generators)
    steps = num_microbatches - 1
    bounds = _bounds(problem.num_devices, steps, around, backbone)
    best = (limit * SLACK, inf)
    found: tuple[int, int] | None = None
    for k in np.argsort(bounds, kind="stable").tolist():
        if bounds[k] > best[0]:
            break
        times = around.fill_s + backbone.fill_s[k] + steps * np.maximum(around.stage_s, backbone.stage_s[k])
        times += np.maximum(around.reduce_s, backbone.reduce_s[k])
        devices = around.devices + backbone.devices[k]
        fits = (devices <= problem.num_devices) & (around.room >= backbone.stages[k])
        fits &= around.stages <= backbone.room[k]
        times = np.where(fits, times, inf)
        shortest = times.min()
        if shortest == inf:
            continue
        i = int(np.where(times == shortest, devices, inf).argmin())
        if (shortest, devices[i]) < best:
            best, found = (float(shortest), float(devices[i])), (i, k)
    if found is None:
        return None
    chosen = {
        **{name: d[found[0]] for name, d in around.degrees.items()},
        **{name: d[found[1]] for name, d in backbone.degrees.items()},
    }
    degrees = {name: UnitDegrees(*(int(size) for size in chosen[name])) for name in problem.units}
    return Orchestration(degrees=degrees, num_microbatches=num_microbatches, iteration_s=best[0])


def _by_role(problem: OrchestrationProblem, rows: Mapping[str, _Rows]) -> tuple[_Rows, _Rows, _Rows]:
    """The undominated rows of all encoders together, of all generators together, and of the language model."""
    # Reductions shorter than an unavoidable one make no difference and must not keep a row.
    reduce_s = max(float(r.reduce_s.min()) for r in rows.values())
    rows = {name: replace(r, reduce_s=np.maximum(r.reduce_s, reduce_s)) for name, r in rows.items()}

    def combined(role: Role) -> _Rows:
        together = NOTHING
        for name, unit in problem.units.items():
            if unit.role == role:
                own = rows[name].undominated(counts_stages=role != "encoder")
                together = own if together is NOTHING else together.beside(own)
                together = together.take(together.devices <= problem.num_devices)
                if together.degrees.keys() != own.degrees.keys():
                    together = together.undominated(counts_stages=role != "encoder")
        return together

    return combined("encoder"), combined("generator"), combined("language_model")


def _around(encoders: _Rows, generators: _Rows) -> _Rows:
    """Encoders and generators together: fills add up, `stages` are those of the generators, and `room` is what remains
    for stages of the language model."""
    both = encoders.beside(generators)
    e, g = (index.ravel() for index in np.indices((len(encoders), len(generators))))
    return replace(
        both,
        fill_s=encoders.fill_s[e] + generators.fill_s[g],
        stages=generators.stages[g],
        room=encoders.room[e] - generators.stages[g],
    )


def _bounds(num_devices: int, steps: int, around: _Rows, backbone: _Rows) -> np.ndarray:
    """Lower bound of the time of all combinations with each row of the language model, from the shortest fill around it
    and the shortest stages that the remaining devices allow."""
    order = np.argsort(around.devices, kind="stable")
    shortest = np.minimum.accumulate(around.stage_s[order])
    fitting = np.searchsorted(around.devices[order], num_devices - backbone.devices, side="right")
    stage_s = shortest[np.maximum(fitting - 1, 0)]
    bounds: np.ndarray = around.fill_s.min() + backbone.fill_s + steps * np.maximum(stage_s, backbone.stage_s)
    bounds += np.maximum(around.reduce_s.min(), backbone.reduce_s)
    bounds[fitting == 0] = inf
    return bounds / SLACK
