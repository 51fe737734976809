"""Tickets and metadata survive the journey; what is no ticket is refused."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.assignment.sample import Sample, Segment
from motet.data.service.server import DataServer, Request
from motet.data.service.tickets import Corrupt, Ticket, samples_from_json, samples_to_json

segments = st.builds(
    Segment,
    st.integers(1, 99),
    st.sampled_from([None, "vision"]),
    st.integers(0, 3),
    st.none() | st.integers(0, 9),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
)
samples = st.builds(
    Sample,
    st.text(),
    st.dictionaries(st.sampled_from(["vision", "language_model"]), st.lists(segments, max_size=4).map(tuple)),
    st.dictionaries(st.just("language_model"), st.integers(0, 9)),
)
tickets = st.builds(
    Ticket, st.sampled_from(["train", "held_out"]), st.lists(st.integers(0, 10**9)).map(tuple), st.none() | st.text()
)


@given(tickets)
def test_tickets(ticket: Ticket) -> None:
    assert Ticket.from_json(ticket.to_json()) == ticket


@given(st.lists(samples | st.builds(Corrupt, st.integers(0), st.text())))
def test_metadata(metadata: list[Sample | Corrupt]) -> None:
    assert samples_from_json(samples_to_json(metadata)) == metadata


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"split": "test", "indices": [], "module": null}',
        '{"split": "train", "indices": 3, "module": null}',
        '{"split": "train", "indices": [-1], "module": null}',
        '{"split": "train", "indices": [true], "module": null}',
        '{"split": "train", "indices": [1.0], "module": null}',
        '{"split": "train", "indices": [], "module": 3}',
        '{"split": "train", "indices": [], "module": null, "more": 1}',
    ],
)
def test_what_is_no_ticket(text: str) -> None:
    with pytest.raises(ValueError, match=r"ticket|Expecting"):
        Ticket.from_json(text)


def test_a_ticket_for_samples_that_the_data_do_not_have() -> None:
    server = SimpleNamespace(_agreed="facts", _modules=set(), sizes={"train": 3})
    for split, told in (("train", "train has 3 samples"), ("held_out", "held_out has 0 samples")):
        with pytest.raises(ValueError, match=told):
            DataServer._check(server, Request("facts", Ticket(split, (3,))))  # type: ignore[arg-type]
