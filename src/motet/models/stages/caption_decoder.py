"""A caption decoder as a pipeline stage: an unmodified GPT-2 or BERT that attends to an image tower's features.

CoCa-like models (Yu et al. 2022) train a contrastive loss and this decoder's captioning loss at once. The HuggingFace
model's own forward runs, with only the stage's blocks in it; every block attends, after its own tokens, to all features
of its sample's image. Layers: embed, the blocks, head (docs/architecture.md). Between stages travels
[rows, columns, hidden_size], a row for each sample, padded on the right.

The tower outputs its pooled vector and then its features (`ModalityModule.pooling` "first"); the decoder reads the
features alone. They are as wide as the decoder: transformers' cross-attention has no projection of another width.

Limits: samples stand in rows of their own (no packing, no context parallelism); a caption's sample has an image.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from motet.assignment.sample import Sample
from motet.devices import to_device
from motet.models.stages.causal import CausalStage, all_tokens, labelled, labels_of, layout_of, token_ids
from motet.models.stages.stage import StageInput, StageOutput


class CaptionDecoderStage(CausalStage):
    """Layers [first, last) of a caption decoder. Takes over `model`: its other layers are dropped.

    Args:
        name: the module whose layouts are read.
        model: one for which `is_caption_decoder` holds.
        layers: half-open.
    """

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*layout_of(samples, self.name, packed=False).shape, self.hidden_size)

    output_shape = input_shape

    def forward(self, inputs: StageInput) -> StageOutput:
        """[rows, columns, hidden_size]; of the last stage, the sum of the losses of all tokens with a label.

        `inputs.incoming`: the image tower's outputs, where the stage has a block."""
        hidden, features = inputs.hidden, inputs.features
        sequences = layout_of(inputs.samples, self.name, packed=False)
        if hidden is None:
            ids = to_device(token_ids(features, sequences), self.device)
        else:
            ids = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        mask = sequences.attention_mask()
        rows, labels = (None, None)
        if self.is_last:
            rows, labels = labelled(labels_of(features), sequences.places_of_tokens(), self.device)
        states, logits = self.run_layers(
            ids,
            hidden,
            rows=rows,
            lengths=sequences.length_of_token() if self.reads_lengths else None,
            options={
                "attention_mask": None if mask is None else to_device(mask, self.device),
                "position_ids": to_device(sequences.position_ids(), self.device),
                **self._encoder_states(inputs.incoming, inputs.samples),
            },
        )
        if logits is None or labels is None:
            return StageOutput(states)
        return StageOutput(all_tokens(states, sequences) if inputs.hands_on else None, self.loss_sum(logits, labels))

    def _encoder_states(self, incoming: Mapping[str, Tensor], samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The features of each sample's image or text, a row for each sample, without the pooled vector."""
        if not incoming:
            return {}
        ((source, tokens),) = incoming.items()
        dtype = next(self.parameters()).dtype
        counts = [sample.num_outputs(source) for sample in samples]
        rows = [own[1:].to(dtype) for own in tokens.split(counts)]
        states = {"encoder_hidden_states": pad_sequence(rows, batch_first=True)}
        seen = [_seen(sample, source, count - 1) for sample, count in zip(samples, counts, strict=True)]
        num_columns = max(counts) - 1
        if any(own != (0, num_columns) for own in seen):
            first, end = torch.tensor(seen).T[:, :, None]
            column = torch.arange(num_columns)
            states["encoder_attention_mask"] = to_device(((first <= column) & (column < end)).long(), self.device)
        return states


def _seen(sample: Sample, source: str, num_features: int) -> tuple[int, int]:
    """Returns the half-open range of features that each caption attends to, without those of a text's padding."""
    (segment,) = sample.layouts[source]
    if len(segment.grid) == 4:  # A text of which not all is attended to (`motet.families.encoders.token_counts`).
        return segment.grid[2], segment.grid[3]
    return 0, num_features
