"""A multimodal model out of unmodified HuggingFace modules (Cornstarch sections 3.2 and 5.1, thesis 3.4 and B.1).

A `MultimodalModule` joins encoders and a language model. It runs by itself in one process;
`MultimodalParallelSpec.apply` or `MultimodalParallelModule` distribute it.
"""

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn
from transformers.utils import ModelOutput

from motet.attention.masks.rules import rule_named
from motet.errors import UserError
from motet.families.encoders.encoder_families import family_of
from motet.models.batch import DictBatch, batch_from_dict
from motet.models.graph import EncoderNode, LanguageModelNode, Merge, ModalityModule, ModuleGraph, ModuleNode
from motet.models.stages.language_model import PreprocessCallback
from motet.models.stages.stage import Batch, StageInput
from motet.plan import LANGUAGE_MODEL, Edge


class MultimodalModule(ModuleGraph):
    """Encoders and a language model.

    Args:
        encoders: by name, each a `ModalityModule`, or an encoder without projector and callbacks. The model has each
            `ModalityModule` as the attribute `<name>_encoder`.
        language_model: a causal language model, or a `ModalityModule` of one.
        preprocess_callback: (encoder_outputs, inputs) -> inputs, before the language model (Cornstarch section 5.1).
            It replaces motet's merging of the encoders' outputs, for which `merge` leaves room. It is called once for
            each sample with {encoder: [num_outputs, hidden_size]} and {"input_ids": [T], "inputs_embeds": [T,
            hidden_size]}. The language model reads "inputs_embeds" of the returned dict, which has the same shape.
        merge: how encoder outputs enter the language model; None: at placeholders if there are
            `placeholder_token_ids`, else before the text.
        placeholder_token_ids: by encoder, the token id whose positions its outputs take.
        media_attention: the tokens to which tokens of images and clips attend in the language model: a kind of
            `motet.attention.masks.rules.MediaAttention`, or the name of your own mask
            (`motet.attention.masks.rules.register_mask`).
        seed: seed of projectors given by name.
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
                "preprocess_callback: requires media_attention causal; leave it out, or merge by placeholder or prepend"
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
        width = language_model.module.config.hidden_size
        for i, (name, encoder) in enumerate(self.modality_modules(encoders_only=True).items()):
            family_of(encoder.module)
            encoder.build_projector(width, seed=seed + i)
            if encoder.projected_size != width:
                raise UserError(
                    f"encoders: the output of {name} is {encoder.projected_size} wide and the language model {width}; "
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
        """Modality modules by name, encoders first; the language model is called `language_model`."""
        modules: dict[str, ModalityModule] = dict(self.encoders.items())  # type: ignore[arg-type]
        return modules if encoders_only else {**modules, LANGUAGE_MODEL: self.language_model}

    @property
    def nodes(self) -> dict[str, ModuleNode]:
        encoders = self.modality_modules(encoders_only=True)
        return {
            **{name: EncoderNode(name=name, module=encoder) for name, encoder in encoders.items()},
            LANGUAGE_MODEL: self._language_model_node(),
        }

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every encoder enters the language model: at its embedding, or at its cross-attention layers."""
        layers = self._language_model_node().entry_layers
        return tuple(Edge(source=name, target=LANGUAGE_MODEL, layers=layers) for name in self.encoders)

    def _language_model_node(self) -> LanguageModelNode:
        return LanguageModelNode(
            name=LANGUAGE_MODEL,
            loss_weight=1.0,
            module=self.language_model,
            num_embeddings=self.num_embeddings,
            merge=self.merge,
            placeholder_token_ids=self.placeholder_token_ids,
            media_attention=self.media_attention,
            preprocess_callback=self.preprocess_callback,
        )

    def read_batch(self, batch: Mapping[str, Any]) -> DictBatch:
        return batch_from_dict(self, batch)

    def run(self, batch: Batch) -> ModelOutput:
        """`logits` [samples, longest sequence, vocabulary], padded on the right, and, if the batch has labels, `loss`:
        the mean over the tokens with a label. Each module is one stage, and the whole batch one microbatch.

        If `media_attention` is not causal, this replaces the language model's attention by motet's permanently.
        """
        outputs: dict[str, Tensor] = {}
        for name in self.encoders:
            output = self.run_node(name, batch, outputs).hidden
            if output is not None:
                outputs[name] = output
        node, members = self._language_model_node(), range(len(batch.samples))
        stage = node.make_stage((0, node.num_layers))
        features = [batch.features(LANGUAGE_MODEL, i) for i in members]
        incoming = self.incoming(LANGUAGE_MODEL, batch, members, outputs)
        inputs = StageInput(batch.samples, features, incoming=incoming)
        num_loss_tokens = sum(sample.num_loss_tokens.get(LANGUAGE_MODEL, 0) for sample in batch.samples)
        logits, loss_sum = stage.forward_whole(inputs, has_labels=num_loss_tokens > 0)
        if loss_sum is None:
            return ModelOutput(logits=logits)
        return ModelOutput(loss=loss_sum / num_loss_tokens, logits=logits)


def _check_merge(merge: str, language_model: ModalityModule, preprocess_callback: PreprocessCallback | None) -> None:
    name = type(language_model.module).__name__
    if merge not in get_args(Merge):
        raise UserError(f"merge: {merge!r} is not known; give one of {', '.join(get_args(Merge))}")
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
