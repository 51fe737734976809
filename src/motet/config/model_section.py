"""The section `model` of the run file: the modules and which of their weights are trained."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from motet.config.section import Count, CountOrNever, LearningRate, PositiveNumber, Section, Share
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL, queries_of


class LoraOptions(Section):
    """Low-rank adapters on linear layers of the module's transformer blocks (Hu et al. 2021, "LoRA"), made by peft.
    They are trained, and the module's own weights are frozen. Needs the extra `lora`."""

    rank: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Number of rows of an adapter's first matrix."""
    alpha: PositiveNumber = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's input."""
    targets: list[str] | None = None
    """Linear layers that get an adapter, by the ends of their paths in a block (`q_proj`, `mlp.fc1`); null: all linear
    layers of the blocks."""
    merged_export: bool = False
    """Whether exports contain the weights with the adapters merged into them; false: the original weights and, in a
    separate folder, the adapters in peft's format."""

    @model_validator(mode="after")
    def _has_targets(self) -> "LoraOptions":
        if self.targets is not None and not all(self.targets or [""]):
            raise ValueError("targets: has no name, or an empty one; give names of linear layers, or leave it out")
        return self


class TrainableModule(Section):
    module: bool = True
    """Whether the module's own weights are trained; false: they are frozen. With `lora` they are always frozen."""
    lora: LoraOptions | None = None
    """Adapters that are trained instead of the module's own weights; null: none."""

    @model_validator(mode="before")
    @classmethod
    def _freezes_beside_adapters(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("lora") is None:
            return given
        if given.get("module") is True:
            raise ValueError("module: is true, but beside lora the module's own weights are frozen; leave it out")
        return {**given, "module": False}

    @property
    def trains_module(self) -> bool:
        """Whether anything of the module is trained: its own weights, or adapters."""
        return self.module or self.lora is not None


class TrainableEncoder(TrainableModule):
    projector: bool = True
    """Whether the projector is trained; false: it is frozen."""


class TrainableGenerator(TrainableEncoder):
    queries: bool = True
    """Whether the query tokens are trained; false: they are frozen."""


class PartConfig(Section):
    """A HuggingFace model. Exactly one of `hub`, `path` and `config` is given, or an encoder's `module`."""

    hub: str | None = None
    """Id of a model on the hub."""
    path: str | None = None
    """Local folder with config.json and safetensors."""
    config: str | None = None
    """Name of a configuration class of transformers, for random weights."""
    values: dict[str, Any] = {}
    """Arguments of the configuration class; with `hub` and `path`, values that replace the stored ones."""
    seed: CountOrNever = 0
    """Seed of the random weights."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of this part; null: `train.learning_rate`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> "PartConfig":
        given = [key for key in ("hub", "path", "config", "module") if getattr(self, key, None) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given)} are given; keep one"
                if given
                else "has no source; give one of hub, path and config"
            )
        if "model_type" in self.values:
            raise ValueError("values.model_type: follows from config, hub or path; leave it out")
        return self


class EncoderConfig(PartConfig):
    module: str | None = None
    """Your own encoder: `package.module:name` of a torch module's class, or of a function that makes a module from
    `values`. It is registered with `motet.register_encoder` (docs/adding-an-encoder.md)."""
    projector: Literal["linear", "mlp"] | None = "mlp"
    """Layers that map the encoder's width to the language model's; null: none."""
    train: TrainableEncoder = TrainableEncoder()
    projector_learning_rate: LearningRate | None = None
    """Peak learning rate of the projector; null: `train.learning_rate`."""
    feature_select: Literal["patch", "full"] = "patch"
    """Outputs of vision encoders: only the patches, or also the class token."""
    feature_layer: int | None = None
    """Index of the hidden states that are the encoder's output (LLaVA: -2); null: those of the last layer."""


class LanguageModelConfig(PartConfig):
    train: TrainableModule = TrainableModule()
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the auxiliary loss that makes routers use all experts of a mixture equally. It is computed for each
    sample (the mean over its mixtures; Switch Transformers, equations 4 to 6) and weighted by the sample's loss tokens,
    so it does not depend on the assignment of samples to microbatches. The reported loss includes it. 0: none."""
    router_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Amount by which the correction of a router's score of an expert (`e_score_correction_bias`) changes after each
    step: it rises if fewer tokens of the global batch chose the expert than the mean, and falls if more did
    (DeepSeek-V3: 0.001). 0: corrections do not change."""


class SpectrogramConfig(Section):
    """The spectrogram by which a generator represents sounds: an image with one channel, mel bands by frames, of
    decibels below full scale (-80 and less are mapped to -1, and 0 to 1)."""

    sampling_rate: Annotated[int, Field(ge=100, le=1_000_000)] = 16_000
    """Sampling rate in Hz, to which sounds are resampled."""
    window: Annotated[int, Field(ge=4, le=65_536)] = 400
    """Number of samples of a frame's window."""
    hop: Annotated[int, Field(ge=1, le=65_536)] = 160
    """Number of samples from one frame to the next."""
    num_mels: Annotated[int, Field(ge=1, le=4096)] = 64
    """Number of mel bands, from 0 Hz to half of the sampling rate; a multiple of the generator's patch size."""


class AutoencoderConfig(Section):
    """A stored AutoencoderKL of diffusers, which is frozen."""

    hub: str | None = None
    """Id of a model on the hub."""
    path: str | None = None
    """Local folder with config.json and safetensors."""

    @model_validator(mode="after")
    def _has_one_source(self) -> "AutoencoderConfig":
        if (self.hub is None) == (self.path is None):
            raise ValueError("give one of hub and path")
        return self


class CodecConfig(Section):
    """A stored audio codec of transformers (MimiModel or DacModel), which is frozen."""

    hub: str | None = None
    """Id of a model on the hub."""
    path: str | None = None
    """Local folder with config.json and safetensors."""
    num_codebooks: Count = 8
    """Number of codebooks whose codes are learned, the first ones of the codec."""

    @model_validator(mode="after")
    def _has_one_source(self) -> "CodecConfig":
        if (self.hub is None) == (self.path is None):
            raise ValueError("give one of hub and path")
        return self


class GeneratorConfig(PartConfig):
    """A diffusion model that generates images, or sounds as spectrograms, from the language model's hidden states
    (docs/generators.md); `config` names a class of diffusers, for random weights: SD3Transformer2DModel,
    PixArtTransformer2DModel, SanaTransformer2DModel, FluxTransformer2DModel, QwenImageTransformer2DModel, or
    UNet2DConditionModel, which is one stage. With `codec` a GPT2Config: a decoder that generates sounds as codes."""

    queries: Count | None = None
    """Number of learned query tokens at each placeholder `<generate>`, whose hidden states condition the image; null:
    all hidden states up to the placeholder condition it, and each sample has one image."""
    spectrogram: SpectrogramConfig | None = None
    """If given (`{}` for the defaults), the generator makes sounds, which records name under `generate_audio`; null: it
    makes images."""
    codec: CodecConfig | None = None
    """If given, the generator makes sounds as codes of this codec, one after the other: `config` is GPT2Config, whose
    blocks attend to the conditions, and records name sounds under `generate_audio`. Codes are made when samples are
    prepared and stored in `~/.cache/motet` (`MOTET_CACHE`). null: it is a diffusion model."""
    autoencoder: AutoencoderConfig | None = None
    """If given, the generator works on latents of this autoencoder, which are computed when samples are prepared and
    stored in `~/.cache/motet` (`MOTET_CACHE`); null: it works on pixels."""
    projector: Literal["linear", "mlp"] = "mlp"
    """The connector: a norm, followed by layers that map the language model's width to that of the generator's
    conditions."""
    objective: Literal["flow", "epsilon", "v"] = "flow"
    """Quantity that the generator predicts: the velocity of flow matching with logit-normal time steps (`flow`), or the
    noise (`epsilon`) or the velocity (`v`) of a diffusion of 1000 steps whose beta is linear from 0.0001 to 0.02."""
    loss_per: Literal["image", "place"] = "image"
    """How the squared error is averaged: over each image and then over the images of the global batch (`image`), or
    over all elements of all latents (`place`), so that a large image has more weight. With `codec` likewise the
    cross-entropy of the codes of each sound."""
    loss_weight: PositiveNumber = 1.0
    """Weight of this loss relative to the language model's."""
    guidance: PositiveNumber | None = None
    """Guidance value that a model with `guidance_embeds` (FLUX.1-dev) is given in training and in sampling; null: 1."""
    null_condition: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability with which a training image's conditions are replaced by a learned null condition, for
    classifier-free guidance."""
    train: TrainableGenerator = TrainableGenerator()
    projector_learning_rate: LearningRate | None = None
    """Peak learning rate of the connector and the null condition; null: `train.learning_rate`."""
    queries_learning_rate: LearningRate | None = None
    """Peak learning rate of the query tokens; null: `train.learning_rate`."""
    ema: Share | None = None
    """Decay of a moving average of the weights (transformer, connector, query tokens), such as 0.9999; the average is
    exported. In step n the decay is (1 + n) / (10 + n) if that is less. null: no average; the weights are exported."""

    @model_validator(mode="after")
    def _has_no_adapters(self) -> "GeneratorConfig":
        if self.train.lora is not None:
            raise ValueError("train.lora: is not supported for generators; leave it out")
        if self.autoencoder is not None and self.spectrogram is not None:
            raise ValueError("autoencoder: is not supported with spectrogram; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _is_a_decoder_of_codes(self) -> "GeneratorConfig":
        if self.codec is None:
            return self
        for key in ("spectrogram", "autoencoder", "guidance", "objective"):
            if key in self.model_fields_set and getattr(self, key) is not None:
                raise ValueError(
                    f"{key}: is for diffusion models, but codec makes this a decoder of codes; leave it out"
                )
        if self.config != "GPT2Config":
            raise ValueError("config: a decoder of codes has random weights at first; give GPT2Config, no hub or path")
        for key in ("vocab_size", "add_cross_attention", "is_decoder", "tie_word_embeddings"):
            if key in self.values:
                raise ValueError(f"values.{key}: follows from codec; leave it out")
        return self

    @property
    def makes_sounds(self) -> bool:
        return self.spectrogram is not None or self.codec is not None


class TowerConfig(PartConfig):
    part: Literal["image", "text"] | None = None
    """The tower of a stored CLIPModel or SiglipModel; null: the stored model is one encoder."""
    projector: Literal["projection", "linear", "mlp"] | None = "projection"
    """Layers that map the encoder's width to that of the features: a matrix (CLIP; the stored one, if `hub` or `path`
    has it), one linear layer or two; null: the feature is the encoder's pooled output (SigLIP)."""
    train: TrainableEncoder = TrainableEncoder()
    projector_learning_rate: LearningRate | None = None
    """Peak learning rate of the projector; null: `train.learning_rate`."""

    @model_validator(mode="after")
    def _is_part_of_something_stored(self) -> "TowerConfig":
        if self.part is not None and self.config is not None:
            raise ValueError(f"part: is {self.part}, but config names one encoder; leave it out, or give hub or path")
        return self


