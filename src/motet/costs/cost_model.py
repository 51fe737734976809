"""Loads, costs of layers as functions of them, and the table of all costs, which is saved as JSON.

The load of a microbatch consists of a few sums over its sequences. Each pass of a layer is linear in these sums, hence
quadratic in the lengths of the sequences (thesis 4.4.1). The frozen rule decides which parts of a backward a layer pays
(thesis 3.3.1; a layer's own weights do not make it need an input gradient):

| trainable weights | something trainable strictly before it | backward |
|---|---|---|
| yes | yes | input_gradient + weight_gradient |
| no | yes | input_gradient |
| yes | no | weight_gradient_alone: the gradient passes through the layer, but not out of it |
| no | no | nothing |
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from motet.assignment.sample import Sample
from motet.errors import UserError
from motet.families.encoders.token_counts import has_token_counts, token_counts
from motet.named_files import read_text
from motet.plan import ContextOptions
from motet.ragged_arrays import Floats
from motet.shapes.module_shape import ModuleWorkload


class Load(NamedTuple):
    """The sums over the sequences of one microbatch in one module on which times and sizes depend."""

    tokens: float = 0.0
    """Padding included where sequences are padded."""
    pairs: float = 0.0
    """Pairs of tokens that attention computes: the sum of squared lengths, if sequences stand apart."""
    sequences: float = 0.0
    incoming: float = 0.0
    """Tokens from other modules; times the number of rows if each row attends to all of them by cross-attention."""
    incoming_pairs: float = 0.0
    """Own tokens times incoming tokens, for cross-attention."""
    outputs: float = 0.0
    """Tokens of an encoder's output, or tokens with loss of a language model."""
    tokens_squared: float = 0.0
    """The square of `tokens`: a large microbatch outgrows caches, so that its tokens cost more."""

    def share(self, cp_size: int) -> "Load":
        """The load of one rank of a context-parallel group that divides tokens and pairs equally."""
        if cp_size == 1:
            return self
        return Load(
            tokens=self.tokens / cp_size,
            pairs=self.pairs / cp_size,
            sequences=self.sequences,
            incoming=self.incoming / cp_size,
            incoming_pairs=self.incoming_pairs / cp_size,
            outputs=self.outputs / cp_size,
            tokens_squared=self.tokens_squared / cp_size**2,
        )


def microbatch_load(
    workload: ModuleWorkload, data_module: str, samples: Sequence[Sample], sources: Sequence[str] = ()
) -> Load:
    """The load of these samples on the module whose layouts stand under `data_module`.

    `sources`: the modules whose outputs enter it. A contrastive loss's tokens are samples, its pairs those it compares
    between two towers.
    """
    if workload.kind == "loss":
        return Load(tokens=len(samples), pairs=len(samples) ** 2, sequences=len(samples), outputs=len(samples))
    sums = _sums(workload, data_module, samples, sources, {})
    if not sums.sequences:
        return Load(incoming=sums.incoming, outputs=sums.outputs)
    return Load(*_load(workload, *sums))


def sample_loads(
    workload: ModuleWorkload, data_module: str, samples: Sequence[Sample], sources: Sequence[str] = ()
) -> Floats:
    """[sample, value of a `Load`]: `microbatch_load` of each sample alone; 0 if it lacks the modality."""
    if workload.kind == "loss":
        return np.tile(microbatch_load(workload, data_module, samples[:1]), (len(samples), 1))
    known: dict[tuple[int, ...], int] = {}
    sums = [_sums(workload, data_module, (s,), sources, known) if s.has(data_module) else NOTHING for s in samples]
    columns = np.fromiter(chain.from_iterable(sums), np.float64, len(sums) * len(NOTHING)).reshape(len(sums), -1).T
    return np.stack(np.broadcast_arrays(*_load(workload, *columns)), axis=1)


class _Sums(NamedTuple):
    """Sums over the sequences of some samples."""

    length: float
    squared_length: float
    longest: float
    sequences: float
    incoming: float
    outputs: float
    seen: float
    """A generator's own tokens times the incoming ones that they attend to."""


