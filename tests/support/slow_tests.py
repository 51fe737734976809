"""Reads and rewrites tests/slow.txt, which lists the test functions that `make quick` leaves out.

Each line holds the seconds of processor time of a function's cases and the function, as `tests/a/test_b.py::test_c`.
`python tests/support/slow_tests.py JUNIT_XML` rewrites the file from the report of a whole run.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).parents[1] / "slow.txt"
PROPERTY = "processor_seconds"
"""The name under which tests/conftest.py reports what a test has taken, with the processes that it has waited for."""

THRESHOLD = 0.3
"""Seconds from which on a function is slow."""


def read(file: Path = FILE) -> dict[str, float]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {function: float(seconds) for seconds, function in lines}


def write(seconds: Mapping[str, float], file: Path = FILE) -> None:
    slow = {function: value for function, value in seconds.items() if value >= THRESHOLD}
    file.write_text("".join(f"{value:6.1f} {function}\n" for function, value in sorted(slow.items())))


def seconds_of_functions(junit_xml: Path) -> dict[str, float]:
    """Sums the seconds of processor time of every function's cases in a report of pytest."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit_xml).iter("testcase"):
        # A class, if there is one, is the last part of the name of the module.
        *path, last = case.attrib["classname"].split(".")
        module, within = (path, [last]) if last.startswith("Test") else ([*path, last], [])
        function = "::".join(["/".join(module) + ".py", *within, case.attrib["name"].partition("[")[0]])
        for reported in case.iterfind(f"properties/property[@name='{PROPERTY}']"):
            seconds[function] += float(reported.attrib["value"])
    return dict(seconds)


if __name__ == "__main__":
    write(seconds_of_functions(Path(sys.argv[1])))
