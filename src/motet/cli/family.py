"""`motet family check`: probes which features a model family works with."""

import argparse
from dataclasses import asdict
from typing import Any

from motet.errors import UserError

HELP = "probe which features a model family supports: each runs on a tiny model and is compared with one process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="check: probe the model's family")
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or a model_type of transformers")
    parser.add_argument("--again", action="store_true", help="probe even if there is a stored result")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.overrides:
        raise UserError("--set: motet family reads no run file; leave it out")
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    from motet.families.capabilities import COMPOSITE_FEATURES, FEATURES
    from motet.runtime.verification.composite_probe import composite_capabilities
    from motet.runtime.verification.family_probe import capabilities_of, config_of

    config = config_of(arguments.model)
    features = FEATURES
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        features = COMPOSITE_FEATURES
        found = composite_capabilities(config, again=arguments.again)
    else:
        found = capabilities_of(config, again=arguments.again)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    print(f"{found.model_class} ({found.model_type}), probed {found.date} with {versions}")
    width = max(map(len, features))
    for feature, description in features.items():
        reason = found.reasons.get(feature)
        print(f"  {feature:{width}}  {'equal' if reason is None else 'refused'}: {reason or description}")
    return asdict(found)
