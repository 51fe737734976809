"""The run file: every key that it may have, with its type, its default and what it means.

`docs/run-file.md` is generated from this page. Unknown keys are errors. Paths are relative to the current directory.
Checks that need more than the run file itself (files, the model's layers, registries) are made where these are read.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from motet.plan import CONTRASTIVE

LANGUAGE_MODEL = "language_model"
"""The name of the language model among the modules; the encoders have names of the user's."""

Count = Annotated[int, Field(ge=1)]
CountOrNever = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class TrainableModule(_Section):
    module: bool = True
    """Whether the module's own weights are trained; false: they are frozen."""


class TrainableEncoder(TrainableModule):
    projector: bool = True
    """Whether the projector is trained; false: it is frozen."""


class PartConfig(_Section):
    """One HuggingFace model: exactly one of `hub`, `path` and `config` says where it comes from."""

    hub: str | None = None
    """Id of a model on the hub."""
    path: str | None = None
    """Local folder with config.json and safetensors."""
    config: str | None = None
    """Name of a transformers configuration class, for random weights."""
    values: dict[str, Any] = {}
    """Arguments of the configuration class; with `hub` and `path`, values that replace the stored ones."""
    seed: int = 0
    """Of the random weights."""
    learning_rate: PositiveNumber | None = None
    """Peak learning rate of this part; null: `train.learning_rate`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> "PartConfig":
        given = [key for key in ("hub", "path", "config") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given)} are given; keep one of them"
                if given
                else "has no source; give one of hub, path and config"
            )
        return self


class EncoderConfig(PartConfig):
    projector: Literal["linear", "mlp"] | None = "mlp"
    """From the encoder's width to the language model's; null: the encoder hands on its own output."""
    train: TrainableEncoder = TrainableEncoder()
    projector_learning_rate: PositiveNumber | None = None
    """Peak learning rate of the projector; null: `train.learning_rate`."""
    feature_select: Literal["patch", "full"] = "patch"
    """Vision: hand on the patches alone, or the class token too."""
    feature_layer: int | None = None
    """Index into the encoder's hidden states of what is handed on (LLaVA: -2); null: its output."""


class LanguageModelConfig(PartConfig):
    train: TrainableModule = TrainableModule()


class TowerConfig(PartConfig):
    projector: Literal["projection", "linear", "mlp"] | None = "projection"
    """From the encoder's width to that of the features: a matrix (CLIP), a linear layer or two; null: the tower hands
    on what its encoder makes of a whole item (SigLIP)."""
    train: TrainableEncoder = TrainableEncoder()
    projector_learning_rate: PositiveNumber | None = None
    """Peak learning rate of the projector; null: `train.learning_rate`."""


class ContrastiveConfig(_Section):
    """The loss that compares what towers make of the samples of a contrastive batch."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Each sample against all others of its contrastive batch (CLIP), or each pair by itself (SigLIP)."""
    width: Count | None = None
    """Of the features; null: that of the first tower without projector."""
    anchor: str | None = None
    """The tower that each other one is compared with; null: all pairs of towers."""
    logit_scale: float | None = None
    """Logarithm of the initial scale of similarities; null: 2.66 for softmax, 2.3 for sigmoid."""
    logit_bias: float | None = None
    """Initial bias of similarities, of the sigmoid loss alone; null: -10."""
    train: bool = True
    """Whether scale and bias are trained."""
    learning_rate: PositiveNumber | None = None
    """Peak learning rate of scale and bias; null: `train.learning_rate`."""


