"""Sounds as codes of an audio codec, and the shape of a decoder that predicts them one after the other.

A codec of transformers (Mimi, DAC) turns each frame of a sound into a code of each of its codebooks. Codes stand in one
sequence, frame after frame, and in a frame codebook after codebook. So each code is predicted from all before it by one
softmax, and the decoder is a causal model of transformers as it is; the price is a sequence as many times longer as
there are codebooks. The tokens of codebook k are 1 + k x codebook size and those after it; token 0 begins the sequence
and ends it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from motet.errors import UserError
from motet.shapes.diffusion_transformers import Connection, connector_layer
from motet.shapes.module_shape import LayerShape, ModuleWorkload

MIMI_DEFAULTS: Mapping[str, Any] = {
    "sampling_rate": 24_000,
    "upsampling_ratios": (8, 6, 5, 4),
    "codebook_size": 2048,
    "num_quantizers": 32,
}
DAC_DEFAULTS: Mapping[str, Any] = {
    "sampling_rate": 16_000,
    "downsampling_ratios": (2, 4, 8, 8),
    "codebook_size": 1024,
    "n_codebooks": 9,
}
"""transformers' defaults of the keys that are read here."""
CODEC_CLASSES: Mapping[str, str] = {"mimi": "MimiModel", "dac": "DacModel"}
"""Classes of transformers by `model_type`."""
EDGE = 0
"""The token before the first code and after the last."""


@dataclass(frozen=True)
class Codec:
    """What a codec makes of sounds, as far as it is used."""

    model_type: str
    sampling_rate: int
    hop: int
    """Samples of a frame."""
    num_codebooks: int
    codebook_size: int

    @property
    def vocabulary(self) -> int:
        return 1 + self.num_codebooks * self.codebook_size

    def num_frames(self, num_samples: int) -> int:
        """Of a sound at the codec's rate; silence fills the last frame."""
        return ceil(num_samples / self.hop)

    def num_tokens(self, num_frames: int) -> int:
        """Tokens that the decoder reads and predicts: it reads `EDGE` before the codes, and predicts it after them."""
        return 1 + self.num_codebooks * num_frames


def read_codec(stored: Mapping[str, Any], num_codebooks: int, where: str) -> Codec:
    """`stored`: what stands in the codec's config.json. Raises `UserError` naming the key that is wrong."""
    model_type = stored.get("model_type")
    if not isinstance(model_type, str) or model_type not in CODEC_CLASSES:
        raise UserError(f"{where}: is a {model_type!r}; give a codec of transformers, {' or '.join(CODEC_CLASSES)}")
    defaults = MIMI_DEFAULTS if model_type == "mimi" else DAC_DEFAULTS
    values = {**defaults, **stored}
    for key, default in defaults.items():
        several, value = isinstance(default, tuple), values[key]
        numbers = value if isinstance(value, list | tuple) else [value]
        if several != isinstance(value, list | tuple) or not all(type(n) is int and n >= 1 for n in numbers):
            form = "a list of whole numbers" if several else "a whole number"
            raise UserError(f"{where}: config.json: {key}: is {value!r}; give {form} from 1")
    if model_type == "mimi":
        hop, most = prod(values["upsampling_ratios"]), values["num_quantizers"]
        frame_rate = values.get("frame_rate") or values.get("_frame_rate")
        # A last convolution halves the rate, unless the configuration says that the rate is that before it.
        hop *= 1 if frame_rate == ceil(values["sampling_rate"] / hop) else 2
        if values.get("audio_channels", 1) != 1:
            raise UserError(f"{where}: has {values['audio_channels']} channels; give a codec of one")
    else:
        hop, most = prod(values["downsampling_ratios"]), values["n_codebooks"]
    if num_codebooks > most:
        raise UserError(f"{where}.num_codebooks: is {num_codebooks}, but the codec has {most}; give at most {most}")
    return Codec(str(model_type), values["sampling_rate"], hop, num_codebooks, values["codebook_size"])


def code_decoder(decoder: ModuleWorkload, codec: Codec, connection: Connection) -> ModuleWorkload:
    """`decoder`: a causal model with cross-attention. Layer 0 is the connector; all run in one stage."""
    width = decoder.hidden_size
    return replace(
        decoder,
        kind="generator",
        config={**decoder.config, "condition_size": width, "pooled_size": 0, "codec": codec},
        output_size=codec.vocabulary,
        layers=(connector_layer(connection, width, 0), *map(_on_tokens, decoder.layers)),
        arrangement="separate",
        must_divide=None,
        max_stages=1,
        shares_tokens=False,
    )


def _on_tokens(layer: LayerShape) -> LayerShape:
    """Every token of a generator's sequence is predicted; its `outputs` count whole sounds."""
    linears = tuple(replace(own, rows="tokens") if own.rows == "outputs" else own for own in layer.linears)
    return replace(layer, linears=linears)
