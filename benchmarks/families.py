"""Probes every causal language model that transformers declares: which features are equal to one process?

Beside the features of `motet family check`, tensor and pipeline parallelism together on four processes. Results are
written after each family; started again, the script goes on after those that the file has:

    python -m benchmarks.families results.json
    python -m benchmarks.families results.json --only 'qwen|llama' --publish

`--publish` puts the results into the package (`motet families`, docs/families.md) and writes a report.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.reporting import Report
from motet.errors import UserError
from motet.families.capabilities import FEATURES, KNOWN, cache_folder, digest_of, probed_versions, write_capabilities
from motet.families.tiny import tiny_config
from motet.runtime.verification.family_probe import TRIALS, Trial, config_of, probe

TOGETHER = "tensor and pipeline"
ALL_TRIALS = {**TRIALS, TOGETHER: Trial(stages=((0, 1), (2, 3)), tp_size=2)}
WANTED = {"pipeline": 130, TOGETHER: 75}
"""Goals: families that are equal."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file; families that it has are not probed again")
    parser.add_argument("--only", metavar="PATTERN", default="", help="model types in which this pattern is found")
    parser.add_argument("--publish", action="store_true", help="put the results into the package")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in results or not re.search(options.only, model_type):
            continue
        started = time.perf_counter()
        results[model_type] = _probe(model_type)
        options.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{model_type}: {time.perf_counter() - started:.1f} s, {_short(results[model_type])}", file=sys.stderr)
    if options.publish:
        _publish()
    _report(results, options.publish)
    return 0


def _probe(model_type: str) -> dict[str, Any]:
    try:
        tiny = tiny_config(config_of(model_type))
        found = probe(tiny, ALL_TRIALS)
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:  # Whatever a configuration raises that has no default values.
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    reasons = {feature: found.reasons[feature] for feature in FEATURES}
    write_capabilities(digest_of(tiny.to_dict()), replace(found, reasons=reasons))
    return asdict(found)


def _publish() -> None:
    """Puts all results in the cache into the package: those of trainings with other flags, too."""
    paths = sorted((cache_folder() / "families").glob("*.json"))
    known = {**json.loads(KNOWN.read_text()), **{path.stem: json.loads(path.read_text()) for path in paths}}
    current = {digest: each for digest, each in known.items() if each["versions"] == probed_versions()}
    KNOWN.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n")


def _report(results: dict[str, Any], is_written: bool) -> None:
    report = Report("families", "Language models under each feature, against one process")
    probed = {name: result["reasons"] for name, result in results.items() if "reasons" in result}
    counts = {feature: sum(reasons[feature] is None for reasons in probed.values()) for feature in ALL_TRIALS}
    differing = {f: sum("differ" in (r[f] or "") for r in probed.values()) for f in ALL_TRIALS}
    report.add(f"{len(results)} model types, of which {len(results) - len(probed)} could not be built as a tiny model.")
    report.table(
        ["feature", "equal", "refused because gradients differ", "refused for another reason"],
        [[f, counts[f], differing[f], len(probed) - counts[f] - differing[f]] for f in ALL_TRIALS],
    )
    for feature, wanted in WANTED.items():
        report.goal(
            f"at least {wanted} families equal under {feature}", counts[feature] >= wanted, str(counts[feature])
        )
    causes = Counter(result["refused"] for result in results.values() if "refused" in result)
    report.table(["why no tiny model could be built", "families"], causes.most_common())
    for feature in WANTED:
        report.table(
            [f"refused: {feature}", "why"],
            [[name, reasons[feature]] for name, reasons in sorted(probed.items()) if reasons[feature] is not None],
        )
    if is_written:
        report.write()
    else:
        print(report.text())


def _short(result: dict[str, Any]) -> str:
    if "refused" in result:
        return f"not built: {result['refused'][:80]}"
    refused = [feature for feature, reason in result["reasons"].items() if reason is not None]
    return f"refused {', '.join(refused)}" if refused else "all equal"


if __name__ == "__main__":
    sys.exit(main())