class CompositePartConfig(Section):
    """How a part of a stored model of several modalities is trained: an encoder (`vision`, `audio`) or the
    `language_model`."""

    train: TrainableEncoder = TrainableEncoder()
    learning_rate: LearningRate | None = None
    """Peak learning rate of this part; null: `train.learning_rate`."""
    projector_learning_rate: LearningRate | None = None
    """Peak learning rate of the projector of an encoder; null: `train.learning_rate`."""


INITIAL_LOGIT_SCALE = {"softmax": math.log(1 / 0.07), "sigmoid": math.log(10.0)}
"""Initial values by loss, from CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023)."""
LogitScale = Annotated[float, Field(ge=-7, le=7, allow_inf_nan=False)]
"""CLIP keeps the logarithm below 4.61. At 10, rounding errors of float32 are 1e-4 of the gradients."""
LogitBias = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)]


class ContrastiveConfig(Section):
    """The loss that compares the towers' features of the samples of a contrastive batch. A pair of towers compares the
    samples that have an item for both."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax over the contrastive batch (CLIP), or a sigmoid for each pair of samples (SigLIP)."""
    width: Count | None = None
    """Width of the features; null: that of the first tower without projector."""
    anchor: str | None = None
    """The tower that all others are compared with; null: all pairs of towers are compared."""
    logit_scale: LogitScale | None = None
    """Logarithm of the initial scale of similarities; null: the stored one, if an image and a text tower come from
    one stored CLIPModel (softmax) or SiglipModel (sigmoid), else 2.66 for softmax, 2.3 for sigmoid."""
    max_logit_scale: LogitScale | None = None
    """Upper limit of this logarithm during training (CLIP: 4.6052, a scale of 100); null: no limit."""
    logit_bias: LogitBias | None = None
    """Initial bias of similarities, for the sigmoid loss only; null: the stored one, as for the scale, else -10."""
    train: bool = True
    """Whether scale and bias are trained."""
    loss_weight: PositiveNumber = 1.0
    """Weight of this loss relative to that of a `decoder`."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of scale and bias; null: `train.learning_rate`."""


