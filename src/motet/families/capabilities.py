"""Capabilities: which features a model family is known to work with, because a probe showed equality with one process.

A probe (`motet.runtime.verification.family_probe`, `composite_probe`) runs a tiny model under each feature and compares
loss and every gradient with plain transformers. Its result is a JSON file, kept in the user's cache folder under a
digest of the tiny configuration and of the versions that were probed; results for common families come with the
package. Reading them needs no torch, and nothing in them is executed.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from motet.errors import UserError
from motet.shapes.module_shape import ModuleWorkload
from motet.strict_parsing import parse_strictly
from motet.user_cache import cache_folder, write_cached

KNOWN = Path(__file__).with_name("known_capabilities.json")
"""Results that come with the package, by digest; `benchmarks/families.py` writes it."""

FEATURES: Mapping[str, str] = {
    "padding": "samples of unequal lengths in one microbatch, padded",
    "pipeline": "three pipeline stages",
    "recompute": "blocks run again in the backward pass",
    "split_backward": "backward passes in two halves (zero-bubble schedules)",
    "packing": "samples of a microbatch in one row",
    "context_parallel": "context parallelism by all-gather",
    "ulysses": "context parallelism by trading tokens for heads",
    "tensor_parallel": "tensor parallelism",
    "sequence_parallel": "tensor parallelism with shared norms and residuals",
    "experts": "experts distributed over a tensor-parallel group",
    "expert_parallel": "experts distributed over replicas",
}
"""By name: what the probe runs."""


COMPOSITE_FEATURES: Mapping[str, str] = {
    "pipeline": "encoders apart from two stages of the language model",
    "tensor and pipeline": "tensor parallelism of the language model",
}
"""The same of models of several modalities."""

OF_EXPERTS = frozenset({"experts", "expert_parallel"})
"""Features of mixtures of experts."""

SHOWN_EQUAL: dict[str, frozenset[str]] = {
    **{family: frozenset(FEATURES) - OF_EXPERTS for family in ("llama", "qwen3", "mistral", "gemma3_text", "phi3")},
    "mllama_text_model": frozenset(FEATURES) - OF_EXPERTS - {"context_parallel", "ulysses"},
    **dict.fromkeys(("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe"), OF_EXPERTS),
    "gpt_oss": OF_EXPERTS | {"context_parallel", "ulysses"},
    "llama4_text": frozenset({"context_parallel", "ulysses"}),
}
"""By `model_type`: features with which the project's tests show families equal, whatever their flags."""


WITH_OTHER_MASKS = frozenset({"gpt_oss", "llama4_text"})
"""Of these, families with sinks or chunks, which variable-length attention does not know."""


def attends_by_sample(model_type: str, packed_attention: str) -> bool:
    """Whether packed samples of this family attend each to itself, under a value of `parallel.packed_attention`. Else
    attention is computed over the whole row and masked."""
    if packed_attention == "auto":
        return "context_parallel" in SHOWN_EQUAL.get(model_type, ()) and model_type not in WITH_OTHER_MASKS
    return packed_attention != "sdpa"


def attends_causally(config: Any) -> bool:
    """Whether the tokens of such a model are known to see none behind them, padding included: attention of motet's own,
    which is causal, has been shown equal to its own."""
    return "context_parallel" in SHOWN_EQUAL.get(config.model_type, ()) and is_causal(config)


def is_causal(config: Any) -> bool:
    """Whether the configuration leaves attention causal; transformers can switch that off for any family."""
    return getattr(config, "is_causal", True) is not False and not getattr(config, "use_bidirectional_attention", False)


def packed_by_sample(workload: ModuleWorkload, packed_attention: str) -> ModuleWorkload:
    """The shape of a language model whose samples are packed, with the pairs that its attention computes."""
    by_sample = attends_by_sample(workload.family, packed_attention)
    return replace(workload, arrangement="separate") if by_sample else workload


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The result of probing one family."""

    format: Literal[2] = 2
    """1: sequence parallelism was probed with one sample in each microbatch."""
    model_type: str
    model_class: str
    reasons: dict[str, str | None]
    """Reason why each feature is refused; None if its gradients were equal."""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    """The day of the probe, as in 2026-11-23."""

    def require(self, needed: Mapping[str, str], where: str) -> None:
        """Raises `UserError` if a feature is refused. `needed`: features, and what to set instead of each."""
        for feature, instead in needed.items():
            reason = self.reasons.get(feature, "it has not been probed")
            if reason is not None:
                described = {**COMPOSITE_FEATURES, **FEATURES}[feature]
                raise UserError(f"{where}: {described} is not supported for {self.model_type}: {reason}; {instead}")


def results_folder() -> Path:
    """The folder in which results of probes are kept."""
    return cache_folder("families")


def probed_versions() -> dict[str, str]:
    """The versions on which the result of a probe depends."""
    return {name: version(name) for name in ("transformers", "torch")}


def digest_of(tiny_config: Mapping[str, Any]) -> str:
    """Names the result for a tiny configuration under these versions, wherever the configuration was stored."""
    described = [Capabilities.format, _without_origin(tiny_config), probed_versions()]
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


ORIGIN = {"_name_or_path": "", "architectures": None, "dtype": None}
"""What a stored configuration says of its folder and weights, with its value in a new one. No probe depends on it."""


def _without_origin(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: ORIGIN.get(key, _without_origin(value) if isinstance(value, Mapping) else value)
        for key, value in values.items()
    }


def read_capabilities(digest: str) -> Capabilities | None:
    """The result of an earlier probe, from the cache or from the package; None: there is none."""
    for text in _texts(digest):
        try:
            return parse_strictly(Capabilities, text, what=f"capabilities {digest}")
        except UserError:
            continue
    return None


def _texts(digest: str) -> Iterator[str]:
    with suppress(OSError, UnicodeDecodeError):
        yield (results_folder() / f"{digest}.json").read_text()
    if (known := _known().get(digest)) is not None:
        yield json.dumps(known)


@cache
def _known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KNOWN.read_text())
    return found


def known_capabilities() -> list[Capabilities]:
    """All results for these versions, those in the cache first, without doubles."""
    folder = results_folder()
    digests = [*(sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else ()), *_known()]
    found = [read_capabilities(digest) for digest in dict.fromkeys(digests)]
    return sorted(
        (each for each in found if each is not None and each.versions == probed_versions()),
        key=lambda each: each.model_type,
    )


def write_capabilities(digest: str, capabilities: Capabilities) -> None:
    write_cached(results_folder() / f"{digest}.json", json.dumps(asdict(capabilities), indent=1))
