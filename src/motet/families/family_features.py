"""Refuses a feature with a family that has not been shown equal under it, where a stage is built.

A training has been checked before its processes start (`motet.runtime.verification.family_probe`). This check serves
the Python API, which builds stages in processes that the user started, and knows the results of earlier probes only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from motet.errors import UserError
from motet.families.capabilities import FEATURES, SHOWN_EQUAL, digest_of, is_causal, read_capabilities
from motet.families.tiny import tiny_config

_probes: list[None] = []
"""Not empty while a probe runs, which finds out what is asked here."""


@contextmanager
def probing() -> Iterator[None]:
    """Context in which nothing is refused because a probe is missing."""
    _probes.append(None)
    try:
        yield
    finally:
        _probes.pop()


def check_feature(config: Any, feature: str, instead: str) -> None:
    """Raises `UserError` for a feature that has not been shown equal with the family of a configuration.

    `instead`: what to set."""
    if _probes or (is_causal(config) and feature in SHOWN_EQUAL.get(config.model_type, ())):
        return
    known = read_capabilities(digest_of(tiny_config(config).to_dict()))
    if known is None:
        raise UserError(
            f"parallel: {FEATURES[feature]} has not been verified for {config.model_type}; run motet family "
            f"check with its folder or hub id once, or {instead}"
        )
    known.require({feature: instead}, "parallel")
