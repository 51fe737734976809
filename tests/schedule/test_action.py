import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.schedule.action import Compute, Kind, Reduce, parse_action, unit_duration
from motet.schedule.routes import Cell

names = st.text(st.characters(categories=["L", "N"], include_characters="_@-"), min_size=1)
small = st.integers(0, 10**6)


def test_texts() -> None:
    cell = Cell("vision", 0, 1, 3)
    assert [str(Compute(kind, cell)) for kind in Kind] == [
        "vision[0].1F3",
        "vision[0].1B3",
        "vision[0].1I3",
        "vision[0].1W3",
    ]
    assert str(Reduce("vision", 4, 9)) == "vision.R[4:9)"
    assert str(Reduce("llm", 0, 9, tied=True)) == "llm.R[0=9)"


@given(st.sampled_from(list(Kind)), names, small, small, small)
def test_compute_actions_parse_back(kind: Kind, module: str, replica: int, stage: int, microbatch: int) -> None:
    action = Compute(kind, Cell(module, replica, stage, microbatch))
    assert parse_action(str(action)) == action


@given(names, small, small, st.booleans())
def test_reductions_parse_back(module: str, first: int, last: int, tied: bool) -> None:
    action = Reduce(module, first, last, tied)
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "vision", "vision[0].1X3", "vision[0]1F3", "vision.R[4,9)", "vision[0].1F3 "])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


def test_without_costs_a_whole_backward_takes_as_long_as_its_halves() -> None:
    cell = Cell("llm", 0, 0, 0)
    durations = {kind: unit_duration(Compute(kind, cell)) for kind in Kind}
    assert durations[Kind.BACKWARD] == durations[Kind.INPUT] + durations[Kind.WEIGHT] == 2 * durations[Kind.FORWARD]
