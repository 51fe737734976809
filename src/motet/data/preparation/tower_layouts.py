"""From examples to the metadata of samples for contrastive towers: an image, sound or text of each. Pure: no torch.

Texts are tokenized as the family's own processor would: CLIP's ends with its end-of-text token, where its features are
taken; SigLIP's is padded to the longest that its tower takes, because its features are those of the last place; BERT's
stands as it is. Longer texts are cut. A caption decoder beside the towers is fed the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from motet.assignment.sample import Sample, Segment
from motet.data.conversation.example import Example
from motet.data.preparation.encoder_layout import EncoderLayout
from motet.errors import UserError
from motet.families.text_layout import CaptionLayout, TextLayout
from motet.plan import CONTRASTIVE, DECODER
from motet.schedule.batch_sync import num_comparisons


@dataclass(frozen=True, eq=False)
class TowerLayouts:
    """Of samples that have items for some of the towers."""

    towers: Mapping[str, EncoderLayout | TextLayout]
    pairs: Sequence[tuple[str, str]]
    """Of towers that are compared."""
    captions: CaptionLayout | None = None
    """How the caption decoder is fed, if there is one."""

    def sample(self, example: Example) -> Sample:
        """The metadata. No pixels or waveforms are decoded. Raises `UserError` naming the example's file and line."""
        try:
            layouts = {name: (self._segment(name, example),) for name in self.towers if self._has(name, example)}
            num_loss_tokens = {CONTRASTIVE: num_comparisons(self.pairs, layouts)}
            if self.captions is not None and self.captions.reads in layouts:
                (seen,) = layouts[self.captions.reads]
                layouts[self.captions.reads] = (replace(seen, num_outputs=1 + seen.num_tokens),)
                if example.messages:
                    num_tokens = len(self.captions.ids(text_of(example)))
                    layouts[DECODER] = (Segment(num_tokens),)
                    num_loss_tokens[DECODER] = num_tokens - 1
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None
        return Sample(id=example.id, layouts=layouts, num_loss_tokens=num_loss_tokens)

    def _has(self, name: str, example: Example) -> bool:
        fed = self.towers[name]
        return bool(example.messages) if isinstance(fed, TextLayout) else bool(example.media.get(fed.modality))

    def _segment(self, name: str, example: Example) -> Segment:
        fed = self.towers[name]
        if isinstance(fed, TextLayout):
            return fed.segment(text_of(example))
        segment = fed.segment(0, example.media[fed.modality][0])
        return Segment(segment.num_tokens, num_outputs=1, grid=segment.grid)


def text_of(example: Example) -> str:
    return example.messages[0].content
