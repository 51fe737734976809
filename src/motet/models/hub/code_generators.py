"""Exports a decoder of an audio codec's codes as folders that plain transformers and torch load.

    voice/                config.json, model.safetensors: for the `from_pretrained` of the decoder's class
    voice_codec/          the codec, as it was given
    voice_projector/      as that of other generators (`motet.models.hub.generators`)
    voice_queries/        the query tokens, if it has them

`code_sampling_code` is the part of the README that makes a sound with them; a test runs it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from motet.config import CodecConfig, GeneratorConfig
from motet.families.classes import model_class_of, transformers_class
from motet.families.hf_config import codec_of, stored_folder
from motet.models.hub.weights import save_part, tensors_under
from motet.models.materialize import read_part_config
from motet.plan import queries_of
from motet.shapes.codes import CODEC_CLASSES, Codec


@dataclass(frozen=True, kw_only=True)
class CodesDescription:
    """A decoder of codes without weights."""

    config: Any
    """Its configuration, of transformers."""
    projector: str
    sizes: tuple[int, int, int]
    """Widths of the hidden states that it reads and of its conditions, and 0."""
    num_queries: int | None
    placeholder_token_id: int
    codec: Codec
    stored: CodecConfig

    @property
    def model_class(self) -> Any:
        return model_class_of(self.config.model_type, "decoder")

    @property
    def codec_class(self) -> str:
        return CODEC_CLASSES[self.codec.model_type]


def describe_codes(
    name: str, part: GeneratorConfig, width: int, placeholder_ids: Mapping[str, int]
) -> CodesDescription:
    """`width`: of the language model's hidden states."""
    where = f"model.generators.{name}"
    assert part.codec is not None
    config = read_part_config(part, "decoder", where=where)
    return CodesDescription(
        config=config,
        projector=part.projector,
        sizes=(width, config.hidden_size, 0),
        num_queries=part.queries,
        placeholder_token_id=placeholder_ids[queries_of(name) if part.queries else name],
        codec=codec_of(part, where),
        stored=part.codec,
    )


def save_code_decoder(folder: Path, name: str, described: CodesDescription, tensors: Mapping[str, Tensor]) -> None:
    """Writes decoder and codec. Raises `UserError` if the tensors are not those of the decoder."""
    where = f"{name}.module"
    save_part(folder / name, described.model_class, described.config, tensors_under(tensors, where), where=where)
    stored = transformers_class(described.codec_class).from_pretrained(
        stored_folder(described.stored), trust_remote_code=False, use_safetensors=True
    )
    stored.save_pretrained(folder / f"{name}_codec")


def code_manifest_entry(described: CodesDescription) -> dict[str, Any]:
    return {
        "model_class": described.model_class.__name__,
        "imported_from": "transformers",
        "projector": described.projector,
        "num_queries": described.num_queries,
        "placeholder_token_id": described.placeholder_token_id,
        "codec": {"class": described.codec_class, "num_codebooks": described.codec.num_codebooks},
    }


def code_sampling_code(folder: str, described: CodesDescription, conditions: str, guidance: float) -> str:
    """A program that makes one sound with plain transformers and torch: the function `say_<name>`.

    `conditions`: lines that make `conditions` [2, rows, width] of a `prompt`: its own, and the null condition."""
    name, codec = re.sub(r"\W", "_", folder), described.codec
    model, size, number = described.model_class.__name__, codec.codebook_size, codec.num_codebooks
    return f"""from transformers import {model}, {described.codec_class}

{name} = {model}.from_pretrained("{folder}", dtype=language_model.dtype)
{name}_codec = {described.codec_class}.from_pretrained("{folder}_codec")

@torch.no_grad()
def say_{name}(prompt, guidance={guidance}, frames=50, temperature=1.0):
{conditions}
    tokens = torch.zeros(2, 1, dtype=torch.long)
    for place in range({number} * frames):
        wanted, other = {name}(tokens, encoder_hidden_states=conditions).logits[:, -1]
        logits = other + guidance * (wanted - other)
        first = 1 + place % {number} * {size}  # Of this codebook's tokens; before a frame the sound may end.
        allowed = [0] * (place > 0 and place % {number} == 0) + list(range(first, first + {size}))
        chances = torch.softmax(logits[allowed] / temperature, 0)
        chosen = allowed[torch.multinomial(chances, 1)]
        if chosen == 0:
            break
        tokens = torch.cat([tokens, torch.full((2, 1), chosen)], 1)
    codes = (tokens[0, 1:].view(-1, {number}) - 1) % {size}
    return {name}_codec.decode(audio_codes=codes.T[None]).audio_values  # {codec.sampling_rate} Hz
"""
