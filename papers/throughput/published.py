"""Published training throughputs: 203 rows of 15 sources, with the model, the layout and the measured step of each.

`measurements.json` holds one object per line. A row counts if its text is in bfloat16, its model's sizes are known and
its step's time was printed or follows from what was. `inferred` lists what is a guess about the row, `page` says where
it was read. Conventions of published MFU differ, so only times are compared.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from motet.strict_parsing import parse_strictly

Sizes = Mapping[str, Any]
"""layers, hidden, ff, heads, kv_heads, vocab, gated."""
Software = Literal["megatron", "fsdp_eager", "fsdp_compiled"]

VARIANTS = r"-(proxy\d+L|selL|selop|full|no|\d\d\.\d\d)$"
"""Suffixes that some sources add to a model's name: fewer layers, a kind of recomputation, a release."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One published row."""

    id: str
    source: str
    page: str
    """Page on which the row was read."""
    name: str
    """The model's."""
    kind: Literal["text", "multimodal", "moe"]
    device: str
    gpus: int
    gpus_per_node: int
    net: str = ""
    precision: str
    seq: int
    """Tokens of a sample in the language model."""
    mbs: int | None = None
    """Samples of a microbatch on one replica."""
    gbs: int | None = None
    microbatches: int | None = None
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    dp: int
    sp: bool
    zero1: bool | str
    fsdp: bool | str
    """True, or "zero2" or "hsdp"."""
    recompute: Literal["none", "full", "selective-attn", "selective-layer", "selective-op"]
    eager: bool
    """Plain PyTorch modules; False: fused or compiled ones."""
    inferred: tuple[str, ...]
    """Values of the row that are guesses."""
    unfused_attention: bool = False
    model: Sizes | None = None
    encoder: Sizes | None = None
    enc_tokens: int = 0
    enc_frozen: bool = False
    llm_frozen: bool = False
    towers: tuple[tuple[Sizes, int], ...] = ()
    """Sizes of each tower, and its tokens."""
    unet: bool = False
    method: str | None = None
    """System, for rows of Optimus' tables."""
    grad_bytes: int | None = None
    """Bytes of each element of the gradients that are summed."""
    measured_step_s: float | None = None
    step_s: float | None = None
    tok_s_gpu: float | None = None
    samples_s: float | None = None
    samples_s_gpu: float | None = None
    mfu: float | None = None
    mfu_range: tuple[float, ...] = ()
    use: bool = True
    """False: the row contradicts itself, or is too vague."""

    @property
    def seconds(self) -> float | None:
        """Seconds of a measured step."""
        known = self.measured_step_s or self.step_s
        if known is not None:
            return known
        return self.gbs / self.samples_s if self.gbs and self.samples_s else None

    @property
    def has_shape(self) -> bool:
        return self.model is not None or bool(self.towers) or self.unet

    @property
    def counts(self) -> bool:
        """Whether its error is judged: text by bfloat16 alone, multimodal rows but for what the sources leave open.

        The layouts of Optimus' Megatron-LM rows contradict its text."""
        if not self.use or self.seconds is None or not self.has_shape:
            return False
        return self.method != "megatron" and (self.kind != "text" or self.precision == "bf16")

    @property
    def group(self) -> tuple[str, str, str]:
        """Source, model and device: rows of one group are held out together."""
        return self.source, re.sub(VARIANTS, "", self.name), self.device

    @property
    def software(self) -> Software:
        """The software profile: a function of `eager` and `fsdp` alone, fixed before anything was fitted."""
        if self.eager:
            return "fsdp_eager"
        return "fsdp_compiled" if self.is_fully_sharded else "megatron"

    @property
    def is_fully_sharded(self) -> bool:
        """Parameters are gathered over replicas."""
        return self.fsdp in (True, "hsdp")

    @property
    def num_microbatches(self) -> int:
        """Per replica."""
        assert self.gbs, f"{self.id} names no batch"
        assert self.mbs, f"{self.id} names no microbatch"
        return self.microbatches or max(1, self.gbs // (self.mbs * self.dp))


@dataclass(frozen=True)
class _File:
    rows: tuple[Measurement, ...] = field(default=())


@cache
def measurements() -> tuple[Measurement, ...]:
    """All rows."""
    rows = json.loads(Path(__file__).with_name("measurements.json").read_text())
    return parse_strictly(_File, json.dumps({"rows": rows}), what="measurements.json").rows
