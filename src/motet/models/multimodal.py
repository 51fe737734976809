"""A multimodal model out of unmodified HuggingFace modules (Cornstarch sections 3.2 and 5.1, thesis 3.4 and B.1).

A `ModalityModule` is one module with what connects it to the others; a `MultimodalModule` joins encoders and a language
model. It runs by itself in one process, and `MultimodalParallelSpec.apply` or `MultimodalParallelModule` distribute it.

What is frozen: a part (a module, a projector) that is in evaluation mode while the whole is in training, or none of
whose parameters requires a gradient. So `mllm.vision_encoder.module.train(mode=False)` freezes the vision encoder, as
the papers' listings have it; `requires_grad_(True)` and `train()` on the part make it trainable again. Frozen parts
stay in evaluation mode (no dropout) when the whole is put into training mode.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn
from transformers.utils import ModelOutput

from motet.attention.masks.rules import rule_named
from motet.errors import UserError
from motet.families.encoders import family_of
from motet.families.language_models import is_language_model
from motet.families.token_counts import FeatureSelect
from motet.models.stages.language_model import PreprocessCallback
from motet.models.stages.projector import build_projector, projected_size

Merge = Literal["placeholder", "prepend", "cross_attention"]
"""How encoder outputs reach the language model: in place of placeholder tokens, before the text, by cross-attention."""

MERGES: tuple[Merge, ...] = ("placeholder", "prepend", "cross_attention")


class ModalityModule(nn.Module):
    """A HuggingFace module, the projector behind it and the callbacks around both.

    Args:
        model: an encoder of a supported family, or a causal language model.
        projector: "linear", "mlp", a module of your own, or None. A named one is built when the `MultimodalModule` is
            made and the language model's width is known. `proj` is the papers' name for the same.
        preprocess_callback: (inputs) -> inputs, before the module.
        postprocess_module_callback: (inputs, output) -> output, between module and projector.
        postprocess_projector_callback: (inputs, output) -> output, after the projector.
        feature_layer: index into the encoder's hidden states of what is handed on (LLaVA: -2); None: its output.
        feature_select: "patch" leaves out class tokens and padding, "full" hands all of them on.

    What callbacks are given and when they are called: `motet.models.stages.encoder`.
    """

    def __init__(
        self,
        model: nn.Module,
        projector: str | nn.Module | None = None,
        *,
        proj: str | nn.Module | None = None,
        preprocess_callback: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        postprocess_module_callback: Callable[[dict[str, Any], Any], Any] | None = None,
        postprocess_projector_callback: Callable[[dict[str, Any], Any], Any] | None = None,
        feature_layer: int | None = None,
        feature_select: FeatureSelect = "patch",
    ) -> None:
        super().__init__()
        if projector is not None and proj is not None:
            raise UserError("projector and proj are two names for the same argument; give one")
        self.module: Any = model
        self.feature_layer = feature_layer
        self.feature_select = feature_select
        self.pooling: Literal["alone", "first"] | None = None
        """Of towers: hand on one vector of each item, or that and then all of its features."""
        given = projector if projector is not None else proj
        self.projector = given if isinstance(given, nn.Module) else None
        self.projector_kind = given if isinstance(given, str) else None
        self.preprocess_callback = preprocess_callback
        self.postprocess_module_callback = postprocess_module_callback
        self.postprocess_projector_callback = postprocess_projector_callback
        # from_pretrained returns models in evaluation mode, which here would mean frozen.
        for part in self.parts().values():
            part.train()

    @property
    def is_language_model(self) -> bool:
        return is_language_model(self.module)

    @property
    def output_size(self) -> int:
        """Width of the module's own output, before the projector."""
        if self.is_language_model:
            return self.module.config.hidden_size
        return getattr(self.module.config, family_of(self.module).output_size)

    def build_projector(self, out_features: int, *, seed: int = 0) -> None:
        """Makes a projector that was given by name. Does nothing otherwise."""
        if isinstance(self.projector_kind, str) and self.projector is None:
            self.projector = build_projector(self.projector_kind, self.output_size, out_features, seed=seed)
            parameter = next(self.module.parameters())
            # A stage that lacks the encoder's first layers has these on the meta device; the projector is real.
            self.projector.to(dtype=parameter.dtype, device=None if parameter.is_meta else parameter.device)

    def parts(self) -> dict[str, nn.Module]:
        """`module`, and `projector` if there is one."""
        return (
            {"module": self.module}
            if self.projector is None
            else {
                "module": self.module,
                "projector": self.projector,
            }
        )


EncoderModule = ModalityModule
"""The thesis' name."""


