"""The run file: every key that it may have, with its type, its default and what it means.

`model` stands in `model_section.py`, `data` in `data_section.py`. `docs/run-file.md` is generated from these pages.
Unknown keys are errors. Paths are relative to the current directory. Checks that need more than the run file itself
(files, the model's layers, registries) are made where these are read.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from motet.config.data_section import (
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    PairsConfig,
    SameDigitsConfig,
)
from motet.config.model_section import ModelConfig
from motet.config.section import Count, CountOrNever, Counts, Fraction, PositiveNumber, Section


class DeviceConfig(Section):
    """A device of the user's; docs/costs.md says where to find the numbers."""

    peak_flops: Annotated[dict[str, PositiveNumber], Field(min_length=1)]
    """Dense FLOP/s by dtype: bfloat16, float32, ..."""
    memory_bytes: PositiveNumber
    """Of one device."""
    memory_bytes_per_s: PositiveNumber
    """Bandwidth of its memory."""
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the peak that large matrix products reach."""
    within_node: str = "pcie4"
    """The link that joins such devices in a node."""
    source: str = "the user"
    """Where the numbers are from."""


class LinkConfig(Section):
    """A link of the user's."""

    latency_s: Annotated[float, Field(ge=0)]
    """Of one message."""
    bytes_per_s: PositiveNumber
    """In one direction."""
    source: str = "the user"
    """Where the numbers are from."""


class CatalogueConfig(Section):
    """What a catalogue file may hold."""

    devices: dict[str, DeviceConfig] = {}
    """By name."""
    links: dict[str, LinkConfig] = {}
    """By name."""


