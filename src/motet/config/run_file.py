"""The schema of the run file: every key with its type, default and meaning; and the function that reads the file.

The sections `model`, `data` and `parallel` have files of their own. `docs/run-file.md` is generated from these classes.
Unknown keys are errors. Paths are relative to the current directory. Checks that need more than the run file itself
(other files, the model's layers, registries) are made where those are read.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from motet.config.data_section import (
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    FilesConfig,
    PairsConfig,
    SameDigitsConfig,
)
from motet.config.model_section import ModelConfig
from motet.config.parallel_section import ParallelConfig
from motet.config.section import (
    Count,
    CountOrNever,
    Degree,
    Fraction,
    LearningRate,
    PositiveNumber,
    Section,
    Share,
    TimeoutS,
)
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL
from motet.recomputation import split_entry
from motet.strict_parsing import parse_strictly, parse_yaml, read_yaml


class DeviceConfig(Section):
    """A device that is not in motet's catalogue; docs/costs.md says where to find the numbers."""

    peak_flops: Annotated[dict[str, PositiveNumber], Field(min_length=1)]
    """Peak dense FLOP/s by dtype: bfloat16, float32, ..."""
    memory_bytes: PositiveNumber
    """Memory of one device."""
    memory_bytes_per_s: PositiveNumber
    """Bandwidth of the memory."""
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the peak that large matrix products reach."""
    attention_efficiency: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    """Share of the peak that attention reaches on the pairs that it computes, by kernel: sdpa, flash1, flash3; a kernel
    that is left out reaches 70% of `efficiency`."""
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the memory's bandwidth that kernels reach."""
    host_bytes_per_s: PositiveNumber = 2.5e10
    """Bandwidth of copies between a device and pinned memory of its host, in one direction."""
    within_node: str = "pcie4"
    """The link between such devices in a node."""
    source: str = "the user"
    """Source of the numbers."""


class LinkConfig(Section):
    """A link that is not in motet's catalogue."""

    latency_s: Annotated[float, Field(ge=0)]
    """Latency of one message."""
    bytes_per_s: PositiveNumber
    """Bandwidth in one direction."""
    source: str = "the user"
    """Source of the numbers."""


class CatalogueConfig(Section):
    """A catalogue file."""

    devices: dict[str, DeviceConfig] = {}
    """Devices by name."""
    links: dict[str, LinkConfig] = {}
    """Links by name."""


