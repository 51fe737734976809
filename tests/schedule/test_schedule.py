import pytest
from plans import chain, language_model, replica, routes_of

from motet.plan import Plan
from motet.schedule.action import parse_action
from motet.schedule.schedule import Schedule, grid, schedule_of_stages

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


def test_a_stage_without_actions_leaves_its_ranks_empty() -> None:
    assert schedule_of_stages(routes_of(chain(2, 1)), {}).ranks == ((), ())


def test_stages_that_share_ranks_have_no_one_list() -> None:
    routes = routes_of(Plan(modules={"llm": language_model(replica(0, 0))}, edges=(), num_microbatches=1))
    action = parse_action("llm[0].0F0")
    with pytest.raises(AssertionError, match="rank 0 is in two groups"):
        schedule_of_stages(routes, {("llm", 0, 0): [action], ("llm", 0, 1): [action]})  # type: ignore[dict-item, list-item]
