import numpy as np
import pytest
from plans import chain, routes_of

from motet.schedule.dependencies import Dependencies
from motet.schedule.schedule import Schedule, grid, schedule_of_groups

TEXT = "0: llm[0].0F0 llm[0].0B0\n1:\n2: llm[0].1F0"


def test_text_parses_back() -> None:
    schedule = Schedule.parse(TEXT)
    assert [len(actions) for actions in schedule.ranks] == [2, 0, 1]
    assert schedule.text() == TEXT
    assert Schedule.parse(f"# a comment\n\n{TEXT}\n") == schedule


def test_other_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="'llm' is not an action"):
        Schedule.parse("0: llm")


def test_grid_marks_places() -> None:
    assert grid(Schedule.parse(TEXT).ranks, {0: 1, 2: 1}) == (
        "0: llm[0].0F0 >>llm[0].0B0<<\n1: \n2: llm[0].1F0 >>end<<"
    )


def test_a_group_without_actions_has_empty_ranks() -> None:
    dependencies = Dependencies(routes_of(chain(2, 1)))
    assert schedule_of_groups(dependencies, [((0,), np.array([0]))]).text() == "0: llm[0].0F0\n1:"


def test_groups_that_share_ranks_have_no_one_list() -> None:
    dependencies = Dependencies(routes_of(chain(2, 1)))
    with pytest.raises(AssertionError, match="rank 1 is in two groups"):
        schedule_of_groups(dependencies, [((0, 1), np.array([0])), ((1,), np.array([1]))])
