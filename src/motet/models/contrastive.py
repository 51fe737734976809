"""A contrastive model out of unmodified HuggingFace modules: towers whose features of the same sample should agree.

CLIP, SigLIP, LiT (one tower frozen), CoCa-like models (a decoder captions the items of one tower), and any number of
towers. A `ContrastiveModule` runs by itself in one process; the run file's `model.towers`, or
`ContrastiveParallelModule`, distribute it. (DistMM, sections 2.2 and 5.)

A tower is a `ModalityModule`. Its projector brings what transformers calls the encoder's `pooler_output` to the width
that all towers share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from motet.assignment.sample import Sample
from motet.errors import UserError
from motet.families.caption_decoders import is_caption_decoder
from motet.families.encoders.encoder_families import family_of
from motet.models.batch import DictBatch, batch_of_towers
from motet.models.graph import DecoderNode, LossNode, ModalityModule, ModuleGraph, ModuleNode, TowerNode
from motet.models.stages.contrastive import ContrastiveLoss, LossKind
from motet.models.stages.stage import Batch
from motet.plan import CONTRASTIVE, DECODER, Edge
from motet.schedule.batch_sync import pairs_of, whole


@dataclass(frozen=True)
class CaptionDecoder:
    """A caption decoder, which adds a captioning loss to the contrastive one, as in CoCa (Yu et al. 2022)."""

    module: Any
    """A GPT2LMHeadModel or BertLMHeadModel with cross-attention, as wide as the towers' features."""
    reads: str
    """The tower to whose features it attends."""
    loss_weight: float = 2.0
    """Weight of the captioning loss, the mean over the captions' tokens."""


class ContrastiveModule(ModuleGraph):
    """Towers and their loss.

    Args:
        towers: by name, each a `ModalityModule` or an encoder that needs no projector.
        loss: "softmax" (CLIP), "sigmoid" (SigLIP), or a `ContrastiveLoss` with your own initial values.
        width: width of the features; None: that of the towers whose projector or encoder determines it.
        anchor: the tower that all others are compared with; None: all pairs are compared.
        seed: seed of projectors given by name.
        decoder: a decoder that captions the items of one of the towers; None: none.
        loss_weight: weight of the contrastive loss.
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
        for i, (name, tower) in enumerate(self.modality_modules().items()):
            _check_tower(name, tower)
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
        self.loss.to(next(self.towers.parameters()).dtype)
        self.train()

    def modality_modules(self) -> dict[str, ModalityModule]:
        """The towers by name."""
        return dict(self.towers.items())  # type: ignore[arg-type]

    @property
    def nodes(self) -> dict[str, ModuleNode]:
        nodes: dict[str, ModuleNode] = {
            name: TowerNode(name=name, module=tower) for name, tower in self.modality_modules().items()
        }
        nodes[CONTRASTIVE] = self._loss_node()
        if self.decoder is not None:
            nodes[DECODER] = DecoderNode(
                name=DECODER, decoder=self.decoder, reads=self.reads, loss_weight=self.caption_weight
            )
        return nodes

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every tower enters the loss, and one of them all blocks of the decoder."""
        edges = tuple(Edge(source=name, target=CONTRASTIVE) for name in self.towers)
        if self.decoder is None:
            return edges
        blocks = tuple(range(1, self.nodes[DECODER].num_layers - 1))
        return (*edges, Edge(source=self.reads, target=DECODER, layers=blocks))

    def _loss_node(self) -> LossNode:
        return LossNode(
            name=CONTRASTIVE, loss=self.loss, pairs=self.pairs, width=self.width, loss_weight=self.loss_weight
        )

    def read_batch(self, batch: Mapping[str, Any]) -> DictBatch:
        return batch_of_towers(self, batch)

    def embeddings(self, batch: Batch) -> dict[str, Tensor]:
        """Returns each tower's features [samples that have an item for it, width], not normalized."""
        return self._pooled(self._outputs(batch), batch)

    def _outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Returns each tower's output; for the tower that the decoder reads, each sample's features too."""
        outputs = {name: self.run_node(name, batch, {}).hidden for name in self.towers}
        nothing = self.loss.logit_scale.new_zeros(0, self.width)
        return {name: nothing if output is None else output for name, output in outputs.items()}

    def _pooled(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if self.decoder is None:
            return dict(outputs)
        return {**outputs, self.reads: first_of_each(outputs[self.reads], batch.samples, self.reads)}

    def run(self, batch: Batch) -> ModelOutput:
        """`loss`, with all samples as one contrastive batch, and each tower's `<name>_embeds`, normalized; with a
        decoder `contrastive_loss` and `caption_loss`, of which `loss` is the weighted sum."""
        stage = self._loss_node().make_stage()
        stage.after_update()  # The user's optimizer does not say when it steps.
        outputs = self._outputs(batch)
        embeddings = self._pooled(outputs, batch)
        with_gradient = frozenset(name for name, tensor in embeddings.items() if tensor.requires_grad)
        places = {name: [i for i, s in enumerate(batch.samples) if s.has(name)] for name in embeddings}
        summed = stage.loss(embeddings, whole(places, with_gradient))
        contrastive_loss = summed / max(1, _num_loss_tokens(batch, CONTRASTIVE))
        normalized = {f"{name}_embeds": nn.functional.normalize(t, dim=-1) for name, t in embeddings.items()}
        loss = self.loss_weight * contrastive_loss
        if self.decoder is None:
            return ModelOutput(loss=loss, **normalized)
        caption_loss = loss.new_zeros(())
        if _num_loss_tokens(batch, DECODER):
            captions = self.run_node(DECODER, batch, outputs).loss
            assert captions is not None
            caption_loss = captions / _num_loss_tokens(batch, DECODER)
        return ModelOutput(
            loss=loss + self.caption_weight * caption_loss,
            contrastive_loss=contrastive_loss,
            caption_loss=caption_loss,
            **normalized,
        )


def _num_loss_tokens(batch: Batch, name: str) -> int:
    return sum(sample.num_loss_tokens.get(name, 0) for sample in batch.samples)


def first_of_each(rows: Tensor, samples: Sequence[Sample], tower: str) -> Tensor:
    """Returns the first vector of a tower's output for each sample that has an item."""
    counts = [sample.num_outputs(tower) for sample in samples if sample.has(tower)]
    firsts = torch.tensor([0, *counts[:-1]], device=rows.device).cumsum(0)[: len(counts)]
    return rows.index_select(0, firsts)