class ClusterConfig(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    """What the processes compute on."""
    num_devices: Annotated[int, Field(ge=1, le=131_072)] = 1
    """In all, one process each."""
    num_nodes: Count = 1
    """Machines; each has the same number of devices."""
    memory_bytes: PositiveNumber | None = None
    """Of one device; null: what the device has."""
    num_cores: Count | None = None
    """CPU cores of one node that its processes share; null: what the machine has."""
    accelerator: str | None = None
    """A device of motet's catalogue (a40, a100-80, h100, ...) or of `devices`, for computed costs; null: a CPU core, or
    an H100."""
    within_node: str | None = None
    """A link of motet's catalogue (loopback, pcie4, nvlink4, ...) or of `links`; null: the device's usual one."""
    between_nodes: str | None = None
    """A link of motet's catalogue (infiniband400, roce200, ethernet100, ...) or of `links`, through one network
    card."""
    nics_per_node: Count | None = None
    """Network cards of a node, shared by its devices; null: one for each device."""
    devices: dict[str, DeviceConfig] = {}
    """Devices that motet's catalogue does not have, by name."""
    links: dict[str, LinkConfig] = {}
    """Links that motet's catalogue does not have, by name."""
    catalogue: str | None = None
    """YAML file with more `devices` and `links`, to be shared by run files; null: none."""
    speeds: str | None = None
    """File of measured speeds of kernels (docs/costs.md) for computed costs; null: assumed ones."""
    costs: str | None = None
    """File of measured costs that `motet profile` wrote; null: they are computed."""

    @model_validator(mode="after")
    def _has_equal_nodes(self) -> "ClusterConfig":
        if self.num_devices % self.num_nodes:
            raise ValueError(
                f"num_devices: is {self.num_devices}, which {self.num_nodes} nodes cannot share equally; "
                f"give a multiple of {self.num_nodes}"
            )
        return self


class ContextConfig(Section):
    block_size: Count = 128
    """Tokens that stay together on one rank."""
    policy: Literal["lpt", "lpt_uncapped", "snake", "zigzag", "contiguous", "striped", "random"] = "lpt"
    """Who gets which block: `lpt` balances the attention; the others are there to compare with."""
    method: Literal["all_gather", "ulysses"] = "all_gather"
    """Keys and values come to the queries, or tokens are traded for heads, which cp then has to divide."""
    backend: Literal["auto", "triton", "flex", "dense"] = "auto"
    """Who computes the attention: our Triton kernels, FlexAttention or torch's dense attention; auto: the kernels on a
    GPU, dense attention elsewhere."""


class ModuleParallelConfig(Section):
    tp: Count = 1
    """Size of the tensor-parallel groups."""
    cp: Count = 1
    """Size of the context-parallel groups, which share the tokens of each microbatch; its samples are packed then."""
    pp: Count = 1
    """Number of stages."""
    dp: Count = 1
    """Number of replicas."""
    num_microbatches: Count | None = None
    """Of a tower: of each replica's share of a contrastive batch; null: `parallel.num_microbatches`."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Counting an encoder's embedding, head and projector and a language model's embedding and head as one layer each;
    null: the frozen-aware partition."""
    sequence_parallel: bool = False
    """Inside tensor-parallel groups, norms and residuals hold a share of the sequence each."""
    fully_sharded: bool = False
    """Inside context-parallel groups, each rank keeps a share of parameters and optimizer state, and gathers the
    others' to compute (FSDP)."""
    context: ContextConfig = ContextConfig()
    """How context-parallel groups share tokens."""

    @model_validator(mode="after")
    def _has_as_many_stages(self) -> "ModuleParallelConfig":
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pp:
            raise ValueError(
                f"layers_per_stage: has {len(self.layers_per_stage)} entries for pp: {self.pp}; give {self.pp} of them"
            )
        return self


class ModuleLimitsConfig(Section):
    tp: Counts | None = None
    """Sizes of tensor-parallel groups; null: as for all modules."""
    max_pp: Count | None = None
    """Most stages; null: as for all modules."""


class LimitsConfig(Section):
    tp: Counts | None = None
    """Sizes of tensor-parallel groups; those that do not divide a module's heads are left out there. null: powers of
    two within a node, on CPUs 1; of profiled costs, those that were profiled."""
    cp: Counts | None = None
    """Sizes of the language model's context-parallel groups, from which `auto` and `oobleck` choose; the other
    planners choose 1. null: powers of two within a node that leave each member at least 4096 tokens of a microbatch,
    on CPUs 1."""
    dp: Counts | None = None
    """Numbers of replicas; planners `optimus` and `megatron_extra_stages`, which give a replica of the language model
    several of an encoder, keep to it for the language model. null: powers of two that
    leave no microbatch empty, and their threefold unless `cluster.num_devices` is a power of two; on CPUs 1."""
    fully_sharded: bool = False
    """Planner `oobleck` may give the language model's stages context parallelism of the sizes in `cp` with shared
    parameters and without tensor parallelism (FSDP)."""
    max_pp: Count | None = None
    """Most stages of a module; null: as many as it has layers."""
    modules: dict[str, ModuleLimitsConfig] = {}
    """For a module by itself, in the place of the above."""


class ParallelConfig(Section):
    planner: str = "cornstarch"
    """Who lays the model out: a planner's name, `auto` for the fastest of all, or `explicit`."""
    explicit: dict[str, ModuleParallelConfig] = {}
    """For planner `explicit`: the layout of every module."""
    limits: LimitsConfig = LimitsConfig()
    """What planners other than `explicit` may choose from."""
    placement: Literal["parallel", "colocated", "replicated"] | None = None
    """Encoders on ranks of their own, on one chain of ranks in turns, or copied to each stage of the language model;
    null: as the planner finds best."""
    schedule: str = "1f1b"
    """In which order stages compute (docs/schedules.md): `gpipe`, `1f1b`, `eager_1f1b`, `interleaved_1f1b`,
    `interleaved_1f1b_adjusted`, `zero_bubble_h1`, `zero_bubble_h2`, `zero_bubble_v`, `bubble_filling`, `dip` or
    `distmm_pipe`; if it is not given, planners may choose, and towers have `distmm_pipe`."""
    assignment: Literal["contiguous", "random", "disttrain", "dip", "entrain", "entrain_k_eff"] = "contiguous"
    """Which samples make up each microbatch (docs/data.md): as they come, at random, in DistTrain's order, like DIP, or
    balanced with deferral like Entrain, with all microbatches or no more than the heaviest sample leaves even."""
    num_microbatches: Count = 4
    """Per replica; of towers, per replica and contrastive batch, and for planner `explicit` alone."""
    packing: bool = False
    """A microbatch's samples stand in one row without padding, and do not see each other."""
    max_packed_tokens: Count | None = None
    """With `packing`: most tokens of such a row; language-model microbatches of more are cut. null: no limit."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are computed again in the backward pass."""
    recompute_features: tuple[str, ...] = ()
    """Towers whose forward keeps no graph: it runs again in the backward pass, from the stage's input."""
    zero1: bool = False
    """Shard the optimizer's state over the replicas; with `train.failures`, `tolerate` + 1 pipelines keep each part."""

    @model_validator(mode="after")
    def _packs_within_a_limit(self) -> "ParallelConfig":
        if self.max_packed_tokens is not None and not self.packing:
            raise ValueError("max_packed_tokens: is read with packing: true only; set that, or leave it out")
        return self

    @model_validator(mode="after")
    def _shards_states_once(self) -> "ParallelConfig":
        sharded = [name for name, module in self.explicit.items() if module.fully_sharded]
        if self.zero1 and sharded:
            raise ValueError(
                f"zero1: explicit.{sharded[0]}.fully_sharded shards the optimizer's state already; leave one of the "
                "two out"
            )
        return self

    @model_validator(mode="after")
    def _has_one_planner(self) -> "ParallelConfig":
        if self.explicit and self.planner != "explicit":
            raise ValueError(
                f"planner: is {self.planner!r}, so explicit is not read; give planner: explicit, or no explicit"
            )
        if self.planner == "explicit" and not self.explicit:
            raise ValueError("explicit: is empty; give tp, pp and dp of every module, or a planner's name")
        if self.planner == "oobleck" and self.limits.dp is not None:
            raise ValueError("limits.dp: planner oobleck looks for the number of pipelines itself; leave it out")
        return self


class FailuresConfig(Section):
    """Going on when nodes fail (docs/resilience.md)."""

    tolerate: Count = 1
    """Nodes that may fail at once without anything being lost: there are that many copies of every layer, and one."""
    detect_s: PositiveNumber = 1.0
    """A node that gives no sign of life any more is lost within so many seconds."""
    store_patience_s: PositiveNumber = 60.0
    """A node goes on for so many seconds without the store, which one process keeps for all; then it ends."""
    slow_ratio: Annotated[float, Field(gt=1)] | None = 1.5
    """A rank whose computation takes more than so many times as long as that of ranks with the same layers is named in
    the failure log; nothing else is done. null: none is."""
    stop_below_guarantee: bool = False
    """When too few nodes are left to survive `tolerate` failures: save and stop, instead of going on without them."""
    restarts: CountOrNever = 3
    """How often all nodes are started anew, from the last checkpoint, when too few are left."""


class TrainConfig(Section):
    steps: Count = 100
    """Updates in all, those before a resumed checkpoint included."""
    global_batch_size: Count = 8
    """Samples per update, over all replicas and microbatches."""
    contrastive_batch_size: Count | None = None
    """Of towers: samples that are compared with each other; the loss is the mean over contrastive batches. null: the
    global batch."""
    learning_rate: PositiveNumber = 1e-3
    """Peak, of parts that have none of their own."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's; vectors are not decayed."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's."""
    eps: PositiveNumber = 1e-8
    """AdamW's."""
    warmup_steps: CountOrNever = 0
    """Steps in which the learning rate rises from 0 to its peak."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up."""
    min_learning_rate_ratio: Fraction = 0.1
    """What remains of the peak at the last step."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole model's gradient; 0: no clipping."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the computation; bfloat16 is autocast, with float32 weights."""
    seed: CountOrNever = 0
    """Of dropout and of the order of the data."""
    eval_every: CountOrNever = 0
    """Steps between evaluations on held-out samples; 0: none."""
    eval_samples: Count = 256
    """Held-out samples of one evaluation; of contrastive models, whole global batches of them if there is one."""
    checkpoint_every: CountOrNever = 0
    """Steps between checkpoints; 0: none."""
    keep_checkpoints: Count = 2
    """Older ones are deleted."""
    output: str = "runs/motet"
    """Folder of everything that the run writes."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a loss or gradient that is not finite: the end, or a step without update."""
    step_timeout_s: PositiveNumber = 300.0
    """A step that takes longer ends the run with a report of who waits for what."""
    metrics: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)
    """Where the numbers go."""
    resume: str | None = None
    """A checkpoint's folder, or `latest` of `output`."""
    failures: FailuresConfig | None = None
    """Go on when nodes fail; null: the run ends."""


