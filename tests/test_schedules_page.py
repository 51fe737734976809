"""docs/schedules.md shows what the schedules do now, and names each of them."""

import re

from checkout import ROOT

from docs.generate.schedules import DRAWN, describe, draw
from motet.schedule.generators import GENERATORS

PAGE = (ROOT / "docs" / "schedules.md").read_text()


def test_the_page_is_up_to_date() -> None:
    assert describe(PAGE) == PAGE, "run: make docs"
    assert set(re.findall(r"<!-- timeline: (.+?) -->", PAGE)) == set(DRAWN)
    for name in GENERATORS:
        assert f"| `{name}` |" in PAGE, f"{name} is not in the table"


def test_one_picture_by_hand() -> None:
    drawn = DRAWN["1f1b"]._replace(llm=(0, 1), num_microbatches=2)
    assert draw(drawn) == "0 ab..AA.BB\n1 .aAAbBB..\n  9 s"
