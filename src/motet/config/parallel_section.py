"""The section `parallel` of the run file: the layout of the model, or the limits within which planners choose it."""

from typing import Literal

from pydantic import model_validator

from motet.config.section import Count, Degree, Degrees, Section
from motet.recomputation import check_entries


class ContextConfig(Section):
    block_size: Count = 128
    """Number of consecutive tokens that are assigned to a rank together."""
    policy: Literal["lpt", "lpt_uncapped", "snake", "zigzag", "contiguous", "striped", "random", "ilp"] = "lpt"
    """Assignment of blocks to ranks: `lpt` balances the attention; the others serve for comparison (`ilp`: an integer
    program, solved anew for every microbatch)."""
    method: Literal["all_gather", "ulysses", "ring", "hybrid"] = "all_gather"
    """How ranks exchange keys and values. `all_gather`: keys and values are gathered on all ranks; `ulysses`: tokens
    are exchanged for heads, whose number `cp` must divide; `ring`: keys and values are passed from rank to rank (with
    policy `contiguous` or `zigzag`, Cornstarch's baselines); `hybrid`: tokens are exchanged for heads within groups of
    `ulysses_size` ranks, and keys and values are passed between these groups."""
    ulysses_size: Degree = 2
    """With method `hybrid`: number of successive ranks that exchange tokens for heads, such as those of a node; a
    divisor of `cp`."""
    backend: Literal["auto", "triton", "flex", "dense"] = "auto"
    """Implementation of attention: motet's Triton kernels, FlexAttention or torch's dense attention; auto: the kernels
    on a GPU, dense attention elsewhere."""


