"""The program in docs/attention.md runs."""

import re

from checkout import ROOT

from motet.assignment.sample import Sample, Segment

DOCS = ROOT / "docs" / "attention.md"


def test_the_program_runs() -> None:
    block = re.search(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert block is not None
    segments = [Segment(400), Segment(256, "vision", 0), Segment(900), Segment(256, "vision", 1)] * 4
    names = {"samples": [Sample("a", {"language_model": tuple(segments)})] * 2}
    program = block.group(1).replace(", 64,", ", 4,")  # Two short samples have no 64 blocks to share.
    exec(program, names)
    assert names["shares"].token_counts.sum() == 2 * 4 * 1812  # type: ignore[attr-defined]