class ModelConfig(_Section):
    encoders: dict[str, EncoderConfig] = {}
    """By name; the names are the modules' names everywhere."""
    language_model: LanguageModelConfig | None = None
    """Needed unless there are `towers`."""
    towers: dict[str, TowerConfig] = {}
    """Of a contrastive model, by name; the names are the modules' names everywhere (docs/contrastive.md)."""
    contrastive: ContrastiveConfig = ContrastiveConfig()
    """The towers' loss."""
    merge: Literal["placeholder", "prepend", "cross_attention"] = "placeholder"
    """How encoder outputs enter the language model."""
    media_attention: Literal["causal", "own_item", "own_modality", "block_causal", "prefix", "family"] = "causal"
    """What a token of an image or clip sees in the language model: as text does, what stands before it; its own item
    alone; all of its modality; what stands before it and its own image or frame whole; or, as all before it do,
    everything up to the sample's last one. `family`: what multimodal models of the language model's family do (Gemma3:
    `block_causal`). Other than `causal`, samples are packed. Masks of one's own: docs/attention.md."""
    placeholder_tokens: dict[str, str] = {}
    """For each encoder, the tokenizer's token that stands where its outputs go; not given: `<image>` or `<audio>`."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "ModelConfig":
        if not self.towers:
            if self.language_model is None:
                raise ValueError("language_model: is missing; give one, or towers for a contrastive model")
            if "contrastive" in self.model_fields_set:
                raise ValueError("contrastive: is the loss of towers; give towers too, or leave it out")
            return self
        for key in ("encoders", "language_model", "placeholder_tokens", "merge", "media_attention"):
            if key in self.model_fields_set:
                raise ValueError(f"{key}: stands beside towers; a contrastive model has towers alone")
        if len(self.towers) < 2:
            raise ValueError(f"towers: has {', '.join(self.towers)} alone; give at least two")
        for name in (CONTRASTIVE, LANGUAGE_MODEL):
            if name in self.towers:
                raise ValueError(f"towers.{name}: is the name of another module; give the tower another one")
        anchor = self.contrastive.anchor
        if anchor is not None and anchor not in self.towers:
            raise ValueError(f"contrastive.anchor: there is no tower {anchor!r}; give one of {', '.join(self.towers)}")
        if self.contrastive.loss == "softmax" and self.contrastive.logit_bias is not None:
            raise ValueError("contrastive.logit_bias: the softmax loss has none; leave it out, or give loss: sigmoid")
        if self.contrastive.width is None and all(tower.projector for tower in self.towers.values()):
            raise ValueError("contrastive.width: is missing; give the width of the features, to which projectors bring")
        return self

    @model_validator(mode="after")
    def _is_trainable(self) -> "ModelConfig":
        if LANGUAGE_MODEL in self.encoders:
            raise ValueError(f"encoders.{LANGUAGE_MODEL}: is the language model's name; give the encoder another one")
        for name in self.placeholder_tokens:
            if name not in self.encoders:
                raise ValueError(f"placeholder_tokens.{name}: is no encoder; give one of {', '.join(self.encoders)}")
        parts: list[EncoderConfig | TowerConfig] = [*self.encoders.values(), *self.towers.values()]
        trains_encoder = any(part.train.module or (part.train.projector and part.projector) for part in parts)
        trains_language_model = self.language_model is not None and self.language_model.train.module
        if not (trains_encoder or trains_language_model):
            raise ValueError("nothing is trainable; set train.module or train.projector of at least one part to true")
        return self

    @property
    def causal_lm(self) -> LanguageModelConfig:
        """The language model; a model of towers has none."""
        assert self.language_model is not None
        return self.language_model

    @property
    def module_names(self) -> tuple[str, ...]:
        """Of the parts that a run file lays out."""
        return tuple(self.towers) if self.towers else (*self.encoders, LANGUAGE_MODEL)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class PreparedDataConfig(_Section):
    """How samples are prepared, of every kind of data that can be trained on (docs/data-service.md)."""

    workers: CountOrNever = 1
    """Processes that read, decode and tokenize: for each rank, or of a data server. 0: a thread of the rank does it."""
    batches_ahead: CountOrNever = 2
    """Global batches that are prepared while others are trained on."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """What follows a sample that cannot be prepared: the end, or a batch without it, named in `skipped_samples.jsonl`;
    all samples are then decoded before their batch is cut."""
    servers: Files = ()
    """Addresses of data servers, such as `grpc://host:8815` or `grpc+tls://host:8815`; none: workers of the ranks."""
    server_timeout_s: PositiveNumber = 60.0
    """For which a data server may be silent before another is asked, and no server may answer before the run ends."""
    token_file: str | None = None
    """File with the secret that data servers ask for; null: the environment variable MOTET_DATA_TOKEN."""
    tls_roots: str | None = None
    """PEM file of the authorities that sign the servers' certificates; null: the system's."""


class DialADigitConfig(PreparedDataConfig):
    """The task *dial a digit*, which needs no download."""

    kind: Literal["dial-a-digit"]
    seed: int = 0
    """Of the examples."""
    max_digits: Annotated[int, Field(ge=1, le=8)] = 8
    """In one image, and in one clip."""
    max_images: Count = 1
    """In one example."""
    max_clips: Count = 1
    """In one example."""
    no_image: Fraction = 0.15
    """Share of examples without an image."""
    no_sound: Fraction = 0.15
    """Share of examples without a sound; with `no_image` at most 1."""
    sum_questions: Fraction = 0.2
    """Share of questions for the sum of all digits."""
    num_train: Count = 100_000
    """Examples in one epoch."""
    num_held_out: Count = 1000
    """Examples in handwriting that is never trained on."""

    @model_validator(mode="after")
    def _leaves_something(self) -> "DialADigitConfig":
        if self.no_image + self.no_sound > 1:
            raise ValueError(f"no_image and no_sound are {self.no_image + self.no_sound} together; give at most 1")
        return self


class ConversationsConfig(PreparedDataConfig):
    """Conversations in the LLaVA form, as JSON lines (or one JSON list), with image and audio files beside them."""

    kind: Literal["conversations"]
    files: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
    """One file or several."""
    eval_files: Files = ()
    """Held-out conversations."""
    image_folder: str = "."
    """What the images' paths are relative to."""
    audio_folder: str = "."
    """What the clips' paths are relative to."""
    tokenizer: str | None = None
    """Hub id or folder; null: beside the language model."""
    processors: dict[str, str] = {}
    """For each encoder, hub id or folder of its image processor or feature extractor; not given: beside the encoder."""
    seed: int = 0
    """Of the order of the conversations."""