class MultimodalModule(nn.Module):
    """Encoders and a language model.

    Args:
        encoders: by name, each a `ModalityModule` or an encoder that needs none; `mllm.<name>_encoder` is its
            `ModalityModule`.
        language_model: a causal language model, or a `ModalityModule` of one.
        preprocess_callback: (encoder_outputs, inputs) -> inputs, before the language model (Cornstarch section 5.1):
            puts the encoders' outputs where `merge` has left room for them, in motet's stead. It is called once for
            each sample with {encoder: [num_outputs, hidden_size]} and {"input_ids": [T], "inputs_embeds": [T,
            hidden_size]}; "inputs_embeds" of what it returns, of the same shape, is what the language model reads.
        merge: how encoder outputs reach the language model; None: by placeholder if there are `placeholder_token_ids`,
            else prepended.
        placeholder_token_ids: by encoder, the token id in whose places its outputs stand.
        media_attention: what tokens of images and clips see in the language model: a kind of
            `motet.attention.masks.rules.MediaAttention`, or the name of a mask of your own
            (`motet.attention.masks.rules.register_mask`).
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        language_model: nn.Module,
        preprocess_callback: PreprocessCallback | None = None,
        *,
        merge: Merge | None = None,
        placeholder_token_ids: Mapping[str, int] | None = None,
        media_attention: str = "causal",
        seed: int = 0,
    ) -> None:
        super().__init__()
        rule_named(media_attention)
        if media_attention != "causal" and preprocess_callback is not None:
            raise UserError(
                "preprocess_callback: goes with media_attention causal only; leave it out, or merge by placeholder or "
                "prepend"
            )
        if merge is None:
            merge = "placeholder" if placeholder_token_ids else "prepend"
        if not isinstance(language_model, ModalityModule):
            language_model = ModalityModule(language_model)
        _check_merge(merge, language_model, preprocess_callback)
        _check_placeholders(placeholder_token_ids or {}, encoders)
        self.encoders = nn.ModuleDict(
            {name: e if isinstance(e, ModalityModule) else ModalityModule(e) for name, e in encoders.items()}
        )
        self.language_model = language_model
        self.preprocess_callback = preprocess_callback
        self.merge: Merge = merge
        self.media_attention = media_attention
        self.placeholder_token_ids = dict(placeholder_token_ids or {})
        self.num_embeddings: int = language_model.module.get_input_embeddings().num_embeddings
        self.is_taken_over = False
        width = language_model.module.config.hidden_size
        for i, (name, encoder) in enumerate(self.modality_modules(encoders_only=True).items()):
            family_of(encoder.module)
            encoder.build_projector(width, seed=seed + i)
            size = encoder.output_size if encoder.projector is None else projected_size(encoder.projector)
            if size != width:
                raise UserError(
                    f"encoders: what {name} hands on is {size} wide and the language model {width}; "
                    "give it a projector to that width"
                )
        # Parts without trainable parameters were put into training mode with the others.
        self.train()

    def __getattr__(self, name: str) -> Any:
        encoder = name.removesuffix("_encoder")
        if name != encoder and "_modules" in self.__dict__ and encoder in self._modules.get("encoders", {}):  # type: ignore[operator]
            return self._modules["encoders"][encoder]  # type: ignore[index]
        return super().__getattr__(name)

    def modality_modules(self, *, encoders_only: bool = False) -> dict[str, ModalityModule]:
        """By module name, encoders first; the language model is called `language_model`."""
        modules: dict[str, ModalityModule] = dict(self.encoders.items())  # type: ignore[arg-type]
        return modules if encoders_only else {**modules, "language_model": self.language_model}

    def parts(self) -> dict[str, nn.Module]:
        """By name: `vision.module`, `vision.projector`, ..., `language_model.module`."""
        return {
            f"{name}.{part}": module
            for name, modality_module in self.modality_modules().items()
            for part, module in modality_module.parts().items()
        }

    def freeze_eval_parts(self) -> None:
        """Parts in evaluation mode stop requiring gradients. Called when the model is parallelized and, in training,
        at every forward."""
        for part in self.parts().values():
            if not part.training:
                part.requires_grad_(False)

    def frozen_parts(self) -> set[str]:
        return {
            name
            for name, part in self.parts().items()
            if not any(parameter.requires_grad for parameter in part.parameters())
        }

    def train(self, mode: bool = True) -> "MultimodalModule":
        """As usual, but frozen parts stay in evaluation mode."""
        if self.training:
            self.freeze_eval_parts()
        super().train(mode)
        for name in self.frozen_parts():
            self.parts()[name].eval()
        return self

    def forward(self, **batch: Any) -> ModelOutput:
        """In one process. Takes what HF processors return (see `motet.models.dict_batch`), `labels` among it if a loss
        is wanted.

        Returns a `ModelOutput` with `logits` [samples, longest sequence, vocabulary], padded on the right, and `loss`,
        the mean over the tokens with a label."""
        from motet.models.dict_batch import batch_from_dict
        from motet.models.reference.single_process import run_single_process

        if self.is_taken_over:
            raise UserError("this MultimodalModule was handed to a MultimodalParallelModule; call that one's execute")
        if self.training:
            self.freeze_eval_parts()
        logits, loss = run_single_process(self, batch_from_dict(self, batch))
        return ModelOutput(logits=logits) if loss is None else ModelOutput(loss=loss, logits=logits)


def _check_merge(merge: str, language_model: ModalityModule, preprocess_callback: PreprocessCallback | None) -> None:
    name = type(language_model.module).__name__
    if merge not in MERGES:
        raise UserError(f"merge: {merge!r} is not known; give one of {', '.join(MERGES)}")
    if not language_model.is_language_model:
        raise UserError(f"language_model: {name} is not a causal language model of a supported family")
    if merge != "cross_attention":
        return
    if not getattr(language_model.module.config, "cross_attention_layers", ()):
        raise UserError(f"merge: {name} has no cross-attention layers; use placeholder or prepend")
    if preprocess_callback is not None:
        raise UserError(
            "preprocess_callback: with merge cross_attention no encoder output stands in the language model's "
            "sequence; leave it out, or merge by placeholder or prepend"
        )


def _check_placeholders(placeholder_token_ids: Mapping[str, int], encoders: Mapping[str, nn.Module]) -> None:
    encoder_of: dict[int, str] = {}
    for name, token in placeholder_token_ids.items():
        if name not in encoders:
            raise UserError(f"placeholder_token_ids: there is no encoder {name!r}; give {', '.join(encoders)}")
        if token in encoder_of:
            raise UserError(
                f"placeholder_token_ids: {token} stands for both {encoder_of[token]} and {name}; "
                "give each a token of its own"
            )
        encoder_of[token] = name