class RunConfig(Section):
    """One run: what is trained, on what, where, and how."""

    model: ModelConfig
    data: Annotated[
        DialADigitConfig | ConversationsConfig | DescribedConfig | SameDigitsConfig | PairsConfig,
        Field(discriminator="kind"),
    ]
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _names_its_modules(self) -> "RunConfig":
        names = self.model.module_names
        for key in ("explicit", "recompute", "recompute_features"):
            for name in getattr(self.parallel, key):
                if name not in names:
                    raise ValueError(f"parallel.{key}: there is no module {name!r}; the model has {', '.join(names)}")
        missing = [name for name in names if self.parallel.explicit and name not in self.parallel.explicit]
        if missing:
            raise ValueError(f"parallel.explicit: has no {', '.join(missing)}; give the layout of every module")
        if self.model.generators and self.data.kind != "described":
            raise ValueError(
                f"data.kind: {self.data.kind} has no images to generate; models with generators can be planned and "
                "simulated only, so give described"
            )
        self._check_towers()
        return self

    def _check_towers(self) -> None:
        size, whole = self.train.contrastive_batch_size, self.train.global_batch_size
        if not self.model.towers:
            for key, given in (
                ("train.contrastive_batch_size", size),
                ("parallel.recompute_features", self.parallel.recompute_features),
            ):
                if given:
                    raise ValueError(f"{key}: is of towers; give model.towers, or leave it out")
            for name, layout in self.parallel.explicit.items():
                if layout.num_microbatches is not None:
                    raise ValueError(
                        f"parallel.explicit.{name}.num_microbatches: is of towers; give parallel.num_microbatches, "
                        "which all modules share"
                    )
            if self.data.kind in ("same-digits", "pairs"):
                raise ValueError(f"data.kind: {self.data.kind} is for towers; give model.towers, or other data")
            return
        if self.data.kind in ("dial-a-digit", "conversations"):
            raise ValueError(f"data.kind: {self.data.kind} has no pairs for towers; give pairs or same-digits")
        if (size or whole) < 2:
            key = "contrastive_batch_size" if size else "global_batch_size"
            raise ValueError(f"train.{key}: is 1, which leaves nothing to compare a sample with; give at least 2")
        if size is not None and whole % size:
            raise ValueError(
                f"train.contrastive_batch_size: is {size}, which does not divide train.global_batch_size {whole}; "
                "give a divisor"
            )
        self._check_layout_of_towers()

    def _check_layout_of_towers(self) -> None:
        parallel = self.parallel
        if parallel.packing:
            raise ValueError("parallel.packing: is of a language model's samples; with towers leave it out")
        if parallel.planner == "explicit":
            return
        if parallel.limits.cp:
            raise ValueError("parallel.limits.cp: towers have whole items; leave it out")
        if parallel.limits.dp:
            raise ValueError(
                "parallel.limits.dp: planners balance towers by their replicas; leave it out, or give planner: explicit"
            )
        for key in ("recompute_features", "num_microbatches"):
            if key in parallel.model_fields_set:
                raise ValueError(
                    f"parallel.{key}: planners choose that themselves for towers; leave it out, or give planner: "
                    "explicit"
                )