class ClusterConfig(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    """The kind of device that processes compute on."""
    num_devices: Degree = 1
    """Total number of devices, with one process each."""
    num_nodes: Count = 1
    """Number of machines, with equally many devices each."""
    memory_bytes: PositiveNumber | None = None
    """Memory of one device; null: the catalogue's."""
    num_cores: Count | None = None
    """CPU cores of one node that its processes share; null: those of this machine."""
    accelerator: str | None = None
    """Device of motet's catalogue (a40, a100-80, h100, ...) or of `devices`, for computed costs; null: a CPU core with
    `device: cpu`, an H100 with `device: cuda`."""
    within_node: str | None = None
    """Link between the devices of a node, from motet's catalogue (loopback, pcie4, nvlink4, ...) or `links`; null: the
    usual one for the device."""
    between_nodes: str | None = None
    """Link between nodes, through one network card, from motet's catalogue (infiniband400, roce200, ethernet100, ...)
    or `links`."""
    nics_per_node: Count | None = None
    """Network cards of a node, shared by its devices; null: one for each device."""
    devices: dict[str, DeviceConfig] = {}
    """Further devices, by name."""
    links: dict[str, LinkConfig] = {}
    """Further links, by name."""
    catalogue: str | None = None
    """YAML file with further `devices` and `links`, which run files can share; null: none."""
    speeds: str | None = None
    """File of measured speeds of kernels (docs/costs.md) for computed costs; null: assumed speeds."""
    costs: str | None = None
    """File of measured costs, written by `motet profile`; null: costs are computed."""

    @model_validator(mode="after")
    def _has_equal_nodes(self) -> "ClusterConfig":
        if self.num_devices % self.num_nodes:
            raise ValueError(
                f"num_devices: is {self.num_devices}, which {self.num_nodes} nodes cannot share equally; "
                f"give a multiple of {self.num_nodes}"
            )
        return self


class FailuresConfig(Section):
    """Training that continues when nodes fail (docs/resilience.md)."""

    tolerate: CountOrNever = 1
    """Number of nodes that may fail at the same time without loss of state. Every layer has one more copy than this.
    With 0, a loss may take all nodes back to the last checkpoint."""
    detect_s: TimeoutS = 1.0
    """Seconds without a sign of life after which a node counts as lost."""
    secret_file: str | None = None
    """File with the secret that all machines of the run share; null: the environment variable MOTET_RUN_SECRET. A run
    on one machine makes its own."""
    store_patience_s: TimeoutS = 60.0
    """Seconds for which a node waits for a lost store to return."""
    slow_ratio: Annotated[float, Field(gt=1)] | None = 1.5
    """A rank whose computation takes more than this many times as long as that of ranks with the same layers is listed
    in the failure log as a straggler. null: no rank is."""
    replace_stragglers_after_s: PositiveNumber | None = None
    """Seconds after which the node of a straggler leaves and a spare takes its place, if there is a spare; null: the
    node stays."""
    copy_every: Count | None = None
    """Number of steps after which each node copies its state into the memory of the next node, so that a plan with one
    pipeline continues without a checkpoint when a spare replaces a lost node; null: never."""
    stop_below_guarantee: bool = False
    """Whether to save a checkpoint and stop when too few nodes are left to survive `tolerate` further failures; false:
    continue."""
    restarts: CountOrNever = 3
    """Number of times that all nodes are restarted from the last checkpoint when too few are left."""

    @model_validator(mode="after")
    def _looks_for_stragglers(self) -> "FailuresConfig":
        if self.replace_stragglers_after_s is not None and self.slow_ratio is None:
            raise ValueError("replace_stragglers_after_s: slow_ratio is null, so no rank is slow; give both or neither")
        return self


class PhaseConfig(Section):
    """One phase of a training, which starts from the weights of the phase before it with an optimizer of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")]
    """Name of its folder in `output`."""
    steps: Count
    """Number of updates in this phase."""
    set: dict[str, Any] = {}
    """Values that replace those of the run file in this phase, in the form of `--set`:
    `model.language_model.train.module: false`, `data.files: [...]`, `train.learning_rate: 0.001`,
    `parallel.explicit.image.dp: 2`."""


class TrainConfig(Section):
    steps: Count = 100
    """Total number of updates, including those before a resumed checkpoint."""
    global_batch_size: Count = 8
    """Samples per update, over all replicas and microbatches."""
    contrastive_batch_size: Count | None = None
    """Number of samples that towers compare with each other; the loss is the mean over contrastive batches.
    null: the global batch."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate of parts without a `learning_rate` of their own."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.01
    """Weight decay of AdamW; it does not apply to vectors (biases, norms)."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """The betas of AdamW."""
    eps: PositiveNumber = 1e-8
    """The epsilon of AdamW."""
    warmup_steps: CountOrNever = 0
    """Number of steps in which the learning rate rises from 0 to its peak."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    min_learning_rate_ratio: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Norm of the gradient of the whole model to which larger gradients are clipped; 0: no clipping."""
    update_unreached: bool = False
    """Whether parameters that no sample of a step reaches (an encoder's, in a step without images) are updated with a
    gradient of zero, so that moments and weight decay change them; false: they do not change, as in a plain loop."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of parameters and computation. With bfloat16, gradients are accumulated in float32 and the optimizer
    updates float32 master weights."""
    compile: Literal["nothing", "blocks"] = "nothing"
    """Whether transformer blocks are compiled by `torch.compile`, each separately and for any length. Not supported
    with split backwards (zero-bubble schedules), groups that share a module, generators, or a whole multimodal
    model."""
    compile_backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of `torch.compile`: `inductor` generates kernels; `aot_eager` and `eager` do not, and serve for
    comparison."""
    kernels: Literal["torch", "liger"] = "torch"
    """Kernels of root-mean-square norms, rotary positions and gated MLPs. `liger`: each is one kernel of the package
    liger-kernel (docs/gpu.md), which needs a GPU, and float32 or bfloat16."""
    linears: Literal["torch", "float8"] = "torch"
    """Linear layers of transformer blocks. `float8`: those that are trained multiply numbers of 8 bits, by the package
    torchao (docs/gpu.md), which needs bfloat16 and a GPU of compute capability 9.0 (H100) or later. CPUs emulate it."""
    seed: CountOrNever = 0
    """Seed of dropout and of the samples' order."""
    eval_every: CountOrNever = 0
    """Steps between evaluations on held-out samples; 0: none."""
    eval_samples: Count = 256
    """Number of held-out samples in one evaluation; contrastive models use whole global batches, if there is at least
    one."""
    checkpoint_every: CountOrNever = 0
    """Steps between checkpoints; 0: none."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    export: bool = True
    """Whether the last checkpoint is exported for transformers, to `export` in `output`; false: checkpoints alone hold
    the trained weights."""
    output: Annotated[str, Field(min_length=1)] = "runs/motet"
    """Folder for everything that the run writes. One run at a time may use it."""
    overwrite: bool = False
    """Whether to delete the checkpoints of an earlier run in `output`; needed if they exist and the run does not resume
    from them."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if the loss or a gradient is not finite: stop the run, or skip the update."""
    step_timeout_s: TimeoutS = 300.0
    """Seconds after which a step ends the run with a report of what each rank waits for."""
    metrics: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)
    """Destinations of the metrics; `jsonl` is always written."""
    resume: str | None = None
    """Folder of a checkpoint to resume from, or `latest` of `output`; null: none."""
    start_from: str | None = None
    """Folder of a checkpoint of the same model whose weights this run starts with, without its optimizer state and its
    number of steps; null: none."""
    phases: tuple[PhaseConfig, ...] = ()
    """Phases of one training (docs/generators.md): each is planned separately and trained in its own folder in
    `output`. Each phase then has its own `steps`, and `resume` must be null or `latest`."""
    only_phase: str | None = None
    """Name of the only phase to train, plan, simulate or verify; null: `train` and `plan` process all phases."""
    failures: FailuresConfig | None = None
    """Whether and how training continues when nodes fail; null: the run ends."""


