"""Verifies sampled combinations of an image encoder, an audio encoder and a language model: do gradients over processes
equal those of one?

Language models are those that `benchmarks/families.py` found equal in pipelines. Each run has one of them with an image
encoder and an audio encoder, so it verifies two pairs; encoders, ways of merging and frozen parts take turns, so that
every two of them meet. Results are written after each run; started again, the script goes on:

    python -m benchmarks.pairs results.json [--pairs 200] [--publish]
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import motet
from benchmarks.families import COMPOSITES, PUBLISHED, usual_config
from benchmarks.reporting import Report
from motet.config import RunConfig
from motet.families.tiny import tiny_config
from motet.runtime.verification.family_probe import TRIALS, probe
from motet.strict_parsing import parse_strictly

VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
VISION: Mapping[str, Mapping[str, Any]] = {
    "SiglipVisionConfig": VIT,
    "CLIPVisionConfig": VIT,
    "Dinov2Config": {**{key: value for key, value in VIT.items() if key != "intermediate_size"}, "mlp_ratio": 2},
    "PixtralVisionConfig": VIT,
    "Qwen2_5_VLVisionConfig": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    },
}
SOUND = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 25,
}
AUDIO: Mapping[str, Mapping[str, Any]] = {"WhisperConfig": SOUND, "Qwen2AudioEncoderConfig": SOUND}
MERGES = ("placeholder", "prepend")
FROZEN: Mapping[str, Any] = {"nothing": {}, "encoders": {"train": {"module": False}}}
TOLERANCE = 1e-9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file; combinations that it has are not run again")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--publish", action="store_true", help="write a report")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    families = language_models()
    for combination in combinations(families, options.pairs // 2):
        key = " + ".join(combination)
        if key in results:
            continue
        started = time.perf_counter()
        results[key] = _verify(*combination)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{key}: {time.perf_counter() - started:.1f} s, {results[key] or 'equal'}", file=sys.stderr)
    _report(results, len(families), options.publish)
    return 0


def language_models() -> list[str]:
    """Types that are equal in pipelines, as published."""
    families = json.loads(PUBLISHED.read_text())["families"]
    return [
        name
        for name, family in sorted(families.items())
        if not name.startswith(COMPOSITES) and family.get("reasons", {}).get("pipeline", "refused") is None
    ]


def combinations(families: Sequence[str], number: int) -> list[tuple[str, str, str, str, str]]:
    """Language model, image encoder, audio encoder, way of merging, what is frozen. Language models take turns; with
    each comes the next of all combinations of the others."""
    others = list(product(VISION, AUDIO, MERGES, FROZEN))
    step = 7  # Has no factor in common with their number, so all come, and neighbours differ in every part.
    return [(families[i % len(families)], *others[i * step % len(others)]) for i in range(number)]


def _verify(language_model: str, vision: str, audio: str, merge: str, frozen: str) -> str | None:
    """None if gradients were equal, else why not."""
    tiny = tiny_config(usual_config(language_model))
    left_out = ("model_type", "transformers_version", "eos_token_id")  # Ends of answers need not be in its vocabulary.
    values = {key: value for key, value in tiny.to_diff_dict().items() if key not in left_out}
    run = {
        "model": {
            "encoders": {
                "vision": {"config": vision, "values": dict(VISION[vision]), **FROZEN[frozen]},
                "audio": {"config": audio, "values": dict(AUDIO[audio]), **FROZEN[frozen]},
            },
            "language_model": {"config": type(tiny).__name__, "values": values},
            "merge": merge,
        },
        "data": {"kind": "dial-a-digit", "num_train": 16, "num_held_out": 8},
        "cluster": {"num_devices": 4},
        "parallel": {
            "planner": "explicit",
            "num_microbatches": 2,
            "explicit": {"vision": {}, "audio": {}, "language_model": {"pp": 2}},
        },
        "train": {"global_batch_size": 4, "dtype": "float64", "steps": 1},
    }
    try:
        found = motet.verify(parse_strictly(RunConfig, json.dumps(run, default=str), what="run"))
    except Exception as error:  # Whatever a model raises; the report says it.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if found["passed"] and found["max_grad_rel_err"] < TOLERANCE:
        return None
    # `motet verify` runs what a training would refuse.
    refused = probe(tiny, {"padding": TRIALS["padding"]}).reasons["padding"]
    if refused is not None:
        return f"a training refuses padded microbatches of {language_model}: {refused}"
    return f"gradients differ by {found['max_grad_rel_err']}"


def _report(results: Mapping[str, str | None], num_families: int, is_written: bool) -> None:
    report = Report("pairs", "Combinations of encoders and language models, against one process")
    pairs = {(key.split(" + ")[0], encoder) for key in results for encoder in key.split(" + ")[1:3]}
    equal = {
        (key.split(" + ")[0], encoder)
        for key, reason in results.items()
        if reason is None
        for encoder in key.split(" + ")[1:3]
    }
    encoders = len(VISION) + len(AUDIO)
    report.add(
        f"{len(equal)} of {len(pairs)} pairs of an encoder and a language model were verified, in {len(results)} runs "
        "of an image encoder, an audio encoder and two stages of a language model on four processes, in float64. "
        f"{num_families} types of language models are equal in pipelines by themselves, and {encoders} encoders were "
        f"combined with them: {num_families * encoders} pairs, of which the others have not been run."
    )
    refused = [[key, reason] for key, reason in results.items() if reason is not None]
    report.table(["refused or differing", "why"], refused)
    report.goal(
        "no combination runs and differs",
        not any(reason.startswith("gradients differ") for _, reason in refused),
        f"{len(refused)} refused",
    )
    if is_written:
        report.write()
    else:
        print(report.text())


if __name__ == "__main__":
    sys.exit(main())
