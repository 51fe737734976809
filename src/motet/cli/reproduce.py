"""`motet reproduce`: the papers' tables beside ours."""

import argparse
from typing import Any

HELP = "simulate the papers' published tables, and show theirs beside ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", metavar="PAPER", help="a paper's name (cornstarch, disttrain, ...), or all")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from motet.reproduce import PAPERS, reproduce
    from motet.reproduce.tables import as_json, as_text

    if arguments.paper != "all":
        result = as_json(arguments.paper, reproduce(arguments.paper))
        print(as_text(result))
        return result
    results = [as_json(paper, reproduce(paper)) for paper in PAPERS]
    print("\n\n".join(map(as_text, results)))
    tables = [{**table, "paper": result["paper"]} for result in results for table in result["tables"]]
    return {"paper": "all", "tables": tables}