PHASES_OWN_KEYS = (
    *("train", "train.phases", "train.only_phase", "train.steps", "train.output"),
    *("train.resume", "train.overwrite", "train.start_from", "train.failures"),
)
"""Keys that a phase cannot set."""


class RunConfig(Section):
    """A run: the model, its data, the cluster, the layout and the training."""

    model: ModelConfig
    data: Annotated[
        DialADigitConfig | ConversationsConfig | DescribedConfig | SameDigitsConfig | PairsConfig,
        Field(discriminator="kind"),
    ]
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()

    @property
    def order_seed(self) -> int:
        """Seed of the samples' order."""
        own = self.data.seed if isinstance(self.data, FilesConfig) else None
        return self.train.seed if own is None else own

    @model_validator(mode="after")
    def _names_its_modules(self) -> "RunConfig":
        # The parts of a whole model are known to transformers alone.
        names = () if self.model.composite is not None else self.model.module_names
        named = {"recompute": [split_entry(entry)[0] for entry in self.parallel.recompute]}
        for key in ("explicit", "recompute", "recompute_features"):
            for name in named.get(key, getattr(self.parallel, key)):
                if names and name not in names:
                    raise ValueError(f"parallel.{key}: there is no module {name!r}; the model has {', '.join(names)}")
        missing = [name for name in names if self.parallel.explicit and name not in self.parallel.explicit]
        if missing:
            raise ValueError(f"parallel.explicit: has no {', '.join(missing)}; give the layout of every module")
        self._check_generators()
        self._check_phases()
        self._check_num_microbatches()
        self._check_limits()
        self._shards_states_once()
        self._check_experts()
        self._check_towers()
        return self

    def _check_generators(self) -> None:
        """Refuses what generators have not been shown with."""
        draws = isinstance(self.data, DialADigitConfig) and self.data.drawings > 0
        if draws and all(part.makes_sounds for part in self.model.generators.values()):
            raise ValueError("data.drawings: needs a generator of images; give model.generators, or leave it out")
        if not self.model.generators:
            return
        if self.data.kind not in ("conversations", "described") and not draws:
            raise ValueError(
                f"data.kind: {self.data.kind} has no images to generate; give conversations with <generate>, "
                "dial-a-digit with drawings, or described to plan and simulate"
            )
        if self.data.kind != "described":
            self.model.check_trained_generators()
        for name in self.model.generators:
            layout = self.parallel.explicit.get(name)
            for key, default in (("cp", 1), ("sequence_parallel", False), ("fully_sharded", False)):
                if layout is not None and getattr(layout, key) != default:
                    raise ValueError(
                        f"parallel.explicit.{name}.{key}: is {getattr(layout, key)}, which is not supported for a "
                        "generator; leave it out, and give dp, pp or tp"
                    )
        if self.train.failures is not None:
            raise ValueError("train.failures: is not supported with model.generators; leave one of the two out")

    def _check_phases(self) -> None:
        train, names = self.train, [phase.name for phase in self.train.phases]
        if train.only_phase is not None and train.only_phase not in names:
            raise ValueError(
                f"train.only_phase: there is no phase {train.only_phase!r}; train.phases has "
                f"{', '.join(names) or 'none'}"
            )
        if not names:
            return
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"train.phases: two are called {name}; give each a name of its own")
        if train.resume not in (None, "latest"):
            raise ValueError(
                f"train.resume: is {train.resume}, but a training in phases resumes from latest; give latest"
            )
        for key in ("start_from", "failures"):
            if getattr(train, key) is not None:
                raise ValueError(f"train.{key}: is not supported with train.phases; leave one of the two out")
        for number, phase in enumerate(train.phases):
            for key in phase.set:
                if key in PHASES_OWN_KEYS:
                    raise ValueError(
                        f"train.phases[{number}].set.{key}: is the same for all phases, or follows from the phase; "
                        "leave it out"
                    )

    def _check_num_microbatches(self) -> None:
        number, size = self.parallel.num_microbatches, self.train.global_batch_size
        if number > size and not (self.model.towers and self.parallel.planner != "explicit"):
            raise ValueError(
                f"parallel.num_microbatches: is {number}, but train.global_batch_size is {size}, which leaves some "
                f"empty; give at most {size}"
            )

    def _check_limits(self) -> None:
        """Refuses limits that are not read."""
        limits, planner, survives = self.parallel.limits, self.parallel.planner, self.train.failures is not None
        if planner == "explicit":
            # Where nodes may fail, templates of pipelines are made in addition to the explicit layout.
            by_templates = ("cp", "fully_sharded", "max_pp") if survives else ()
            given = [key for key in limits.given() if key.rpartition(".")[2] not in by_templates]
            if given:
                raise ValueError(
                    f"parallel.limits.{given[0]}: is not read by planner explicit, whose degrees are in "
                    "parallel.explicit; leave it out, or give another planner"
                )
        elif planner != "oobleck" and not survives:
            of_encoders = [
                f"modules.{name}.cp" for name, own in limits.modules.items() if own.cp and name in self.model.encoders
            ]
            for key in [*(["fully_sharded"] if limits.fully_sharded else []), *of_encoders]:
                raise ValueError(
                    f"parallel.limits.{key}: is read by planner oobleck, but parallel.planner is {planner}; leave it "
                    "out, or give planner: oobleck"
                )

    def _shards_states_once(self) -> None:
        """Refuses ZeRO-1 with sharded modules, except inside of stages where nodes may fail, which supports both."""
        if not self.parallel.zero1:
            return
        survives = self.train.failures is not None
        sharded = [
            f"explicit.{name}"
            for name, module in self.parallel.explicit.items()
            if module.fully_sharded and (module.shares_over_replicas > 1 or not survives)
        ]
        for where in [*sharded, *(["limits"] if self.parallel.limits.fully_sharded and not survives else [])]:
            raise ValueError(
                f"parallel.zero1: {where}.fully_sharded shards the optimizer's state already; leave one of the two out"
            )

    def _check_experts(self) -> None:
        """Refuses distributed experts for parts and features with which they have not been verified."""
        for name, layout in self.parallel.explicit.items():
            key = f"parallel.explicit.{name}.ep"
            if layout.ep > 1 and name != LANGUAGE_MODEL:
                raise ValueError(f"{key}: is {layout.ep}, but only a language model has experts; leave it out")
            if layout.ep > 1 and self.model.composite is not None:
                raise ValueError(f"{key}: is {layout.ep}, but experts of composites are not distributed; leave it out")
            if layout.ep > 1 and self.train.failures is not None:
                raise ValueError(
                    f"{key}: is {layout.ep}, but experts of ranks that fail have no other holder; leave it out, or "
                    "train.failures"
                )

        part = self.model.language_model
        if part is None or not part.router_bias_update_rate:
            return
        key = "model.language_model.router_bias_update_rate"
        if not part.train.module:
            raise ValueError(f"{key}: is {part.router_bias_update_rate}, but the model is frozen; set it to 0")

    def _check_towers(self) -> None:
        size, whole = self.train.contrastive_batch_size, self.train.global_batch_size
        if not self.model.towers:
            if size:
                raise ValueError(
                    "train.contrastive_batch_size: applies to towers only; give model.towers, or leave it out"
                )
            if self.parallel.recompute_features and self.parallel.planner != "explicit":
                raise ValueError(
                    "parallel.recompute_features: is read for encoders with planner explicit only; leave it out, or "
                    "give planner: explicit"
                )
            for name in self.parallel.recompute_features:
                if self.model.composite is None and name not in self.model.encoders:
                    raise ValueError(
                        f"parallel.recompute_features: {name} is not an encoder; name encoders, or use "
                        "parallel.recompute"
                    )
            for name, layout in self.parallel.explicit.items():
                if layout.num_microbatches is not None:
                    raise ValueError(
                        f"parallel.explicit.{name}.num_microbatches: applies to towers only; give "
                        "parallel.num_microbatches, which all modules share"
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
            raise ValueError("parallel.packing: applies to language models only; leave it out with towers")
        if parallel.limits.cp:
            raise ValueError("parallel.limits.cp: context parallelism is not supported for towers; leave it out")
        if parallel.planner == "explicit":
            return
        if parallel.limits.dp:
            raise ValueError(
                "parallel.limits.dp: planners choose the replicas of towers; leave it out, or give planner: explicit"
            )
        for key in ("recompute_features", "num_microbatches"):
            if key in parallel.model_fields_set:
                raise ValueError(
                    f"parallel.{key}: planners choose that themselves for towers; leave it out, or give planner: "
                    "explicit"
                )


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file and applies the overrides (`a.b.c=value`, the value in YAML).

    Raises `UserError` naming the file or key that is wrong.
    """
    values = read_yaml(path, RunConfig, "run file")
    for override in overrides:
        _override(values, override)
    return parse_strictly(RunConfig, json.dumps(values, default=str), what=str(path))


def load_catalogue(path: str | Path) -> CatalogueConfig:
    """Reads a file of devices and links. Raises `UserError` naming the file or key that is wrong."""
    values = read_yaml(path, CatalogueConfig, "catalogue")
    return parse_strictly(CatalogueConfig, json.dumps(values, default=str), what=str(path))


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    override = override if len(override) <= 200 else f"{override[:200]}..."
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"--set {override}: is not of the form a.b.c=value")
    set_value(values, ".".join(keys), parse_yaml(text, f"--set {override}"), f"--set {override}")


def set_value(values: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Sets the key `a.b.c` of a run file. Raises `UserError`, beginning with `where`, if `a` or `a.b` has no keys."""
    keys = path.split(".")
    at: Any = values
    for i, key in enumerate(keys[:-1]):
        inner = at.get(key)
        if inner is None:
            inner = at[key] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{where}: {'.'.join(keys[: i + 1])} is {inner!r}, which has no keys")
        at = inner
    at[keys[-1]] = value
