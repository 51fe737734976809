"""Reads requests for shapes from stdin and prints cards, for processes without torch."""

import json
import sys
from dataclasses import asdict

from motet.environment import collect_rarely
from motet.errors import UserError
from motet.shapes.shape_card import ShapeRequest


def main() -> None:
    collect_rarely()
    from motet.families.shape_reading.shape_walker import walk

    for line in sys.stdin:
        request = ShapeRequest(**json.loads(line))
        try:
            print(json.dumps({"card": json.dumps(asdict(walk(request)))}))
        except UserError as error:
            print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
