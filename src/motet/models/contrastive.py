"""A contrastive model out of unmodified HuggingFace modules: towers whose features of one sample are to be alike.

CLIP, SigLIP, LiT (one tower frozen), CoCa-like (a decoder captions what one tower sees), and any number of towers. It
runs by itself in one process; the run file's `model.towers`, or `motet.runtime.api.contrastive`, distribute it.
(DistMM, sections 2.2 and 5.)

A tower is a `ModalityModule`; its projector brings what transformers calls the encoder's `pooler_output` to the width
that all towers share. What is frozen is said as in `motet.models.multimodal`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from motet.assignment.sample import Sample
from motet.config.model_section import INITIAL_LOGIT_SCALE
from motet.errors import UserError
from motet.families.encoders import family_of
from motet.models.multimodal import ModalityModule
from motet.models.stages.caption_decoder import CaptionDecoderStage, is_caption_decoder, num_decoder_layers
from motet.models.stages.contrastive import ContrastiveStage, LossKind
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.projector import projected_size
from motet.models.stages.stage import Batch, StageInput
from motet.plan import CONTRASTIVE, DECODER
from motet.schedule.batch_sync import pairs_of, whole

LOSSES: tuple[LossKind, ...] = ("softmax", "sigmoid")
SIGLIP_BIAS = -10.0


class ContrastiveLoss(nn.Module):
    """What is trained of the loss: transformers' `logit_scale` (a logarithm, kept below `max_logit_scale`), for the
    sigmoid loss `logit_bias` too."""

    def __init__(
        self,
        kind: LossKind,
        logit_scale: float | None = None,
        logit_bias: float | None = None,
        *,
        max_logit_scale: float | None = None,
    ) -> None:
        super().__init__()
        if kind not in LOSSES:
            raise UserError(f"loss: {kind!r} is not known; give one of {', '.join(LOSSES)}")
        if kind == "softmax" and logit_bias is not None:
            raise UserError("logit_bias: the softmax loss does not depend on one; leave it out")
        self.kind, self.max_logit_scale = kind, max_logit_scale
        initial = INITIAL_LOGIT_SCALE[kind] if logit_scale is None else logit_scale
        self.logit_scale = nn.Parameter(torch.tensor(initial))
        self.logit_bias: nn.Parameter | None = None
        if kind == "sigmoid":
            self.logit_bias = nn.Parameter(torch.tensor(SIGLIP_BIAS if logit_bias is None else logit_bias))


@dataclass(frozen=True)
class CaptionDecoder:
    """What makes a model CoCa-like (Yu et al. 2022): a captioning loss beside the contrastive one."""

    module: Any
    """A GPT2LMHeadModel or BertLMHeadModel with cross-attention, as wide as the towers' features."""
    reads: str
    """The tower to whose features it attends."""
    loss_weight: float = 2.0
    """Of the captioning loss, the mean over the captions' tokens."""


