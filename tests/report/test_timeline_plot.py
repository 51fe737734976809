from pathlib import Path

from matplotlib.collections import PolyCollection
from plans import routes_of, vision_audio_llm

from motet.report.pictures import plot_timelines, save_timelines
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import lower
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate
from motet.timeline import Timeline


def a_timeline() -> Timeline:
    routes = routes_of(vision_audio_llm(3))
    costs = UniformCosts(forward_s=0.01, backward_s=0.02, reduce_seconds=0.01, fixed_s=0.005)
    return simulate(lower(GENERATORS["1f1b"](routes), Dependencies(routes)), costs).timeline


def test_every_span_but_messages_is_drawn_once_at_its_time() -> None:
    timeline = a_timeline()
    (axis,) = plot_timelines({"predicted": timeline}).axes
    drawn = sorted(
        (round(path.vertices[:, 0].min(), 6), round(path.vertices[:, 0].max(), 6))
        for collection in axis.collections
        if isinstance(collection, PolyCollection)
        for path in collection.get_paths()
    )
    expected = [(round(s.start * 1e3, 6), round(s.end * 1e3, 6)) for s in timeline.spans if s.kind != "message"]
    assert drawn == sorted(expected)


def test_titles_lanes_and_legend() -> None:
    timeline = a_timeline()
    figure = plot_timelines({"predicted": timeline, "measured": timeline})
    assert [axis.get_title(loc="left").partition(":")[0] for axis in figure.axes] == ["predicted", "measured"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [f"rank {i}" for i in range(6)]
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert texts == {"audio", "llm", "vision", "forward", "backward", "reduction", "optimizer step"}


def test_modules_and_kinds_differ_in_colour() -> None:
    (axis,) = plot_timelines({"predicted": a_timeline()}).axes
    colours = {tuple(collection.get_facecolor()[0]) for collection in axis.collections}
    assert len(colours) == 3 * 3 + 1  # Forward, backward and reduction of three modules; the optimizer.


def test_one_rank_can_stand_for_those_that_do_the_same() -> None:
    whole = a_timeline()
    lanes = [(0, 6, 7), *((rank,) for rank in range(1, 6))]
    (axis,) = plot_timelines({"predicted": whole}, {"predicted": lanes}).axes
    assert [label.get_text() for label in axis.get_yticklabels()][:2] == ["rank 0 and 2 alike", "rank 1"]
    idle = 1 - (2 * whole.busy_s[0] + sum(whole.busy_s)) / (8 * whole.iteration_time_s)
    assert axis.get_title(loc="left").endswith(f"bubble {idle:.1%}")
    (axis,) = plot_timelines({"predicted": whole}, {"predicted": [(5,), (2,)]}).axes
    assert sum(len(bars.get_paths()) for bars in axis.collections) == sum(
        span.rank in (2, 5) and span.kind != "message" for span in whole.spans
    )


def test_pictures_are_written(tmp_path: Path) -> None:
    for suffix in ("png", "svg"):
        save_timelines({"predicted": a_timeline()}, tmp_path / f"timeline.{suffix}")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


def test_an_empty_timeline_is_an_empty_picture() -> None:
    (axis,) = plot_timelines({"nothing": Timeline(())}).axes
    assert not axis.collections
