"""`motet families`: lists the model families that have been probed."""

import argparse
from dataclasses import asdict
from typing import Any

from motet.errors import UserError

HELP = "list the model families that have been probed, with the features that they support"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes no arguments of its own."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.overrides:
        raise UserError("--set: motet families reads no run file; leave it out")
    from motet.families.capabilities import known_capabilities

    known = known_capabilities()
    for family in known:
        refused = [feature for feature, reason in family.reasons.items() if reason is not None]
        print(f"{family.model_type:24} {family.date}  {'all' if not refused else 'not ' + ', '.join(refused)}")
    print(
        f"{len(known)} families probed with these versions; any other causal language model of transformers is probed "
        "when it is first trained, or by motet family check MODEL"
    )
    return {"families": [asdict(family) for family in known]}
