import pytest

from motet.timeline import Span, Timeline

PREDICTED = Timeline(
    (
        Span(0, "llm[0].0F0", "F", 0.0, 1.0),
        Span(0, "llm[0].0:0->llm[0].1:0 0>1", "message", 1.0, 1.5),
        Span(1, "llm[0].1F0", "F", 1.5, 2.5),
        Span(1, "llm[0].1B0", "B", 2.5, 4.5),
        Span(1, "llm.R[1:2)", "reduce", 4.5, 5.0),
    ),
    num_ranks=3,
)


def test_times() -> None:
    assert PREDICTED.iteration_time_s == 5.0
    assert PREDICTED.busy_s == (1.0, 3.0, 0.0)
    assert PREDICTED.bubble_fraction == pytest.approx(1 - 4 / 15)


def test_times_count_from_the_first_span() -> None:
    late = Timeline((Span(0, "llm[0].0F0", "F", 7.0, 8.0), Span(1, "llm[0].1F0", "F", 8.0, 9.0)))
    assert late.num_ranks == 2
    assert late.iteration_time_s == 2.0
    assert late.bubble_fraction == 0.5


def test_without_spans() -> None:
    empty = Timeline(())
    assert (empty.num_ranks, empty.iteration_time_s, empty.bubble_fraction, empty.busy_s) == (0, 0.0, 0.0, ())
    assert Timeline.from_json(empty.to_json()) == empty


def test_spans_of_a_rank_come_in_time() -> None:
    shuffled = Timeline(PREDICTED.spans[::-1])
    assert [span.name for span in shuffled.of_rank(1)] == ["llm[0].1F0", "llm[0].1B0", "llm.R[1:2)"]


def test_the_module_of_a_span() -> None:
    assert {span.module for span in PREDICTED.spans} == {"llm"}


def test_json_round_trips() -> None:
    assert Timeline.from_json(PREDICTED.to_json()) == PREDICTED


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "timeline: Expecting"),
        ("{}", "timeline: 'columns'"),
        ('{"num_ranks": 1, "columns": ["a"], "spans": []}', "its columns are"),
        (PREDICTED.to_json().replace('"F"', '"X"'), "unknown kind"),
        (PREDICTED.to_json().replace('"num_ranks": 3', '"num_ranks": 1'), "unknown kind or rank"),
    ],
)
def test_other_json_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Timeline.from_json(text)


def test_difference_of_measured_and_predicted() -> None:
    measured = Timeline(
        (
            Span(0, "llm[0].0F0", "F", 10.0, 11.5),
            Span(1, "llm[0].1F0", "F", 12.0, 13.0),
            Span(1, "llm[0].1B0", "B", 13.0, 16.0),
            Span(1, "optimizer", "optimizer", 16.0, 17.5),
        )
    )
    difference = PREDICTED.diff(measured)
    assert difference.iteration_time_ratio == pytest.approx(7.5 / 5.0)
    assert [(d.name, d.start_s, d.duration_s) for d in difference.spans] == [
        ("llm[0].0F0", 0.0, 0.5),
        ("llm[0].1F0", 0.5, 0.0),
        ("llm[0].1B0", 0.5, 1.0),
    ]
    assert [span.kind for span in difference.only_here] == ["message", "reduce"]
    assert [span.name for span in difference.only_there] == ["optimizer"]


def test_names_that_repeat_are_paired_in_order() -> None:
    one = Timeline((Span(0, "wait", "wait", 0, 1), Span(0, "wait", "wait", 2, 3)))
    other = Timeline((Span(0, "wait", "wait", 0, 1), Span(0, "wait", "wait", 2, 5)))
    assert [d.duration_s for d in one.diff(other).spans] == [0, 2]


def test_a_timeline_does_not_differ_from_itself() -> None:
    difference = PREDICTED.diff(PREDICTED)
    assert difference.iteration_time_ratio == 1
    assert all(d.start_s == d.duration_s == 0 for d in difference.spans)
    assert len(difference.spans) == len(PREDICTED.spans)
    assert not difference.only_here
    assert not difference.only_there
