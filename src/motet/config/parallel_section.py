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
    """Gather keys and values on all ranks, exchange tokens for heads, whose number cp must divide, or pass keys and
    values from rank to rank (ring attention; with policy `contiguous` or `zigzag` Cornstarch's baselines); hybrid: both
    of these, heads within groups of `ulysses_size` ranks, and a ring over such groups."""
    ulysses_size: Degree = 2
    """Under method `hybrid`: number of successive ranks that exchange tokens for heads, such as those of a node; a
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
    """Number of groups that the module's stages are on; of stages too, where `virtual_stages` is 1."""
    dp: Degree = 1
    """Number of replicas."""
    virtual_stages: Degree = 1
    """Stages on each of the `pp` groups, in rounds (interleaving): stage s is on group s mod pp. The schedules
    `interleaved_1f1b` and `interleaved_1f1b_adjusted` make use of them."""
    num_microbatches: Count | None = None
    """Microbatches of each replica in one contrastive batch, for towers alone; null: `parallel.num_microbatches`."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Number of layers of each stage; an encoder's embedding, head and projector and a language model's embedding and
    head count as one layer each. null: the frozen-aware partition."""
    sequence_parallel: bool = False
    """Whether the ranks of a tensor-parallel group split norms and residuals along the sequence."""
    fully_sharded: bool = False
    """Whether ranks shard parameters, gradients and optimizer state (FSDP): those of a context-parallel group, and of
    as many replicas as `sharded_replicas` says."""
    sharded_replicas: Count | None = None
    """With `fully_sharded`: number of successive replicas that share the parameters. All `dp` of them: nothing is held
    twice; fewer, such as those of a node: what they share is summed over the others (hybrid). null: all, or 1 where
    `cp` is larger than 1."""
    whole_parameters: bool = False
    """With `fully_sharded` over replicas: parameters are gathered once in a step, and whole until it ends (ZeRO-2).
    Gradients and optimizer state are shared; less is sent than where each microbatch gathers parameters."""
    ep: Degree = 1
    """Over how many ranks the experts of a mixture are distributed, each expert whole on one of them: `tp` (no tokens
    are exchanged), or `tp` times a divisor of `dp` (expert parallelism: tokens travel to their experts' ranks and back,
    none is dropped). 1: each expert is cut by its width over the tensor-parallel group."""
    context: ContextConfig = ContextConfig()
    """How context-parallel groups share tokens."""

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
    """Allowed sizes of tensor-parallel groups; null: as for all modules."""
    cp: Degrees | None = None
    """Allowed sizes of context-parallel groups, of the language model or an encoder; for encoders they are read by
    planner `oobleck` and by templates for `train.failures`. null: `limits.cp` for the language model, 1 for
    encoders."""
    max_pp: Count | None = None
    """Largest number of stages; null: as for all modules."""


class LimitsConfig(Section):
    tp: Degrees | None = None
    """Allowed sizes of tensor-parallel groups; a module leaves out those that do not divide its heads. null: powers of
    two within a node, on CPUs 1; with measured costs, the sizes that were profiled."""
    cp: Degrees | None = None
    """Allowed sizes of the language model's context-parallel groups, for planners `auto` and `oobleck`; other planners
    use 1. null: powers of two within a node that leave each rank at least 4096 tokens of a sample, on CPUs 1."""
    dp: Degrees | None = None
    """Allowed numbers of replicas; in planners `optimus` and `megatron_extra_stages`, those of the language model.
    null: powers of two that leave no microbatch empty, and three times these unless `cluster.num_devices` is a power of
    two; on CPUs 1."""
    fully_sharded: bool = False
    """Whether planner `oobleck` and templates for `train.failures` may use context parallelism of the sizes in `cp`
    (for the language model) or `modules` with sharded parameters and without tensor parallelism (FSDP)."""
    max_pp: Count | None = None
    """Largest number of stages of a module; null: its number of layers."""
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
    """Name of the planner that lays the model out, `auto` for the fastest of all, or `explicit`."""
    explicit: dict[str, ModuleParallelConfig] = {}
    """The layout of every module, for planner `explicit`."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of the layouts that planners other than `explicit` choose. With `explicit` and `train.failures`, templates
    read `cp`, `fully_sharded` and `max_pp`."""
    placement: Literal["parallel", "colocated", "replicated"] | None = None
    """Encoders on ranks of their own, in turns on shared ranks, or copied to each stage of the language model; null:
    the planner chooses."""
    schedule: str = "1f1b"
    """The pipeline schedule (docs/schedules.md): `gpipe`, `1f1b`, `eager_1f1b`, `interleaved_1f1b`,
    `interleaved_1f1b_adjusted`, `zero_bubble_h1`, `zero_bubble_h2`, `zero_bubble_v`, `bubble_filling`, `dip` or
    `distmm_pipe`; if it is not given, planners may choose, and towers use `distmm_pipe`."""
    assignment: str = "contiguous"
    """How samples are assigned to microbatches (docs/data.md): `contiguous` (in their order), `random`, `disttrain` (in
    its order), `dip`, `balanced` (even on the encoders' and the language model's work), `post_balanced` (each module's
    samples over its replicas by its own work; encoders' outputs travel), or balanced with deferral: `entrain`, or
    `entrain_k_eff`, which makes no more microbatches than the heaviest sample permits. If it is not given, planner
    `auto` takes `balanced` or `entrain` where they are faster."""
    num_microbatches: Count = 4
    """Microbatches per replica; if it is not given, planner `auto` chooses. Of towers, per replica and contrastive
    batch, for planner `explicit` alone."""
    packing: bool = False
    """Whether the samples of a microbatch are packed into one row without padding; they do not attend to each other."""
    packed_attention: Literal["auto", "sdpa", "varlen", "motet", "flex"] = "auto"
    """Attention of packed samples (docs/attention.md): `varlen` computes each sample by itself, on CUDA in bfloat16 by
    torch's variable-length flash attention; `motet` and `flex` are motet's kernels and FlexAttention, with the samples'
    bounds as a mask of blocks; `sdpa` is transformers', with a mask of tokens x tokens. auto: `varlen` for families
    that have been shown equal with it, else `sdpa`."""
    max_packed_tokens: Count | None = None
    """Largest number of tokens of a packed row, with `packing`; larger microbatches of the language model are split.
    null: no limit."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are recomputed in the backward pass, each by its name (all blocks), or as `name:kind`
    with the kind `blocks`, `attention` (that of every block), `every_2`, `every_3`, ... (every n-th block) or `offload`
    (nothing is recomputed: activations go to pinned memory of the host and come back); if it is not given, planner
    `auto` chooses."""
    recompute_features: tuple[str, ...] = ()
    """Towers, or encoders, whose stages keep only their input and recompute everything else in the backward pass: their
    activations are there one microbatch at a time, however many are on their way through a deep pipeline."""
    zero1: bool = False
    """Whether to shard the optimizer's state over the replicas; with `train.failures`, `tolerate` + 1 keep each
    part. If it is not given, planner `auto` chooses."""

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