class ModuleParallelConfig(Section):
    tp: Degree = 1
    """Size of the tensor-parallel groups."""
    cp: Degree = 1
    """Size of the context-parallel groups, which share the tokens of each microbatch. Above 1, samples are packed."""
    pp: Degree = 1
    """Number of groups of ranks on which the module's stages are; with `virtual_stages` 1, also the number of
    stages."""
    dp: Degree = 1
    """Number of replicas."""
    virtual_stages: Degree = 1
    """Number of stages on each of the `pp` groups (interleaving): stage s is on group s mod pp. Use the schedules
    `interleaved_1f1b` or `interleaved_1f1b_adjusted` with it."""
    num_microbatches: Count | None = None
    """For towers only: number of microbatches of each replica in one contrastive batch; null:
    `parallel.num_microbatches`."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Number of layers of each stage; an encoder's embedding, head and projector and a language model's embedding and
    head count as one layer each. null: the frozen-aware partition."""
    sequence_parallel: bool = False
    """Whether the ranks of a tensor-parallel group split norms and residuals along the sequence."""
    fully_sharded: bool = False
    """Whether parameters, gradients and optimizer state are sharded (FSDP) over the ranks of a context-parallel group
    and over `sharded_replicas` replicas."""
    sharded_replicas: Count | None = None
    """With `fully_sharded`: number of successive replicas that share the parameters. With all `dp` replicas, nothing is
    held twice; with fewer, such as those of a node, gradients are summed over the other groups (hybrid sharding). null:
    all, or 1 if `cp` is larger than 1."""
    whole_parameters: bool = False
    """With `fully_sharded` over replicas: parameters are gathered once per step and stay whole until it ends (ZeRO-2).
    Gradients and optimizer state are sharded. Less is sent than if each microbatch gathered parameters."""
    ep: Degree = 1
    """Number of ranks over which the experts of a mixture are distributed, each expert whole on one rank: `tp` (no
    tokens are exchanged), or `tp` times a divisor of `dp` (expert parallelism: tokens are sent to their experts' ranks
    and back, and none is dropped). 1: each expert is cut by its width over the tensor-parallel group."""
    context: ContextConfig = ContextConfig()
    """How context-parallel groups distribute tokens and attention."""

    @property
    def shares_over_replicas(self) -> int:
        """Number of replicas that share parameters; 1: none do."""
        if not self.fully_sharded:
            return 1
        return (self.dp if self.cp == 1 else 1) if self.sharded_replicas is None else self.sharded_replicas

    @model_validator(mode="after")
    def _shards_over_whole_groups(self) -> "ModuleParallelConfig":
        number = self.sharded_replicas
        if number is not None and not self.fully_sharded:
            raise ValueError("sharded_replicas: is read with fully_sharded: true only; set that, or leave it out")
        if number is not None and self.dp % number:
            raise ValueError(f"sharded_replicas: {number} does not divide dp {self.dp}; give a divisor of it")
        if self.whole_parameters and self.shares_over_replicas == 1:
            raise ValueError(
                "whole_parameters: is read where replicas share parameters only; give fully_sharded and a larger "
                "sharded_replicas, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_as_many_stages(self) -> "ModuleParallelConfig":
        number = self.pp * self.virtual_stages
        if self.layers_per_stage is not None and len(self.layers_per_stage) != number:
            given = f"pp: {self.pp}" + (f" and virtual_stages: {self.virtual_stages}" if number > self.pp else "")
            raise ValueError(
                f"layers_per_stage: has {len(self.layers_per_stage)} entries for {given}; give {number} of them"
            )
        return self


class ModuleLimitsConfig(Section):
    tp: Degrees | None = None
    """Allowed sizes of tensor-parallel groups; null: those of `limits.tp`."""
    cp: Degrees | None = None
    """Allowed sizes of context-parallel groups, for the language model or an encoder. For encoders, only planner
    `oobleck` and templates for `train.failures` use them. null: `limits.cp` for the language model, 1 for encoders."""
    max_pp: Count | None = None
    """Maximum number of stages; null: that of `limits.max_pp`."""


class LimitsConfig(Section):
    tp: Degrees | None = None
    """Allowed sizes of tensor-parallel groups; sizes that do not divide a module's heads are ignored for it. null:
    powers of two within a node, or 1 on CPUs; with measured costs, the sizes that were profiled."""
    cp: Degrees | None = None
    """Allowed sizes of the language model's context-parallel groups, for planners `auto` and `oobleck`; other planners
    use 1. null: powers of two within a node that leave each rank at least 4096 tokens of a sample, or 1 on CPUs."""
    dp: Degrees | None = None
    """Allowed numbers of replicas; for planners `optimus` and `megatron_extra_stages`, those of the language model.
    null: powers of two that leave no microbatch empty, also three times these unless `cluster.num_devices` is a power
    of two; or 1 on CPUs."""
    fully_sharded: bool = False
    """Whether planner `oobleck` and templates for `train.failures` may combine context parallelism, of the sizes in
    `cp` (language model) or `modules`, with sharded parameters (FSDP) instead of tensor parallelism."""
    max_pp: Count | None = None
    """Maximum number of stages of a module; null: its number of layers."""
    modules: dict[str, ModuleLimitsConfig] = {}
    """Limits of single modules, which replace those above."""

    def given(self) -> list[str]:
        """The keys that are set, such as `tp` and `modules.vision.max_pp`."""
        own = [key for key in ("tp", "cp", "dp", "fully_sharded", "max_pp") if getattr(self, key) not in (None, False)]
        of_modules = [
            f"modules.{name}.{key}"
            for name, module in self.modules.items()
            for key in ("tp", "cp", "max_pp")
            if getattr(module, key) is not None
        ]
        return [*own, *of_modules]


class ParallelConfig(Section):
    planner: str = "cornstarch"
    """Name of a planner (docs/layout.md), `auto` for the fastest plan that motet finds, or `explicit` for the layout
    given below."""
    explicit: dict[str, ModuleParallelConfig] = {}
    """Layout of every module, for planner `explicit`."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of the layouts that planners other than `explicit` choose. With `explicit` and `train.failures`, templates
    read `cp`, `fully_sharded` and `max_pp`."""
    placement: Literal["parallel", "colocated", "replicated"] | None = None
    """Placement of encoders: on ranks of their own (`parallel`), in turns on the same ranks (`colocated`), or copied to
    each stage of the language model (`replicated`); null: the planner chooses."""
    schedule: str = "1f1b"
    """The pipeline schedule (docs/schedules.md): `gpipe`, `1f1b`, `eager_1f1b`, `interleaved_1f1b`,
    `interleaved_1f1b_adjusted`, `zero_bubble_h1`, `zero_bubble_h2`, `zero_bubble_v`, `bubble_filling`,
    `critical_path`, `iterated_critical_path`, `dip` or `distmm_pipe`. If it is not given, planners may choose, and
    towers use `distmm_pipe`."""
    assignment: str = "contiguous"
    """Policy that assigns samples to microbatches (docs/data.md): `contiguous` (the order of the samples), `random`,
    `disttrain` (DistTrain's order), `dip`, `balanced` (even work for encoders and language model), `post_balanced`
    (each module distributes samples over its replicas by its own work; encoders' outputs are sent between replicas), or
    balanced with deferral: `entrain`, and `entrain_k_eff`, which uses fewer microbatches if one sample is heavier than
    several others. If it is not given, planner `auto` uses `balanced` or `entrain` if they are faster."""
    num_microbatches: Count = 4
    """Number of microbatches per replica. If it is not given, planner `auto` chooses. For towers, with planner
    `explicit` only: the number per replica and contrastive batch."""
    packing: bool = False
    """Whether the samples of a microbatch are packed into one row without padding; they do not attend to each other."""
    packed_attention: Literal["auto", "sdpa", "varlen", "motet", "flex"] = "auto"
    """Attention of packed samples (docs/attention.md): `varlen` computes each sample by itself, on CUDA in bfloat16 by
    torch's variable-length flash attention; `motet` and `flex` are motet's kernels and FlexAttention, with a block mask
    of the samples' bounds; `sdpa` is transformers' attention, with a mask of tokens x tokens. auto: `varlen` for
    families that have been verified with it, else `sdpa`."""
    max_packed_tokens: Count | None = None
    """With `packing`: maximum number of tokens of a packed row; larger microbatches of the language model are split.
    null: no limit."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are recomputed in the backward pass, each given by its name (all blocks) or as
    `name:kind`. Kinds are `blocks`, `attention` (the attention of every block), `every_2`, `every_3`, ... (every n-th
    block) and `offload` (nothing is recomputed; activations are copied to pinned memory of the host and back). If it is
    not given, planner `auto` chooses."""
    recompute_features: tuple[str, ...] = ()
    """Towers or encoders whose stages keep only their input and recompute everything else in the backward pass. They
    hold the activations of one microbatch at a time, even if many microbatches are in the pipeline."""
    run_ahead: bool = False
    """Whether encoders that need no backward (frozen from their first layer to the end of a stage) compute the next
    batch's forwards while their ranks wait for the end of an iteration (docs/schedules.md). If it is not given, planner
    `auto` chooses."""
    zero1: bool = False
    """Whether to shard the optimizer's state over the replicas; with `train.failures`, `tolerate` + 1 replicas keep
    each part. If it is not given, planner `auto` chooses."""

    @model_validator(mode="after")
    def _knows_kinds_of_recomputation(self) -> "ParallelConfig":
        check_entries(self.recompute)
        return self

    @model_validator(mode="after")
    def _packs_within_a_limit(self) -> "ParallelConfig":
        if self.max_packed_tokens is not None and not self.packing:
            raise ValueError("max_packed_tokens: is read with packing: true only; set that, or leave it out")
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