NOTHING = _Sums(0, 0, 0, 0, 0, 0, 0)

Value = TypeVar("Value", float, Floats)


def _load(
    workload: ModuleWorkload,
    length: Value,
    squared_length: Value,
    longest: Value,
    sequences: Value,
    incoming: Value,
    outputs: Value,
    seen: Value,
) -> tuple[Value, Value, Value, Value, Value, Value, Value]:
    """Converts the values of `_Sums` into those of a `Load`, for one microbatch or for arrays of many."""
    tokens, pairs, entering, seeing = length, squared_length, incoming, length
    if workload.arrangement == "padded":
        tokens, pairs = sequences * longest, sequences * longest**2
        sees_all = workload.cross_attends and not workload.sees_own_items
        entering, seeing = (
            incoming * sequences if sees_all else incoming,
            longest if workload.sees_own_items else tokens,
        )
    elif workload.arrangement == "packed":
        pairs = length**2
    if workload.kind == "generator":
        return tokens, pairs, sequences, entering, seen, outputs, tokens**2
    return tokens, pairs, sequences, entering, seeing * incoming, outputs, tokens**2


def _sums(
    workload: ModuleWorkload,
    data_module: str,
    samples: Sequence[Sample],
    sources: Sequence[str],
    known: dict[tuple[int, ...], int],
) -> _Sums:
    """Each item of an encoder or a generator, and each tile of an item if the family's tiles are known, is a sequence;
    other modules have one sequence per sample. `known`: tokens of an item by its grid, as far as they have been
    computed."""
    if workload.kind == "generator":
        return _sums_of_generator(data_module, samples, sources)
    length = squared = longest = sequences = incoming = outputs = 0
    encodes_items = workload.encodes_items
    is_whole = encodes_items and not has_token_counts(workload.config)
    for sample in samples:
        layout = sample.layouts.get(data_module, ())
        for source in sources:
            incoming += sample.num_outputs(source, data_module)
        if not encodes_items:
            outputs += sample.num_loss_tokens.get(data_module, 0)
            if layout:
                num_tokens = sum([segment.num_tokens for segment in layout])
                length += num_tokens
                squared += num_tokens**2
                longest = max(longest, num_tokens)
                sequences += 1
            continue
        for segment in layout:
            outputs += segment.outputs
            of_grid = segment.num_tokens if is_whole else known.get(segment.grid)
            if of_grid is None:
                of_grid = known[segment.grid] = token_counts(workload.config, segment.grid).num_tokens
            num_tiles = max(1, segment.num_tokens // of_grid)
            num_tokens = segment.num_tokens // num_tiles
            length += num_tokens * num_tiles
            squared += num_tokens**2 * num_tiles
            longest = max(longest, num_tokens)
            sequences += num_tiles
    return _Sums(length, squared, longest, sequences, incoming, outputs, 0)


def _sums_of_generator(data_module: str, samples: Sequence[Sample], sources: Sequence[str]) -> _Sums:
    """Each image is a sequence, and attends to its own conditions, or to all that enters where none are its own."""
    length = squared = longest = sequences = incoming = outputs = 0
    seen = 0.0
    for sample in samples:
        outputs += sample.num_loss_tokens.get(data_module, 0)
        images = [segment.num_tokens for segment in sample.layouts.get(data_module, ())]
        if not images:
            continue
        length += sum(images)
        squared += sum([num_tokens**2 for num_tokens in images])
        longest = max(longest, *images)
        sequences += len(images)
        for source in sources:
            entering = sample.num_outputs(source, data_module)
            is_shared_out = any(segment.target == data_module for segment in sample.layouts.get(source, ()))
            incoming += entering * (1 if is_shared_out else len(images))
            seen += sum(images) * entering / (len(images) if is_shared_out else 1)
    return _Sums(length, squared, longest, sequences, incoming, outputs, seen)


class Quadratic(NamedTuple):
    """Seconds as a function of a load: a constant and one coefficient per sum."""

    constant: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    per_sequence: float = 0.0
    per_incoming: float = 0.0
    per_incoming_pair: float = 0.0
    per_output: float = 0.0
    per_token_squared: float = 0.0

    def seconds(self, load: Load) -> float:
        return self[0] + sum(a * b for a, b in zip(self[1:], load, strict=True))

    def plus(self, other: "Quadratic") -> "Quadratic":
        return Quadratic(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Quadratic":
        return Quadratic(*(factor * a for a in self))

    def share(self, shares: "Quadratic") -> "Quadratic":
        """A part of it: each term times its own share."""
        return Quadratic(*(a * b for a, b in zip(self, shares, strict=True)))

    def of_microbatch(self, cp_size: int) -> "Quadratic":
        """A function of one rank's load (`Load.share`) as a function of the microbatch's."""
        return Quadratic(self[0], *(a * share for a, share in zip(self[1:], _shares(cp_size), strict=True)))

    def of_rank(self, cp_size: int) -> "Quadratic":
        """A function of the microbatch's load as a function of one rank's."""
        return Quadratic(self[0], *(a / share for a, share in zip(self[1:], _shares(cp_size), strict=True)))


def _shares(cp_size: int) -> Load:
    return Load(*[1.0] * len(Load._fields)).share(cp_size)


ZERO = Quadratic()
WHOLE = Quadratic(*[1.0] * len(Quadratic._fields))


class LayerPasses(NamedTuple):
    """Seconds of one layer's passes, given which gradients it computes."""

    forward: Quadratic
    input_gradient: Quadratic
    weight_gradient: Quadratic
    """Seconds of the weight half of a backward."""
    recomputation: Quadratic
    """The forward that the backward repeats."""

    @property
    def backward(self) -> Quadratic:
        return self.input_gradient.plus(self.weight_gradient).plus(self.recomputation)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Seconds of one layer on each rank of a tensor-parallel group, its collectives included."""

    forward: Quadratic
    """Seconds of a forward that keeps the graph for a backward."""
    forward_without_graph: Quadratic
    input_gradient: Quadratic
    weight_gradient: Quadratic
    weight_gradient_alone: Quadratic

    def passes(
        self, input_gradient: bool, weight_gradient: bool, *, recomputed: Quadratic | None = None
    ) -> LayerPasses:
        """The passes of a layer that computes these gradients.

        `recomputed`: the share of each term of the forward that the backward repeats (`motet.costs.recomputed`); it
        matters only if the layer computes a gradient. None: nothing."""
        has_backward = input_gradient or weight_gradient
        alone = self.weight_gradient if input_gradient else self.weight_gradient_alone
        return LayerPasses(
            forward=self.forward if has_backward and recomputed != WHOLE else self.forward_without_graph,
            input_gradient=self.input_gradient if input_gradient else ZERO,
            weight_gradient=alone if weight_gradient else ZERO,
            recomputation=ZERO if recomputed is None or not has_backward else self.forward.share(recomputed),
        )

    def of_rank(self, cp_size: int) -> "LayerCost":
        """The costs as functions of one rank's load, if each rank of a context-parallel group computes all tokens."""
        return LayerCost(**{part.name: getattr(self, part.name).of_rank(cp_size) for part in fields(self)})


NO_COST = LayerCost(
    forward=ZERO, forward_without_graph=ZERO, input_gradient=ZERO, weight_gradient=ZERO, weight_gradient_alone=ZERO
)


@dataclass(frozen=True, kw_only=True)
class ModuleCosts:
    """Costs of one module at one tensor-parallel size."""

    layers: tuple[LayerCost, ...]
    stage_forward: Quadratic = ZERO
    """Calls and copies of a stage's forward beside its layers."""
    stage_backward: Quadratic = ZERO
    blocks_forward: Quadratic = ZERO
    """Additional cost of a stage with transformer blocks: positions, masks."""
    blocks_backward: Quadratic = ZERO


class Sharing(NamedTuple):
    """How ranks share the layers of a stage."""

    tp_size: int = 1
    cp_size: int = 1
    method: str = ""
    """Of context parallelism; under `hybrid` with the number of traders."""
    ep: int = 1

    @staticmethod
    def of(tp_size: int, cp_size: int, context: ContextOptions, ep: int) -> "Sharing":
        method = context.method if cp_size > 1 else ""
        return Sharing(tp_size, cp_size, f"{method} {context.ulysses_size}" if method == "hybrid" else method, ep)

    @property
    def num_ranks(self) -> int:
        """Ranks that exchange tensors while a stage computes."""
        return self.tp_size * self.cp_size * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Replicas over which experts are distributed."""
        return max(1, self.ep // self.tp_size)

    @property
    def name(self) -> str:
        of_context = f", cp_size {self.cp_size}, {self.method}" if self.cp_size > 1 else ""
        return f"tp_size {self.tp_size}" + of_context + (f", ep {self.ep}" if self.ep > 1 else "")


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """A measured link: latency_s + bytes / bandwidth.

    For an all-reduce, bytes are those of one rank's tensor, and the time is that of two ranks, which
    `motet.costs.communication` scales."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """All costs of a model on one kind of hardware."""

    modules: Mapping[str, Mapping[int, ModuleCosts]]
    """Costs by module and tensor-parallel size."""
    source: str
    """"profiled" or "analytic"."""
    hardware: str
    date: str
    message: LinkCost | None = None
    """Measured; None: the cluster's links count."""
    all_reduce: LinkCost | None = None
    collectives: Mapping[str, LinkCost] = field(default_factory=dict)
    """Other measured collectives of two ranks, by name; bytes are those of a whole tensor."""
    optimizer_constant_s: float = 0.0
    """Time of an iteration beside its actions, independent of the model."""
    optimizer_s_per_parameter: float = 0.0
    """Time per trainable parameter on a rank: its update and its part of the gradient norm."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """How the table was measured, and the errors of the fit."""
    sequence_parallel: Mapping[str, Mapping[int, ModuleCosts]] = field(default_factory=dict)
    """Like `modules`, with sequence parallelism; sizes without an entry cost the same as without it."""
    groups: Mapping[str, Mapping[Sharing, ModuleCosts]] = field(default_factory=dict)
    """Measured with context parallelism, or with experts over ranks: as functions of one rank's load, with all that the
    ranks exchange. What has no entry is computed from `modules`."""

    def of(self, module: str, tp_size: int, *, sequence_parallel: bool = False) -> ModuleCosts:
        """The costs of a module. Raises `UserError` if the table lacks them."""
        if sequence_parallel and tp_size in self.sequence_parallel.get(module, {}):
            return self.sequence_parallel[module][tp_size]
        if module not in self.modules:
            raise UserError(f"costs: there is no module {module!r}; the table has {', '.join(self.modules)}")
        by_size = self.modules[module]
        if tp_size not in by_size:
            sizes = ", ".join(str(size) for size in sorted(by_size))
            raise UserError(f"costs: {module} was not measured with tp_size {tp_size}, only {sizes}; profile it again")
        return by_size[tp_size]

    def of_group(self, module: str, sharing: Sharing) -> ModuleCosts | None:
        """The costs of a module whose ranks share it so, if they were measured."""
        return self.groups.get(module, {}).get(sharing)

    def of_groups(self, module: str, tp_size: int, cp_size: int) -> list[ModuleCosts]:
        """The costs of a module under all measured methods and distributions of experts with these sizes."""
        return [
            costs
            for sharing, costs in self.groups.get(module, {}).items()
            if (sharing.tp_size, sharing.cp_size) == (tp_size, cp_size)
        ]

    def with_costs_of(self, others: Iterable["CostTable"]) -> "CostTable":
        """This table with the modules' costs of others too, which were measured under other sizes."""
        tables = [self, *others]
        modules: dict[str, dict[int, ModuleCosts]] = {}
        groups: dict[str, dict[Sharing, ModuleCosts]] = {}
        for table in tables:
            for name, by_size in table.modules.items():
                modules.setdefault(name, {}).update(by_size)
            for name, by_sharing in table.groups.items():
                groups.setdefault(name, {}).update(by_sharing)
        notes = {key: note for table in tables for key, note in table.notes.items()}
        return replace(self, modules=modules, groups=groups, notes=notes)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> "CostTable":
        """Reads a table. Raises `UserError` if the file cannot be read or is not a cost table."""
        try:
            return CostTable.from_json(read_text(path))
        except OSError as error:
            raise UserError(f"costs: {path}: cannot be read ({error.strerror}); `motet profile` writes one") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"costs: {path} is not a cost table ({type(error).__name__}: {error}); `motet profile` writes one"
            ) from error

    def to_json(self) -> str:
        values = {key: value for key, value in asdict(replace(self, groups={})).items() if key not in TABLES}
        for table in TABLES:
            values[table] = {
                name: {str(size): _module_to_json(costs) for size, costs in sizes.items()}
                for name, sizes in getattr(self, table).items()
            }
        values["groups"] = {
            name: [{"sharing": sharing._asdict(), **_module_to_json(costs)} for sharing, costs in by_sharing.items()]
            for name, by_sharing in self.groups.items()
        }
        return json.dumps(values, indent=1)

    @staticmethod
    def from_json(text: str) -> "CostTable":
        values = json.loads(text)
        for table in TABLES:
            values[table] = {
                name: {int(size): _module_from_json(costs) for size, costs in sizes.items()}
                for name, sizes in values.get(table, {}).items()
            }
        values["groups"] = {
            name: {Sharing(**each["sharing"]): _module_from_json(each) for each in measured}
            for name, measured in values.get("groups", {}).items()
        }
        for key in ("message", "all_reduce"):
            values[key] = None if values[key] is None else _link_from_json(values[key])
        values["collectives"] = {name: _link_from_json(link) for name, link in values.get("collectives", {}).items()}
        for key in ("optimizer_constant_s", "optimizer_s_per_parameter"):
            _check_cost(key, values.get(key, 0.0))
        return CostTable(**values)


TABLES = ("modules", "sequence_parallel")

STAGE_PARTS = ("stage_forward", "stage_backward", "blocks_forward", "blocks_backward")


def _module_to_json(costs: ModuleCosts) -> dict[str, Any]:
    """JSON of a module's costs, where layers of equal cost are written once."""
    different = list(dict.fromkeys(_layer_key(layer) for layer in costs.layers))
    return {
        **{part: _terms(getattr(costs, part)) for part in STAGE_PARTS},
        "layers": [different.index(_layer_key(layer)) for layer in costs.layers],
        "costs": [{part: _terms(value) for part, value in key} for key in different],
    }


def _layer_key(layer: LayerCost) -> tuple[tuple[str, Quadratic], ...]:
    return tuple((part, getattr(layer, part)) for part in LayerCost.__dataclass_fields__)


def _terms(cost: Quadratic) -> dict[str, float]:
    return {name: value for name, value in cost._asdict().items() if value}


def _module_from_json(values: Mapping[str, Any]) -> ModuleCosts:
    different = [
        LayerCost(**{part: _quadratic_from_json(terms) for part, terms in layer.items()}) for layer in values["costs"]
    ]
    return ModuleCosts(
        layers=tuple(different[i] for i in values["layers"]),
        **{part: _quadratic_from_json(values[part]) for part in STAGE_PARTS},
    )


def _quadratic_from_json(terms: Mapping[str, Any]) -> Quadratic:
    for name, value in terms.items():
        _check_cost(name, value)
    return Quadratic(**terms)


def _link_from_json(values: Mapping[str, Any]) -> LinkCost:
    for name, value in values.items():
        _check_cost(name, value)
    if values["bytes_per_s"] == 0:
        raise ValueError("bytes_per_s: is 0; give a number above 0")
    return LinkCost(**values)


def _check_cost(name: str, value: object) -> None:
    """Raises `ValueError` unless a term is what a measurement can give."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: is {value!r}; give a number of at least 0"[:200])


def total(costs: Iterable[Quadratic]) -> Quadratic:
    result = [0.0] * len(Quadratic._fields)
    for cost in costs:
        for i, value in enumerate(cost):
            result[i] += value
    return Quadratic(*result)