class SameDigitsConfig(PreparedDataConfig):
    """A task for towers that needs no download: handwritten digits, the sound of dialling them, and their names."""

    kind: Literal["same-digits"]
    seed: int = 0
    """Of the examples."""
    min_digits: Annotated[int, Field(ge=1, le=8)] = 3
    """In one example."""
    max_digits: Annotated[int, Field(ge=1, le=8)] = 5
    """In one example."""
    num_train: Count = 100_000
    """Examples in one epoch."""
    num_held_out: Count = 1024
    """Examples in handwriting that is never trained on."""

    @model_validator(mode="after")
    def _has_a_range(self) -> "SameDigitsConfig":
        if self.max_digits < self.min_digits:
            raise ValueError(f"max_digits: is {self.max_digits}, less than min_digits {self.min_digits}")
        return self


class PairsConfig(PreparedDataConfig):
    """Samples for towers, as JSON lines: `{"image": path, "audio": path, "text": "..."}`, one key for each tower's
    modality."""

    kind: Literal["pairs"]
    files: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
    """One file or several."""
    eval_files: Files = ()
    """Held-out samples."""
    image_folder: str = "."
    """What the images' paths are relative to."""
    audio_folder: str = "."
    """What the clips' paths are relative to."""
    tokenizer: str | None = None
    """Hub id or folder; null: beside the text tower."""
    processors: dict[str, str] = {}
    """For each tower of images or sounds, hub id or folder of its processor; not given: beside the tower."""


class DescribedImagesConfig(_Section):
    """Images of one size in every sample."""

    height: Count
    """In pixels, as the encoder's processor returns them."""
    width: Count
    """In pixels."""
    count: Count = 1
    """In one sample."""


class DescribedSoundsConfig(_Section):
    """Clips of one length in every sample."""

    seconds: PositiveNumber
    """Of one clip."""
    count: Count = 1
    """In one sample."""


class DescribedConfig(_Section):
    """Samples by their sizes alone: to plan and to simulate without data. They cannot be trained on."""

    kind: Literal["described"]
    text_tokens: Count = 1024
    """Of each sample; all carry loss. Of a text tower: its sequence."""
    images: dict[str, DescribedImagesConfig] = {}
    """By encoder."""
    sounds: dict[str, DescribedSoundsConfig] = {}
    """By encoder."""
    num_train: Count = 1_000_000
    """Samples in one epoch."""


class DeviceConfig(_Section):
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


class LinkConfig(_Section):
    """A link of the user's."""

    latency_s: Annotated[float, Field(ge=0)]
    """Of one message."""
    bytes_per_s: PositiveNumber
    """In one direction."""
    source: str = "the user"
    """Where the numbers are from."""


class CatalogueConfig(_Section):
    """What a catalogue file may hold."""

    devices: dict[str, DeviceConfig] = {}
    """By name."""
    links: dict[str, LinkConfig] = {}
    """By name."""


