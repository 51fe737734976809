from motet.report.timelines import timeline_text
from motet.timeline import Span, Timeline


def test_draws_each_rank_by_what_takes_most_of_a_column() -> None:
    timeline = Timeline(
        (
            Span(0, "vision[0].0F0", "F", 10.0, 12.0),
            Span(0, "vision[0].0B0", "B", 18.0, 20.0),
            Span(1, "language_model[0].0F0", "F", 12.0, 15.0),
            Span(1, "language_model[0].0B0", "B", 15.0, 18.4),
            Span(1, "vision[0].0:0->language_model[0].0:0 0>1", "message", 10.0, 20.0),
        )
    )
    assert timeline_text(timeline, width=10).splitlines() == [
        "rank 0 |vv......VV|",
        "rank 1 |..lllLLL..|",
        "l language_model, v vision; capital: backward; * optimizer; . bubble",
    ]


def test_modules_with_one_initial_get_letters_of_their_own() -> None:
    spans = tuple(Span(i, f"{name}[0].0F0", "F", 0.0, 1.0) for i, name in enumerate(("audio", "abacus", "aaa")))
    assert "a aaa, b abacus, u audio" in timeline_text(Timeline(spans), width=4)


def test_an_empty_timeline_is_idle() -> None:
    assert timeline_text(Timeline((), num_ranks=1), width=3).startswith("rank 0 |...|")