def _check_decoder(decoder: CaptionDecoder, towers: Mapping[str, ModalityModule], width: int) -> None:
    if decoder.reads not in towers:
        raise UserError(f"decoder: there is no tower {decoder.reads!r} to read; give one of {', '.join(towers)}")
    if not is_caption_decoder(decoder.module):
        raise UserError(
            f"decoder: {type(decoder.module).__name__} does not attend to an encoder; give a GPT2LMHeadModel whose "
            "configuration has add_cross_attention=True, or a BertLMHeadModel with is_decoder=True too"
        )
    read = towers[decoder.reads]
    inner = read.module.config.hidden_size
    if inner != read.output_size:
        raise UserError(
            f"decoder: {decoder.reads} outputs {inner} features for each token, but a pooled output of "
            f"{read.output_size}, and the decoder reads both; give it a projection_size equal to its hidden_size"
        )
    hidden_size = decoder.module.config.hidden_size
    if hidden_size != width:
        raise UserError(
            f"decoder: is {hidden_size} wide, but {decoder.reads} outputs features of {width}; give all towers "
            f"projectors to {hidden_size}"
        )


def _check_tower(name: str, tower: ModalityModule) -> None:
    if tower.is_language_model:
        raise UserError(f"towers: {name} is a causal language model; give an encoder")
    if family_of(tower.module).pool is None:
        raise UserError(f"towers: {name} is a {type(tower.module).__name__}, which has no pooled output")
    if tower.feature_layer is not None:
        raise UserError(
            f"towers: {name} has a feature_layer, but a tower outputs its encoder's pooled output; leave it out"
        )


def _check_names(towers: Mapping[str, nn.Module]) -> None:
    for name in towers:
        if name in (CONTRASTIVE, DECODER):
            raise UserError(f"towers: {name!r} is the name of another module; give the tower another one")
        if "." in name or not name or hasattr(nn.ModuleDict, name):
            raise UserError(f"towers: {name!r} is not a valid name of a torch module; give the tower another name")


def _common_width(towers: Mapping[str, ModalityModule], width: int | None) -> int:
    sizes = {name: tower.projected_size for name, tower in towers.items()}
    width = next(iter(sizes.values())) if width is None else width
    for name, size in sizes.items():
        if size != width:
            raise UserError(f"towers: the output of {name} is {size} wide, not {width}; give it a projector to {width}")
    return width
