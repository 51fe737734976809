"""Who has a part in the next membership where pipelines are alike."""

from pathlib import Path

import pytest
from test_recover import config_of
from training import plan_of

from motet.resilience.membership import Change, Membership
from motet.resilience.succession import Succession


def after(*changes: Change) -> Membership:
    """Two pipelines of two nodes of one process each."""
    plan = plan_of(config_of(Path()))
    first = Membership(generation=1, nodes=(0, 1, 2, 3), num_known=4, plan=plan.to_json())
    return Succession(1, None)(first, changes)


@pytest.mark.parametrize("node", range(4))
def test_whoever_is_left_out_stays_until_all_leave(node: int) -> None:
    """Others may be waiting for it, and are not told to stop."""
    told = after(Change("leaving", node, "", 0.0))
    assert not told.is_urgent
    assert set(told.leaving) == {node, node ^ 1}
    assert set(told.everyone) == {0, 1, 2, 3}


@pytest.mark.parametrize("node", range(4))
def test_whoever_is_left_out_by_a_loss_is_out_at_once(node: int) -> None:
    """All are told to stop waiting."""
    told = after(Change("lost", node, "", 0.0))
    assert told.is_urgent
    assert set(told.everyone) == {0, 1, 2, 3} - {node, node ^ 1}
