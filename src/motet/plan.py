"""The plan: which ranks hold which layers. Planners write it; simulator and runtime read it.

A plan is a readable JSON file that round-trips (`Plan.to_json`, `Plan.from_json`), so that it can be edited by hand.
Layers are numbered as docs/architecture.md says.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from motet.errors import UserError
from motet.recomputation import check_entries, split_entry

LayerRange = tuple[int, int]
"""Half-open: [first, last)."""

VERSION = 1
"""Version of the plan file format."""
MAX_MICROBATCHES = 1_000_000
"""Most microbatches of a replica, far more than any batch is cut into: a schedule has actions for each."""

POST_BALANCED = "post_balanced"
"""The assignment under which each replica of a module may exchange with each replica of another one."""
DEFAULT_ASSIGNMENT = "contiguous"
"""The batch in the order in which it comes."""

ModuleKind = Literal["encoder", "language_model", "generator", "tower", "loss"]

LANGUAGE_MODEL = "language_model"
"""Name of the language model among the modules; the user names encoders and towers."""

CONTRASTIVE = "contrastive"
"""Name of the contrastive loss among the modules."""

DECODER = "decoder"
"""Name of the caption decoder among the modules."""


def queries_of(generator: str) -> str:
    """Name of the module that holds a generator's query tokens."""
    return f"{generator}_queries"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of layers on a group of ranks."""

    layers: LayerRange
    ranks: tuple[int, ...]
    """The group, tensor-parallel axis fastest: ranks[cp * tp_size + tp]."""
    tp_size: int = 1
    cp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A chain of stages that together hold every layer of the module once."""

    stages: tuple[Stage, ...]

    @cached_property
    def shares_context(self) -> bool:
        """Whether some stage has context parallelism: samples are then packed in all stages."""
        return any(stage.cp_size > 1 for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Distribution of a microbatch's tokens over context-parallel groups."""

    block_size: int = 128
    """Tokens that stay together."""
    policy: str = "lpt"
    """Distribution policy: a key of `motet.attention.masks.distribution.POLICIES`."""
    method: Literal["all_gather", "ulysses", "ring", "hybrid"] = "all_gather"
    """Keys and values come to the queries at once or from rank to rank (ring), or tokens are traded for heads; hybrid:
    successive ranks trade, and keys and values go around among those with the same heads."""
    ulysses_size: int = 2
    """Under `hybrid`: number of successive ranks that trade tokens for heads; it divides the group's size."""
    backend: Literal["auto", "triton", "flex", "dense"] = "auto"
    """Attention backend; auto: the best one for the device."""
    media_attention: str = "causal"
    """Mask of media tokens that the balance assumes: a kind of attention, or a registered mask's name."""

    def num_traders(self, cp_size: int) -> int:
        """Number of successive ranks that trade tokens for heads. Raises `UserError` where it does not divide."""
        if self.method != "hybrid" or cp_size == 1:
            return cp_size if self.method == "ulysses" else 1
        if cp_size % self.ulysses_size:
            raise UserError(
                f"context.ulysses_size: {self.ulysses_size} does not divide cp_size {cp_size}; give a divisor"
            )
        return self.ulysses_size


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    kind: ModuleKind
    num_layers: int
    replicas: tuple[Replica, ...]
    """Replicas; they need not look alike, and modules may have different numbers of them."""
    trainable: tuple[LayerRange, ...] = ()
    """The layers with a trainable parameter."""
    tied: tuple[tuple[int, int], ...] = ()
    """Pairs of layers that share a parameter (input and output embedding)."""
    copy_of: str | None = None
    """The module whose parameters and data this one repeats on other ranks (Cornstarch's encoders-replicated)."""
    sequence_parallel: bool = False
    """Inside tensor-parallel groups, norms and residuals hold a share of the sequence each."""
    fully_sharded: bool = False
    """Each rank of a group keeps a share of parameters, gradients and optimizer state only, and gathers the others'
    parameters to compute (FSDP). The group: the stage's context-parallel ranks in `sharded_replicas` replicas."""
    sharded_replicas: int = 1
    """With `fully_sharded`: number of successive replicas whose ranks share the parameters. All replicas: nothing is
    held twice; fewer: shares are summed over the groups (hybrid); 1: ranks of one context-parallel group share."""
    whole_parameters: bool = False
    """With replicas that share: parameters are gathered once in a step and whole until its end, and only gradients are
    summed block by block (ZeRO-2)."""
    ep: int = 1
    """Ranks over which the experts of each layer are distributed, each expert whole on one of them: those of a
    tensor-parallel group, or of the groups of ep / tp_size replicas, which exchange tokens. 1: experts are cut as other
    weights are."""
    loss_weight: float = 0.0
    """Weight of the loss that the module's last layer computes; 0: the module has none."""
    context: ContextOptions = ContextOptions()
    """Options used where cp_size is larger than 1."""
    num_microbatches: int | None = None
    """Per replica, where the module cuts the batch otherwise than the plan says; of a loss: the contrastive batches."""

    @cached_property
    def wrong_stages(self) -> str | None:
        """What is wrong with the stages of the first replica that has wrong ones. Searches make many plans of the same
        modules, which are checked once."""
        for r, replica in enumerate(self.replicas):
            wrong = _wrong_stages(self, replica)
            if wrong is not None:
                return f"replicas[{r}]{wrong}"
        return None

    def is_trainable(self, layers: LayerRange) -> bool:
        return any(first < layers[1] and layers[0] < last for first, last in self.trainable)

    @property
    def tp_sizes(self) -> set[int]:
        return {stage.tp_size for replica in self.replicas for stage in replica.stages}

    @property
    def shares_over_replicas(self) -> bool:
        """Whether replicas share the parameters, each rank keeping some rows of every one."""
        return self.fully_sharded and self.sharded_replicas > 1

    def sharing_groups(self, replica: int, stage: int) -> list[tuple[int, ...]]:
        """By place in the tensor-parallel groups, the ranks that share the stage's parameters with those of this
        replica's stage, in the order of their shares."""
        number = self.sharded_replicas
        first = replica // number * number
        replicas = self.replicas[first : first + number]
        members = [sorted(ranks) for replica in replicas for ranks in tensor_parallel_groups(replica.stages[stage])]
        return [tuple(sorted(ranks)) for ranks in zip(*members, strict=True)]

    @property
    def replicas_sharing_experts(self) -> int:
        """Number of replicas over which experts are distributed; their stages run their microbatches together."""
        return max(1, self.ep // self.replicas[0].stages[0].tp_size)

    def data_module(self, name: str) -> str:
        """Returns the module whose layouts and features the module `name` reads."""
        return self.copy_of or name


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Output of `source` enters `target` at the given layers (token merging: layer 0; cross-attention: later ones)."""

    source: str
    target: str
    layers: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True)
class Plan:
    modules: Mapping[str, ModulePlan]
    edges: tuple[Edge, ...]
    num_microbatches: int
    """Number of microbatches per replica of every module, unless an assignment chooses another number."""
    replica_microbatches: tuple[int, ...] = ()
    """Number of microbatches of replica 0, 1, ... of every module, if unequal pipelines get unequal shares of the
    batch; (): `num_microbatches` each."""
    schedule: str = "1f1b"
    """A key of `motet.schedule.generators.GENERATORS`."""
    assignment: str = DEFAULT_ASSIGNMENT
    """Policy that cuts every global batch: a key of `motet.balancing.policies.ASSIGNMENTS`."""
    max_packed_tokens: int | None = None
    """Token limit of a packed sequence: larger language-model microbatches are cut; None: no limit."""
    planner: str = "explicit"
    """Planner that made the plan."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are recomputed in the backward pass: `name`, or `name:kind` (`motet.recomputation`)."""
    recompute_features: tuple[str, ...] = ()
    """Towers whose forward keeps no graph: the backward runs it again from the stage's input (DistMM 5.4, for batches
    that are too large for the graphs of all microbatches between two batch-syncs)."""
    zero1: bool = False
    """Whether the optimizer's state is sharded over the replicas, whatever the run file says."""
    run_ahead: bool = False
    """Whether encoders that need no backward run the next batch's forwards (`motet.assignment.next_batch`)."""
    version: int = VERSION

    def __post_init__(self) -> None:
        check_plan(self)

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(rank for _, _, _, stage in self.stages() for rank in stage.ranks)

    def stages(self) -> Iterator[tuple[str, int, int, Stage]]:
        """(module, replica index, stage index, stage), in the order of the file."""
        for name, module in self.modules.items():
            for r, replica in enumerate(module.replicas):
                for s, stage in enumerate(replica.stages):
                    yield name, r, s, stage

    def num_microbatches_of(self, name: str) -> int:
        """Number of microbatches per replica of the module."""
        own = self.modules[name].num_microbatches
        return self.num_microbatches if own is None else own

    @cached_property
    def loss_module(self) -> str | None:
        """Name of the contrastive loss, if there is one."""
        return next((name for name, module in self.modules.items() if module.kind == "loss"), None)

    def stages_of_rank(self, rank: int) -> list[tuple[str, int, int, Stage]]:
        return self._stages_by_rank.get(rank, [])

    @cached_property
    def _stages_by_rank(self) -> dict[int, list[tuple[str, int, int, Stage]]]:
        result: dict[int, list[tuple[str, int, int, Stage]]] = {}
        for entry in self.stages():
            for rank in entry[3].ranks:
                result.setdefault(rank, []).append(entry)
        return result

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Raises `ValueError` naming the key that is wrong and what would be right."""
        from motet.strict_parsing import parse_strictly

        return parse_strictly(Plan, text, what="plan")


def tensor_parallel_groups(stage: Stage) -> list[tuple[int, ...]]:
    """Returns the tensor-parallel groups of a stage, one for each share of the tokens; consecutive in `stage.ranks`."""
    return [stage.ranks[c * stage.tp_size : (c + 1) * stage.tp_size] for c in range(stage.cp_size)]


def places(ranks: Iterable[int]) -> list[int]:
    """The ranks in the order in which torch.distributed numbers the members of a group."""
    return sorted(ranks)


def expert_groups(module: ModulePlan, layers: LayerRange) -> list[tuple[int, ...]]:
    """Returns the groups of ranks over which the experts of these layers are distributed. Stages with these layers are
    equal in all replicas."""
    stages = [stage for replica in module.replicas for stage in replica.stages if stage.layers == layers]
    groups = []
    for first in range(0, len(stages), module.replicas_sharing_experts):
        sharing = stages[first : first + module.replicas_sharing_experts]
        for members in zip(*map(tensor_parallel_groups, sharing), strict=True):
            groups.append(tuple(rank for ranks in members for rank in ranks))
    return groups


def check_plan(plan: Plan) -> None:
    """Raises `ValueError` for a plan that no runtime could execute, naming the place."""
    _require(plan.version == VERSION, f"version: is {plan.version}; this motet reads {VERSION}, so make the plan anew")
    _require(bool(plan.modules), "modules: is empty; give at least one module")
    _check_microbatches(plan.num_microbatches, "num_microbatches")
    for r, count in enumerate(plan.replica_microbatches):
        _check_microbatches(count, f"replica_microbatches[{r}]")
    limit = plan.max_packed_tokens
    _require(limit is None or limit >= 1, f"max_packed_tokens: is {limit}; give at least 1, or null")
    for name, module in plan.modules.items():
        _check_module(plan, name, module)
        _require(module.wrong_stages is None, f"modules.{name}.{module.wrong_stages}")
    _check_edges(plan)
    used = {rank for *_, stage in plan.stages() for rank in stage.ranks}
    # As many numbers as there are, or one of them is missing; the largest may be anything.
    unused = next(rank for rank in range(len(used) + 1) if rank not in used)
    _require(
        len(used) == plan.num_ranks,
        f"ranks: [{unused}] of 0..{plan.num_ranks - 1} have no stage; number the ranks without gaps",
    )
    for name, _ in map(split_entry, plan.recompute):
        _require(name in plan.modules, f"recompute: there is no module {name!r}")
    for name in plan.recompute_features:
        _require(name in plan.modules, f"recompute_features: there is no module {name!r}")
    try:
        check_entries(plan.recompute)
    except ValueError as error:
        raise ValueError(f"plan: {error}") from None
    module_order(plan)
    _check_losses(plan)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"plan: {message}")


def _check_microbatches(number: int, where: str) -> None:
    _require(number >= 1, f"{where}: is {number}; give at least 1")
    _require(number <= MAX_MICROBATCHES, f"{where}: is {number}; give at most {MAX_MICROBATCHES}")


def _check_module(plan: Plan, name: str, module: ModulePlan) -> None:
    where = f"modules.{name}"
    _require(bool(module.replicas), f"{where}.replicas: is empty; give at least one replica")
    if module.num_microbatches is not None:
        _check_microbatches(module.num_microbatches, f"{where}.num_microbatches")
    counts = plan.replica_microbatches
    _require(
        not counts or len(counts) == len(module.replicas),
        f"replica_microbatches: has {len(counts)} numbers, but {name} has {len(module.replicas)} replicas",
    )
    _require(
        module.context.block_size >= 1, f"{where}.context.block_size: is {module.context.block_size}; give at least 1"
    )
    for first, last in module.trainable:
        _require(
            0 <= first < last <= module.num_layers,
            f"{where}.trainable: [{first}, {last}) is not within the {module.num_layers} layers",
        )
    for a, b in module.tied:
        _require(
            0 <= a < b < module.num_layers,
            f"{where}.tied: {a} and {b} are not two layers, in their order, of the {module.num_layers}",
        )
    _require(
        not module.fully_sharded or (module.kind != "loss" and module.copy_of is None),
        f"{where}.fully_sharded: is for modules with parameters of their own; set it to false",
    )
    _check_sharing(where, module)
    _check_experts(plan, where, module)
    if module.copy_of is None:
        return
    _require(module.copy_of in plan.modules, f"{where}.copy_of: there is no module {module.copy_of!r}")
    original = plan.modules[module.copy_of]
    _require(original.copy_of is None, f"{where}.copy_of: {module.copy_of} is itself a copy; name the original")
    _require(
        not original.fully_sharded,
        f"modules.{module.copy_of}.fully_sharded: {name} is a copy of it, which must be whole; set it to false",
    )
    _require(
        module.num_layers == original.num_layers
        and all(module.is_trainable((i, i + 1)) == original.is_trainable((i, i + 1)) for i in range(module.num_layers)),
        f"{where}: its num_layers and trainable differ from those of {module.copy_of}, whose copy it is; "
        "they must be equal",
    )


def _check_sharing(where: str, module: ModulePlan) -> None:
    """Checks the replicas that share parameters."""
    number, total = module.sharded_replicas, len(module.replicas)
    _require(
        number >= 1 and total % number == 0,
        f"{where}.sharded_replicas: is {number}; give a divisor of its {total} replicas",
    )
    _require(
        number > 1 or not module.whole_parameters,
        f"{where}.whole_parameters: is read where replicas share parameters only; give sharded_replicas, or false",
    )
    if number == 1:
        return
    _require(module.fully_sharded, f"{where}.sharded_replicas: is {number} without fully_sharded; set that, or give 1")
    looks = {tuple((s.layers, s.tp_size, s.cp_size) for s in replica.stages) for replica in module.replicas}
    _require(
        len(looks) == 1 and len({cp_size for _, _, cp_size in next(iter(looks))}) == 1,
        f"{where}.sharded_replicas: replicas that share parameters need equal stages, and one cp_size in all of them; "
        "make them alike, or give 1",
    )
    for s, stages in enumerate(zip(*(replica.stages for replica in module.replicas), strict=True)):
        ranks = [rank for stage in stages for rank in stage.ranks]
        _require(
            len(set(ranks)) == len(ranks),
            f"{where}.sharded_replicas: stage {s} of several replicas is on the same ranks; give 1",
        )


def _check_experts(plan: Plan, where: str, module: ModulePlan) -> None:
    """Expert parallelism: replicas that share experts compute every microbatch together."""
    _require(module.ep >= 1, f"{where}.ep: is {module.ep}; give at least 1")
    if module.ep == 1:
        return
    key = f"{where}.ep: is {module.ep}"
    _require(module.kind == "language_model", f"{key}, but only a language model's experts are distributed; give 1")
    _require(not module.fully_sharded, f"{key}, which fully_sharded does not support; set one of them to its default")
    shapes = [[(s.layers, s.tp_size, s.cp_size) for s in replica.stages] for replica in module.replicas]
    tp_size = module.replicas[0].stages[0].tp_size
    _require(
        all(shape == shapes[0] for shape in shapes) and all(size == tp_size for _, size, _ in shapes[0]),
        f"{key}, but its stages or replicas are not alike in layers, tp_size and cp_size; give alike ones",
    )
    _require(
        module.ep % tp_size == 0 and len(module.replicas) % (module.ep // tp_size) == 0,
        f"{key}, but must be tp_size ({tp_size}) times a divisor of the {len(module.replicas)} replicas",
    )
    if module.ep > tp_size:
        _require(
            len(set(plan.replica_microbatches)) <= 1,
            f"replica_microbatches: replicas that share experts (ep {module.ep}) need equal numbers",
        )


def _wrong_stages(module: ModulePlan, replica: Replica) -> str | None:
    """What is wrong with a replica's stages, if anything is."""
    begin = 0
    for s, stage in enumerate(replica.stages):
        if not stage.layers[0] == begin < stage.layers[1]:
            return f".stages[{s}].layers: is {list(stage.layers)}; a run that begins at {begin} is needed"
        begin = stage.layers[1]
        size = stage.tp_size * stage.cp_size
        if not len(stage.ranks) == size == len(set(stage.ranks)) > 0 <= min(stage.ranks):
            return (
                f".stages[{s}].ranks: {list(stage.ranks)} is not {stage.tp_size} x {stage.cp_size} "
                "(tp_size x cp_size) different ranks"
            )
        if stage.cp_size > 1 and list(stage.ranks) != sorted(stage.ranks):
            return f".stages[{s}].ranks: {list(stage.ranks)} must ascend where cp_size is larger than 1"
    if begin != module.num_layers:
        return f": its stages end at layer {begin}, but the module has {module.num_layers} layers"
    if module.kind in ("language_model", "encoder"):
        return None
    for (a, left), (b, right) in pairwise(enumerate(replica.stages)):
        if left.cp_size != right.cp_size:
            return f": stages {a} and {b} differ in cp_size; those of a {module.kind} share no tokens"
    return None


def _check_edges(plan: Plan) -> None:
    seen: set[tuple[str, str]] = set()
    for edge in plan.edges:
        for end in (edge.source, edge.target):
            _require(end in plan.modules, f"edges: there is no module {end!r}")
        _require(
            all(0 <= layer < plan.modules[edge.target].num_layers for layer in edge.layers) and bool(edge.layers),
            f"edges: {edge.source} enters {edge.target} at layers {list(edge.layers)}, "
            f"which are not within its {plan.modules[edge.target].num_layers} layers",
        )
        _require(
            (edge.source, edge.target) not in seen,
            f"edges: {edge.source} -> {edge.target} stands twice; give one edge with all its layers",
        )
        seen.add((edge.source, edge.target))


def _check_losses(plan: Plan) -> None:
    """A loss is computed by all ranks that hold towers' features, together: see docs/contrastive.md."""
    losses = [name for name, module in plan.modules.items() if module.kind == "loss"]
    _require(len(losses) <= 1, f"modules: {', '.join(losses)} are all losses; give one")
    for name in losses:
        where = f"modules.{name}"
        sources = [edge.source for edge in plan.edges if edge.target == name]
        _require(bool(sources), f"{where}: no tower enters it; give edges from the towers")
        _require(all(edge.source != name for edge in plan.edges), f"{where}: a loss enters no other module")
        stages = [stage for replica in plan.modules[name].replicas for stage in replica.stages]
        _require(len(stages) == 1, f"{where}: has {len(stages)} stages; a loss has one replica of one stage")
        members = sorted(
            {r for tower in sources for replica in plan.modules[tower].replicas for r in replica.stages[-1].ranks}
        )
        _require(
            list(stages[0].ranks) == members and stages[0].tp_size == 1,
            f"{where}.replicas[0].stages[0].ranks: {list(stages[0].ranks)} must be the ranks of the last stages of "
            f"{', '.join(sources)} with tp_size 1: {members}",
        )
        batches = plan.num_microbatches_of(name)
        for other in plan.modules:
            number = plan.num_microbatches_of(other)
            _require(
                number % batches == 0,
                f"modules.{other}.num_microbatches: {number} is no multiple of {name}'s {batches} contrastive batches",
            )


def module_order(plan: Plan) -> list[str]:
    """The modules in topological order of the edges, ties in the order of the file.

    Raises `ValueError` if the edges form a cycle."""
    order: list[str] = []
    remaining = list(plan.modules)
    while remaining:
        ready = [m for m in remaining if all(e.source not in remaining for e in plan.edges if e.target == m)]
        if not ready:
            raise ValueError(f"plan: edges: {', '.join(remaining)} form a cycle; modules must form a DAG")
        order += ready
        remaining = [m for m in remaining if m not in ready]
    return order
