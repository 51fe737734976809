"""`python -m papers NAME [--json]`: a paper's published tables beside motet's numbers.

Exit codes: 0 done; 2 the paper is not known (one line says which are).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import papers
from motet.errors import UserError
from papers.tables import as_json, as_text


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables of one paper or of all, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m papers", description="Published tables beside motet's numbers.")
    parser.add_argument("paper", metavar="NAME", help=f"one of {', '.join(papers.PAPERS)}, or all")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args(argv)
    names = papers.PAPERS if arguments.paper == "all" else [arguments.paper]
    try:
        results = [as_json(name, papers.reproduce(name)) for name in names]
    except UserError as error:
        print(f"papers: error: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps(_joined(results) if arguments.paper == "all" else results[0])
        if arguments.json
        else "\n\n".join(map(as_text, results))
    )
    return 0


def _joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "paper": "all",
        "tables": [{**table, "paper": result["paper"]} for result in results for table in result["tables"]],
    }


if __name__ == "__main__":
    sys.exit(main())