class DecoderConfig(PartConfig):
    """A GPT-2 or BERT that captions the input of a tower, by cross-attention to its features (CoCa). Its loss is added
    to the contrastive loss. Its width must be that of the features."""

    reads: str
    """The tower to whose features it attends."""
    loss_weight: PositiveNumber = 2.0
    """Weight of the captioning loss, the mean over the tokens of the captions."""
    train: TrainableModule = TrainableModule()

    @model_validator(mode="before")
    @classmethod
    def _attends(cls, given: Any) -> Any:
        """Sets the values that make transformers build a decoder with cross-attention."""
        values = given.get("values", {}) if isinstance(given, dict) else None
        if not isinstance(values, dict):
            return given
        for key in ("is_decoder", "add_cross_attention"):
            if values.get(key, True) is not True:
                raise ValueError(f"values.{key}: is {values[key]}, but a decoder needs the default; leave it out")
        return {**given, "values": {**values, "is_decoder": True, "add_cross_attention": True}}


OF_SINGLE_MODULES = (
    "encoders",
    "language_model",
    "generators",
    "towers",
    "contrastive",
    "decoder",
    "merge",
    "media_attention",
    "placeholder_tokens",
)
"""Keys of models whose modules are given one by one."""


class ModelConfig(Section):
    hub: str | None = None
    """Id of a model of several modalities on the hub, in place of `encoders` and `language_model` (docs/composites.md).
    Its encoders and its language model become modules, `vision`, `audio` and `language_model`."""
    path: str | None = None
    """Local folder with such a model: config.json, safetensors and a processor."""
    config: str | None = None
    """Name of the configuration class of such a model, for random weights."""
    values: dict[str, Any] = {}
    """Arguments of the configuration class; with `hub` and `path`, values that replace the stored ones."""
    seed: CountOrNever = 0
    """Seed of the random weights."""
    parts: dict[str, CompositePartConfig] = {}
    """How the parts of such a model are trained; parts that are not named are trained completely."""
    encoders: dict[str, EncoderConfig] = {}
    """Encoders by name. Other keys, plans and reports refer to modules by these names."""
    language_model: LanguageModelConfig | None = None
    """The language model; required unless there are `towers`."""
    generators: dict[str, GeneratorConfig] = {}
    """Generators by name, which read the language model's hidden states (docs/generators.md)."""
    towers: dict[str, TowerConfig] = {}
    """Encoders of a contrastive model by name (docs/contrastive.md). Other keys, plans and reports use these names."""
    contrastive: ContrastiveConfig = ContrastiveConfig()
    """The towers' loss."""
    decoder: DecoderConfig | None = None
    """A decoder that captions the input of a tower; null: none."""
    merge: Literal["placeholder", "prepend", "cross_attention"] = "placeholder"
    """How the outputs of encoders enter the language model."""
    media_attention: Literal["causal", "own_item", "own_modality", "block_causal", "prefix", "family"] = "causal"
    """The tokens to which a token of an image or clip attends in the language model. `causal`: all tokens before it, as
    for text; `own_item`: only its own item; `own_modality`: all items of its modality; `block_causal`: all tokens
    before it and its own image or frame; `prefix`: everything up to the sample's last image or clip, as do all tokens
    before that; `family`: as in multimodal models of the language model's family (Gemma3: `block_causal`). With any
    value but `causal`, samples are packed. For custom masks see docs/attention.md."""
    placeholder_tokens: dict[str, str] = {}
    """Tokens of the tokenizer that mark the positions of outputs, by encoder, and of query tokens, by generator. If
    they are not given: `<image>`, `<audio>` and `<generate>`."""

    def _is_given(self, key: str) -> bool:
        """Whether the value differs from the default, which may be given explicitly."""
        return bool(getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True))

    @property
    def composite(self) -> PartConfig | None:
        """The model of several modalities; None: the modules are given one by one."""
        if self.hub is None and self.path is None and self.config is None:
            return None
        return PartConfig(hub=self.hub, path=self.path, config=self.config, values=self.values, seed=self.seed)

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "ModelConfig":
        sources = [key for key in ("hub", "path", "config") if self._is_given(key)]
        if sources:
            return self._checked_composite(sources)
        for key in ("values", "seed", "parts"):
            if self._is_given(key):
                raise ValueError(f"{key}: applies to whole models only; give hub, path or config too, or leave it out")
        if not self.towers:
            if self.language_model is None:
                raise ValueError("language_model: is missing; give one, or towers for a contrastive model")
            if self._is_given("contrastive"):
                raise ValueError("contrastive: applies to towers only; give towers too, or leave it out")
            if self.decoder is not None:
                raise ValueError("decoder: applies to towers only; give towers too, or leave it out")
            return self
        for key in ("encoders", "language_model", "generators", "placeholder_tokens", "merge", "media_attention"):
            if self._is_given(key):
                raise ValueError(f"{key}: cannot be combined with towers; a contrastive model has towers only")
        if len(self.towers) < 2:
            raise ValueError(f"towers: has {', '.join(self.towers)} only; give at least two")
        for name in (CONTRASTIVE, DECODER, LANGUAGE_MODEL):
            if name in self.towers:
                raise ValueError(f"towers.{name}: is the name of another module; give the tower another one")
        anchor = self.contrastive.anchor
        if anchor is not None and anchor not in self.towers:
            raise ValueError(f"contrastive.anchor: there is no tower {anchor!r}; give one of {', '.join(self.towers)}")
        if self.decoder is not None and self.decoder.reads not in self.towers:
            raise ValueError(
                f"decoder.reads: there is no tower {self.decoder.reads!r}; give one of {', '.join(self.towers)}"
            )
        if self.contrastive.loss == "softmax" and self.contrastive.logit_bias is not None:
            raise ValueError("contrastive.logit_bias: applies to loss: sigmoid only; give that, or leave it out")
        given = self.contrastive
        initial = INITIAL_LOGIT_SCALE[given.loss] if given.logit_scale is None else given.logit_scale
        if given.max_logit_scale is not None and initial > given.max_logit_scale:
            raise ValueError(
                f"contrastive.max_logit_scale: is {given.max_logit_scale}, less than the initial logit_scale "
                f"{initial:.3g}; give more, or a smaller logit_scale"
            )
        if self.contrastive.width is None and all(tower.projector for tower in self.towers.values()):
            raise ValueError("contrastive.width: is missing; give the width of the features that projectors produce")
        return self

    def _checked_composite(self, sources: list[str]) -> "ModelConfig":
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given; keep one")
        for key in OF_SINGLE_MODULES:
            if self._is_given(key):
                raise ValueError(
                    f"{key}: cannot be combined with {sources[0]}, which names a whole model; leave one of them out"
                )
        if "model_type" in self.values:
            raise ValueError("values.model_type: follows from config, hub or path; leave it out")
        return self

    @model_validator(mode="after")
    def _is_trainable(self) -> "ModelConfig":
        if self.composite is not None:
            return self
        if LANGUAGE_MODEL in self.encoders:
            raise ValueError(f"encoders.{LANGUAGE_MODEL}: is the language model's name; give the encoder another one")
        for name in self.generators:
            if name in (*self.encoders, LANGUAGE_MODEL):
                raise ValueError(f"generators.{name}: is the name of another module; give the generator another one")
            if queries_of(name) in (*self.encoders, *self.generators):
                raise ValueError(
                    f"generators.{name}: its query tokens are called {queries_of(name)}, as another module is; rename "
                    "one of the two"
                )
        for name, token in self.placeholder_tokens.items():
            known = (*self.encoders, *self.generators)
            if name not in known:
                raise ValueError(
                    f"placeholder_tokens.{name}: is not an encoder or generator; give one of {', '.join(known)}"
                )
            if not token:
                raise ValueError(f"placeholder_tokens.{name}: is empty; give a token of the tokenizer, or leave it out")
        parts: list[EncoderConfig | TowerConfig | GeneratorConfig] = [
            *self.encoders.values(),
            *self.towers.values(),
            *self.generators.values(),
        ]
        trains_encoder = any(part.train.trains_module or (part.train.projector and part.projector) for part in parts)
        models = [part for part in (self.language_model, self.decoder) if part is not None]
        trains_queries = any(part.queries and part.train.queries for part in self.generators.values())
        if not (trains_encoder or trains_queries or any(part.train.trains_module for part in models)):
            raise ValueError("nothing is trainable; set train.module or train.projector of at least one part to true")
        return self

    def check_trained_generators(self) -> None:
        """Refuses features that have not been verified with trained generators."""
        names = list(self.generators)
        for is_sound, kind in ((False, "images"), (True, "sounds")):
            alike = [name for name in names if self.generators[name].makes_sounds == is_sound]
            if len(alike) > 1:
                raise ValueError(
                    f"generators: {' and '.join(alike)} both make {kind}, but records name those of one generator; "
                    "leave one out, or give it a spectrogram or codec (it then makes sounds)"
                )
        prompted = [name for name in names if self.generators[name].queries is None]
        if prompted and len(names) > 1:
            raise ValueError(
                f"generators.{prompted[0]}.queries: is null, but of several generators each reads query tokens of its "
                "own; give a number, such as 8"
            )
        if self.merge != "placeholder":
            raise ValueError(
                f"merge: is {self.merge}, but generators.{names[0]} needs outputs at placeholders; leave it out"
            )
        if self.media_attention != "causal":
            raise ValueError(
                f"media_attention: is {self.media_attention}, but generators.{names[0]} needs causal attention; "
                "leave it out"
            )

    @property
    def causal_lm(self) -> LanguageModelConfig:
        """The language model, which contrastive models do not have."""
        assert self.language_model is not None
        return self.language_model

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the modules that `parallel.explicit` lays out."""
        if not self.towers:
            return (*self.encoders, LANGUAGE_MODEL, *self.generators)
        return tuple(self.towers) if self.decoder is None else (*self.towers, DECODER)
