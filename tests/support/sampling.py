"""Which draws `make test` takes, and which only `make campaigns` does."""

from collections.abc import Callable, Iterable, Set
from typing import Any, TypeVar

import pytest
from hypothesis import settings

F = TypeVar("F", bound=Callable[..., Any])


def examples(number: int) -> Callable[[F], F]:
    """Sets hypothesis' number of examples: `number` in `make campaigns` (profile "draws"), a third in `make test`."""
    is_campaign = settings.get_current_profile_name() == "draws"
    return settings(max_examples=number if is_campaign else min(number, max(10, number // 3)))


def in_campaigns(cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test that only `make campaigns` runs; a tuple has several values."""
    assert not isinstance(cases, Set), "pytest's workers would collect a set in different orders, and run nothing"
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.campaign) for case in cases]