class ClusterConfig(_Section):
    device: Literal["cpu", "cuda"] = "cpu"
    """What the processes compute on."""
    num_devices: Count = 1
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


class ContextConfig(_Section):
    block_size: Count = 128
    """Tokens that stay together on one rank."""
    policy: Literal["lpt", "lpt_uncapped", "snake", "zigzag", "contiguous", "striped", "random"] = "lpt"
    """Who gets which block: `lpt` balances the attention; the others are there to compare with."""
    method: Literal["all_gather", "ulysses"] = "all_gather"
    """Keys and values come to the queries, or tokens are traded for heads, which cp then has to divide."""
    backend: Literal["auto", "triton", "flex", "dense"] = "auto"
    """Who computes the attention: our Triton kernels, FlexAttention or torch's dense attention; auto: the kernels on a
    GPU, dense attention elsewhere."""


class ModuleParallelConfig(_Section):
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
    context: ContextConfig = ContextConfig()
    """How context-parallel groups share tokens."""

    @model_validator(mode="after")
    def _has_as_many_stages(self) -> "ModuleParallelConfig":
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pp:
            raise ValueError(
                f"layers_per_stage: has {len(self.layers_per_stage)} entries for pp: {self.pp}; give {self.pp} of them"
            )
        return self


class ModuleLimitsConfig(_Section):
    tp: tuple[Count, ...] | None = None
    """Sizes of tensor-parallel groups; null: as for all modules."""
    max_pp: Count | None = None
    """Most stages; null: as for all modules."""


class LimitsConfig(_Section):
    tp: tuple[Count, ...] | None = None
    """Sizes of tensor-parallel groups; those that do not divide a module's heads are left out there. null: powers of
    two within a node, on CPUs 1; of profiled costs, those that were profiled."""
    dp: tuple[Count, ...] | None = None
    """Numbers of replicas; null: powers of two that leave no microbatch empty, on CPUs 1."""
    max_pp: Count | None = None
    """Most stages of a module; null: as many as it has layers."""
    modules: dict[str, ModuleLimitsConfig] = {}
    """For a module by itself, in the place of the above."""


class ParallelConfig(_Section):
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
    `distmm_pipe`."""
    assignment: Literal["contiguous", "random", "disttrain", "dip", "entrain", "entrain_k_eff"] = "contiguous"
    """Which samples make up each microbatch (docs/data.md): as they come, at random, in DistTrain's order, like DIP, or
    balanced with deferral like Entrain, with all microbatches or no more than the heaviest sample leaves even."""
    num_microbatches: Count = 4
    """Per replica; of towers, per replica and contrastive batch."""
    packing: bool = False
    """A microbatch's samples stand in one row without padding, and do not see each other."""
    max_packed_tokens: Count | None = None
    """With `packing`: most tokens of such a row; language-model microbatches of more are cut. null: no limit."""
    recompute: tuple[str, ...] = ()
    """Modules whose activations are computed again in the backward pass."""
    recompute_features: tuple[str, ...] = ()
    """Towers whose forward keeps no graph: it runs again in the backward pass, from the stage's input."""
    zero1: bool = False
    """Shard the optimizer's state over the replicas."""

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
        return self


class FailuresConfig(_Section):
    """Going on when nodes fail (docs/resilience.md)."""

    tolerate: Count = 1
    """Nodes that may fail at once without anything being lost: there are that many copies of every layer, and one."""
    detect_s: PositiveNumber = 1.0
    """A node that gives no sign of life for so many seconds is lost."""


class TrainConfig(_Section):
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
    seed: int = 0
    """Of dropout and of the order of the data."""
    eval_every: CountOrNever = 0
    """Steps between evaluations on held-out samples; 0: none."""
    eval_samples: Count = 256
    """Held-out samples of one evaluation."""
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


class RunConfig(_Section):
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
            if self.data.kind in ("same-digits", "pairs"):
                raise ValueError(f"data.kind: {self.data.kind} is for towers; give model.towers, or other data")
            return
        if self.data.kind in ("dial-a-digit", "conversations"):
            raise ValueError(f"data.kind: {self.data.kind} has no pairs for towers; give pairs or same-digits")
        if size is not None and whole % size:
            raise ValueError(
                f"train.contrastive_batch_size: is {size}, which does not divide train.global_batch_size {whole}; "
                "give a divisor"
            )
