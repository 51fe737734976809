"""The run file's `parallel`: how the model is laid out, or what planners may choose from."""

from typing import Literal

from pydantic import model_validator

from motet.config.section import Count, Degree, Degrees, Section


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
    tp: Degree = 1
    """Size of the tensor-parallel groups."""
    cp: Degree = 1
    """Size of the context-parallel groups, which share the tokens of each microbatch; its samples are packed then."""
    pp: Degree = 1
    """Number of stages."""
    dp: Degree = 1
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
    tp: Degrees | None = None
    """Sizes of tensor-parallel groups; null: as for all modules."""
    cp: Degrees | None = None
    """Sizes of context-parallel groups, of the language model or an encoder; an encoder's are for planner `oobleck`, or
    templates for `train.failures`. null: of the language model `limits.cp`, of an encoder 1."""
    max_pp: Count | None = None
    """Most stages; null: as for all modules."""


class LimitsConfig(Section):
    tp: Degrees | None = None
    """Sizes of tensor-parallel groups; those that do not divide a module's heads are left out there. null: powers of
    two within a node, on CPUs 1; of profiled costs, those that were profiled."""
    cp: Degrees | None = None
    """Sizes of the language model's context-parallel groups, from which `auto` and `oobleck` choose; the other
    planners choose 1. null: powers of two within a node that leave each member at least 4096 tokens of a microbatch,
    on CPUs 1."""
    dp: Degrees | None = None
    """Numbers of replicas; planners `optimus` and `megatron_extra_stages`, which give a replica of the language model
    several of an encoder, keep to it for the language model. null: powers of two that
    leave no microbatch empty, and their threefold unless `cluster.num_devices` is a power of two; on CPUs 1."""
    fully_sharded: bool = False
    """Planner `oobleck`, or templates for `train.failures`, may give stages context parallelism of the sizes in `cp`
    (the language model's) or `modules` with shared parameters and without tensor parallelism (FSDP)."""
    max_pp: Count | None = None
    """Most stages of a module; null: as many as it has layers."""
    modules: dict[str, ModuleLimitsConfig] = {}
    """For a module by itself, in the place of the above."""

    def given(self) -> list[str]:
        """The keys that limit something, such as `tp` and `modules.vision.max_pp`."""
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
    """Who lays the model out: a planner's name, `auto` for the fastest of all, or `explicit`."""
    explicit: dict[str, ModuleParallelConfig] = {}
    """For planner `explicit`: the layout of every module."""
    limits: LimitsConfig = LimitsConfig()
    """What planners other than `explicit` may choose from; beside `explicit`, with `train.failures`, what templates
    may: `cp`, `fully_sharded` and `max_pp`."""
    placement: Literal["parallel", "colocated", "replicated"] | None = None
    """Encoders on ranks of their own, on one chain of ranks in turns, or copied to each stage of the language model;
    null: as the planner finds best."""
    schedule: str = "1f1b"
    """In which order stages compute (docs/schedules.md): `gpipe`, `1f1b`, `eager_1f1b`, `interleaved_1f1b`,
    `interleaved_1f1b_adjusted`, `zero_bubble_h1`, `zero_bubble_h2`, `zero_bubble_v`, `bubble_filling`, `dip` or
    `distmm_pipe`; if it is not given, planners may choose, and towers have `distmm_pipe`."""
    assignment: str = "contiguous"
    """Which samples make up each microbatch (docs/data.md): `contiguous` (as they come), `random`, `disttrain` (in its
    order), `dip`, or balanced with deferral: `entrain`, or `entrain_k_eff`, which makes no more microbatches than the
    heaviest sample leaves even."""
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
