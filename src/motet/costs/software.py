"""Software profiles: the overheads of a training stack beside its matrix products.

Two stacks on the same device differ in the attention kernel that they call, in how often norms, residuals and
activation functions go through memory, and in how far they hide collectives behind computation. `motet` is the profile
of this package's runtime and the default. The others describe stacks whose published throughputs the costs are held
against (docs/accuracy.md): a row's profile follows from whether it is fully sharded and whether it runs plain PyTorch
modules.

`software.yaml` holds the values and where each is from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from motet.costs.kernels import AttentionCharge

CAUSAL_SHARE = 0.5
"""Share of the pairs that a causal mask leaves."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A software profile."""

    name: str
    attention: str
    """Its attention kernel: a key of `Device.attention_efficiency`."""
    leaves_out_hidden_pairs: bool
    """The kernel computes only pairs that a causal mask allows."""
    attention_backward: float
    """FLOPs of attention's backward over those of its forward."""
    score_bytes: float = 0.0
    """Bytes of each score that a forward reads and writes; 0 for fused kernels."""
    memory_traffic: float
    """Bytes that norms, residuals and functions move over the least, where each operand is read or written once."""
    exposed_collectives: float
    """Share of the time of tensor parallelism's collectives that computation does not hide."""
    contention: float
    """Slowdown of computation while gathers and scatters of fully sharded parameters run beside it: seconds for each
    second in which both run."""
    source: str
    """Where the values are from, and the rows that they were fitted to."""

    def charge(self, *, is_causal: bool) -> AttentionCharge:
        """What attention is charged for in a module."""
        return AttentionCharge(
            share_of_pairs=CAUSAL_SHARE if is_causal and self.leaves_out_hidden_pairs else 1.0,
            backward=self.attention_backward,
            score_bytes=self.score_bytes,
        )


def with_unfused_attention(profile: Software) -> Software:
    """The profile with attention of plain matrix products and a softmax, which write every score."""
    unfused = SOFTWARE["unfused_attention"]
    return replace(
        profile,
        attention=unfused.attention,
        leaves_out_hidden_pairs=unfused.leaves_out_hidden_pairs,
        attention_backward=unfused.attention_backward,
        score_bytes=unfused.score_bytes,
    )


SOFTWARE: Mapping[str, Software] = {
    name: Software(name=name, **values)
    for name, values in yaml.safe_load(Path(__file__).with_name("software.yaml").read_text()).items()
}
MOTET = SOFTWARE["motet"]
"""The profile of this package's runtime."""