class ContrastiveModule(nn.Module):
    """Towers and their loss.

    Args:
        towers: by name, each a `ModalityModule` or an encoder that needs no projector.
        loss: "softmax" (CLIP), "sigmoid" (SigLIP), or a `ContrastiveLoss` with values of your own.
        width: of the features; None: that of the towers whose projector or encoder says it.
        anchor: the tower that each other one is compared with; None: all pairs.
        seed: of projectors given by name.
        decoder: captions what one of the towers sees; None: there is none.
        loss_weight: of the contrastive loss.
    """

    def __init__(
        self,
        towers: Mapping[str, nn.Module],
        loss: LossKind | ContrastiveLoss = "softmax",
        *,
        width: int | None = None,
        anchor: str | None = None,
        seed: int = 0,
        decoder: CaptionDecoder | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__()
        _check_names(towers)
        self.pairs = pairs_of(list(towers), anchor)
        self.towers = nn.ModuleDict(
            {name: t if isinstance(t, ModalityModule) else ModalityModule(t) for name, t in towers.items()}
        )
        self.loss = loss if isinstance(loss, ContrastiveLoss) else ContrastiveLoss(loss)
        self.anchor = anchor
        self.is_taken_over = False
        for i, (name, tower) in enumerate(self.modality_modules().items()):
            check_tower(name, tower)
            tower.pooling = "alone"
            if tower.projector_kind is not None and tower.projector is None:
                if width is None:
                    raise UserError(f"width: is missing, but {name}'s projector is to be built; give it")
                tower.build_projector(width, seed=seed + i)
        self.width = _common_width(self.modality_modules(), width)
        self.loss_weight = loss_weight
        self.decoder: Any = None if decoder is None else decoder.module
        self.reads, self.caption_weight = ("", 0.0) if decoder is None else (decoder.reads, decoder.loss_weight)
        if decoder is not None:
            _check_decoder(decoder, self.modality_modules(), self.width)
            self.modality_modules()[decoder.reads].pooling = "first"
            # from_pretrained returns models in evaluation mode, which here would mean frozen.
            decoder.module.train()
        dtype = next(self.towers.parameters()).dtype
        self.loss.to(dtype)
        self.train()

    def modality_modules(self) -> dict[str, ModalityModule]:
        """The towers by name."""
        return dict(self.towers.items())  # type: ignore[arg-type]

    def parts(self) -> dict[str, nn.Module]:
        """By name: `image.module`, `image.projector`, ..., `contrastive.module`."""
        return {
            **{
                f"{name}.{part}": module
                for name, t in self.modality_modules().items()
                for part, module in t.parts().items()
            },
            f"{CONTRASTIVE}.module": self.loss,
            **({} if self.decoder is None else {f"{DECODER}.module": self.decoder}),
        }

    def freeze_eval_parts(self) -> None:
        """Parts in evaluation mode stop requiring gradients."""
        for part in self.parts().values():
            if not part.training:
                part.requires_grad_(False)

    def train(self, mode: bool = True) -> "ContrastiveModule":
        """As usual, but frozen parts stay in evaluation mode."""
        if self.training:
            self.freeze_eval_parts()
        super().train(mode)
        for part in self.parts().values():
            if not any(parameter.requires_grad for parameter in part.parameters()):
                part.eval()
        return self

    def loss_stage(self) -> ContrastiveStage:
        return ContrastiveStage(
            self.loss.kind,
            self.pairs,
            self.width,
            self.loss.logit_scale,
            self.loss.logit_bias,
            max_logit_scale=self.loss.max_logit_scale,
        )

    def embeddings(self, batch: Batch) -> dict[str, Tensor]:
        """Of each tower: [samples that have an item for it, width], not normalized."""
        return self._pooled(self._outputs(batch), batch)

    def _pooled(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if self.decoder is None:
            return dict(outputs)
        return {**outputs, self.reads: first_of_each(outputs[self.reads], batch.samples, self.reads)}

    def _outputs(self, batch: Batch) -> dict[str, Tensor]:
        """What each tower hands on: of the one that the decoder reads, each sample's features too."""
        outputs = {}
        for name, tower in self.modality_modules().items():
            able = [i for i, sample in enumerate(batch.samples) if sample.has(name)]
            outputs[name] = self.loss.logit_scale.new_zeros(0, self.width)
            if able:
                inputs = StageInput([batch.samples[i] for i in able], [batch.features(name, i) for i in able])
                outputs[name] = tower_stage(name, tower)(inputs).hidden
        return outputs

    def caption_loss(self, seen: Tensor, batch: Batch) -> Tensor:
        """The mean over the captions' tokens. `seen`: what the tower that is read hands on."""
        assert self.decoder is not None
        able = [i for i, sample in enumerate(batch.samples) if sample.has(DECODER)]
        num_tokens = sum(batch.samples[i].num_loss_tokens[DECODER] for i in able)
        if not num_tokens:
            return seen.new_zeros(())
        rows = seen.split([sample.num_outputs(self.reads) for sample in batch.samples])
        stage = CaptionDecoderStage(DECODER, self.decoder, (0, num_decoder_layers(self.decoder)))
        total: Tensor = stage(
            StageInput(
                [batch.samples[i] for i in able],
                [batch.features(DECODER, i) for i in able],
                incoming={self.reads: torch.cat([rows[i] for i in able])},
            )
        ).loss
        return total / num_tokens

    def forward(self, **batch: Any) -> ModelOutput:
        """In one process. Takes what HF processors return (see `motet.models.tower_batch`); returns as `run`."""
        from motet.models.tower_batch import batch_of_towers

        if self.is_taken_over:
            raise UserError("this ContrastiveModule was handed to a ContrastiveParallelModule; call that one's execute")
        if self.training:
            self.freeze_eval_parts()
        self.loss_stage().after_update()  # The user's optimizer does not say when it steps.
        return self.run(batch_of_towers(self, batch))

    def run(self, batch: Batch) -> ModelOutput:
        """`loss`, with all samples as one contrastive batch, and each tower's `<name>_embeds`, normalized; with a
        decoder `contrastive_loss` and `caption_loss`, of which `loss` is the weighted sum."""
        outputs = self._outputs(batch)
        embeddings = self._pooled(outputs, batch)
        with_gradient = frozenset(name for name, tensor in embeddings.items() if tensor.requires_grad)
        places = {name: [i for i, s in enumerate(batch.samples) if s.has(name)] for name in embeddings}
        num_comparisons = sum(sample.num_loss_tokens[CONTRASTIVE] for sample in batch.samples)
        summed = self.loss_stage().loss(embeddings, whole(places, with_gradient))
        contrastive_loss = summed / max(1, num_comparisons)
        normalized = {f"{name}_embeds": nn.functional.normalize(t, dim=-1) for name, t in embeddings.items()}
        loss = self.loss_weight * contrastive_loss
        if self.decoder is None:
            return ModelOutput(loss=loss, **normalized)
        caption_loss = self.caption_loss(outputs[self.reads], batch)
        return ModelOutput(
            loss=loss + self.caption_weight * caption_loss,
            contrastive_loss=contrastive_loss,
            caption_loss=caption_loss,
            **normalized,
        )


def first_of_each(rows: Tensor, samples: Sequence[Sample], tower: str) -> Tensor:
    """Of what a tower hands on: the first vector of each sample that has an item."""
    counts = [sample.num_outputs(tower) for sample in samples if sample.has(tower)]
    firsts = torch.tensor([0, *counts[:-1]], device=rows.device).cumsum(0)[: len(counts)]
    return rows.index_select(0, firsts)


def _check_decoder(decoder: CaptionDecoder, towers: Mapping[str, ModalityModule], width: int) -> None:
    if decoder.reads not in towers:
        raise UserError(f"decoder: there is no tower {decoder.reads!r} to read; give one of {', '.join(towers)}")
    if DECODER in towers:
        raise UserError(f"towers: {DECODER} is the caption decoder's name; give the tower another one")
    if not is_caption_decoder(decoder.module):
        raise UserError(
            f"decoder: {type(decoder.module).__name__} attends to no encoder; give a GPT2LMHeadModel whose "
            "configuration has add_cross_attention=True, or a BertLMHeadModel with is_decoder=True too"
        )
    read = towers[decoder.reads]
    inner = getattr(read.module.config, family_of(read.module).hidden_size)
    if inner != read.output_size:
        raise UserError(
            f"decoder: {decoder.reads} makes features of {inner}, but one of {read.output_size} of a whole item, and "
            "the decoder reads both; give it a projection_size equal to its hidden_size"
        )
    hidden_size = decoder.module.config.hidden_size
    if hidden_size != width:
        raise UserError(
            f"decoder: is {hidden_size} wide, but {decoder.reads} hands on features of {width}; give all towers "
            f"projectors to {hidden_size}"
        )


def check_tower(name: str, tower: ModalityModule) -> None:
    """Raises `UserError` if the module cannot be a tower."""
    if tower.is_language_model:
        raise UserError(f"towers: {name} is a causal language model; give an encoder")
    if family_of(tower.module).pool is None:
        raise UserError(f"towers: {name} is a {type(tower.module).__name__}, which has no features of a whole item")
    if tower.feature_layer is not None:
        raise UserError(f"towers: {name} has a feature_layer; a tower hands on what its encoder makes of a whole item")


def _check_names(towers: Mapping[str, nn.Module]) -> None:
    for name in towers:
        if name in (CONTRASTIVE, DECODER):
            raise UserError(f"towers: {name!r} is the name of another module; give the tower another one")
        if "." in name or not name or hasattr(nn.ModuleDict, name):
            raise UserError(f"towers: {name!r} cannot name a module of PyTorch; give the tower another name")


def _common_width(towers: Mapping[str, ModalityModule], width: int | None) -> int:
    sizes = {name: t.output_size if t.projector is None else projected_size(t.projector) for name, t in towers.items()}
    first = next(iter(sizes))
    width = sizes[first] if width is None else width
    for name, size in sizes.items():
        if size != width:
            raise UserError(f"towers: what {name} hands on is {size} wide, not {width}; give it a projector to {width}")
    return width


def tower_stage(name: str, tower: ModalityModule) -> EncoderStage:
    """All of it."""
    return EncoderStage(name, tower, (0, num_encoder_layers(tower.module, tower.projector)))
