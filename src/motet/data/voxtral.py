"""Voxtral's processor behind the interface of the other processors: text with placeholders in, tensors out.

transformers leaves Voxtral's conversations to mistral-common, whose tokenizer gives ids without their places in a text.
Labels need those, so the conversation is written out as text here, and the fast tokenizer that transformers makes of
the same vocabulary reads it; a test compares the ids with those of mistral-common.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
BEGIN = "[BEGIN_AUDIO]"
AROUND = {
    "system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "user": ("[INST]", "[/INST]"),
    "assistant": ("", SPECIAL_TOKENS["eos_token"]),
}
"""What mistral-common writes around the turns of each role (version 7 of its instruct tokenizers and later)."""


def is_voxtral(processor: Any) -> bool:
    return type(processor).__name__ == "VoxtralProcessor"


@dataclass(frozen=True, eq=False)
class VoxtralText:
    """The processor of a Voxtral model for conversations given as text."""

    whole: Any
    """transformers' `VoxtralProcessor`."""
    tokenizer: Any
    """A fast tokenizer of the same vocabulary."""

    chat_template = "as mistral-common writes it"

    @classmethod
    def of(cls, processor: Any, source: str | Path) -> "VoxtralText":
        """Returns the wrapped processor of the folder or hub id `source`. Raises `ImportError` without
        mistral-common."""
        from transformers import AutoTokenizer

        if find_spec("mistral_common") is None:
            raise ImportError("mistral_common")
        return cls(processor, AutoTokenizer.from_pretrained(source, mistral_format=False, **SPECIAL_TOKENS))

    @property
    def _audio_processor(self) -> Any:
        return self.whole.feature_extractor

    def to_dict(self) -> dict[str, Any]:
        """Values that a data set's fingerprint holds."""
        return {**self.whole.to_dict(), "vocabulary": self.tokenizer.backend_tokenizer.to_str()}

    def save_pretrained(self, folder: str | Path) -> None:
        self.whole.save_pretrained(folder)

    def apply_chat_template(self, turns: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Writes turns whose content is text or a list of parts. An answer begins where the question ends, so a
        generation prompt adds nothing."""
        pieces = [SPECIAL_TOKENS["bos_token"]]
        for turn in turns:
            before, after = AROUND[turn["role"]]
            content = turn["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            written = [self.whole.audio_token if part["type"] == "audio" else part["text"] for part in parts]
            pieces += [before, *written, after]
        return "".join(pieces)

    def __call__(
        self, text: Sequence[str], audio: Sequence[Any] = (), sampling_rate: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Ids, offsets and features of one conversation. Each placeholder becomes as many as the sound has rows, in
        whole windows of the feature extractor (30 s)."""
        pieces = text[0].split(self.whole.audio_token)
        if len(pieces) != len(audio) + 1:
            raise ValueError(f"its text has {len(pieces) - 1} placeholders of {len(audio)} sounds")
        expanded, replaced, at = pieces[0], [], len(pieces[0])
        for wave, piece in zip(audio, pieces[1:], strict=True):
            written = BEGIN + self.whole.audio_token * self._num_rows(len(wave))
            end = at + len(self.whole.audio_token)
            new_span = (len(expanded), len(expanded) + len(written))
            replaced.append({"span": (at, end), "new_span": new_span, "text": text[0][at:end], "replacement": written})
            expanded += written + piece
            at = end + len(piece)
        encoded = self.tokenizer([expanded], add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
        found = {**encoded, "text_replacement_offsets": [replaced]}
        if audio:
            settings = dict(self.whole.audio_kwargs)
            length = settings.pop("max_source_positions")
            found["input_features"] = self.whole._retrieve_input_features(list(audio), length, **settings)
        return found

    def _num_rows(self, num_values: int) -> int:
        """The rows that the encoder returns of a sound of so many values."""
        config = self.whole.tokenizer.tokenizer.instruct_tokenizer.audio_encoder.audio_config
        window = config.chunk_frames
        return int(config.num_audio_tokens(-(-num_values // window) * window))
