"""Profiles of which a test wants no more than that they were made."""

from functools import partial

import pytest

from motet.costs.profiling import links as profiler_links
from motet.costs.profiling.profiler import ProfileOptions
from motet.runtime import profile_worker


def profile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in those that are forked from it."""
    options = partial(ProfileOptions, num_microbatches=2, repetitions=1)
    monkeypatch.setattr(profile_worker, "ProfileOptions", options)
    monkeypatch.setattr(profiler_links, "LINK_ELEMENTS", (1, 2**10, 2**14))
