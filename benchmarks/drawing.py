"""How well does the demo's model draw, read and hear, and how many processor seconds does its training take?

Trains `motet demo`'s run file once for each seed (of weights, data and order), on four processes. Models that are in
the folder already are not trained again. Exported models are asked in one process. With `--phases` the language model
is trained first and then stays frozen, while query tokens, connector and generator learn. A processor second is one of
any process of the training, so the figures hold on a busy machine, if roughly; wall times do not.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import motet
from benchmarks.reporting import Report
from motet.cli.asking import AskedToDraw, ask_exported
from motet.cli.demo import RUN_FILE
from motet.config import RunConfig, load_run_config
from motet.data.tasks.dial_a_digit import REQUESTS
from motet.data.tasks.drawn_digits import share_read_in_training_scans

NUM_STEPS = 10
LEAST = {"told": 0.95, "sum": 0.95, "seen": 0.9, "heard": 0.9}
"""Shares of drawings that say what they should at guidance 2, by request."""
LEAST_UNGUIDED, LEAST_IN_PHASES, MOST_UNCONDITIONAL = 0.85, 0.85, 0.2
LEAST_SPREAD, LEAST_NOVELTY = 0.5, 0.8
LEAST_READ, LEAST_HEARD = 0.92, 0.98
PHASES = """
- name: speak
  steps: {speak}
  # Images hardly count, and what draws them is frozen.
  set: {{data.drawings: 0.7,
         train.learning_rate: 1.0e-3,
         model.generators.image.loss_weight: 1.0e-6,
         model.generators.image.train: {{module: false, projector: false, queries: false}}}}
- name: draw
  steps: {draw}
  set: {{data.drawings: 1.0,
         train.learning_rate: 2.0e-3,
         model.language_model.train.module: false,
         model.encoders.vision.train: {{module: false, projector: false}},
         model.encoders.audio.train: {{module: false, projector: false}}}}
"""
"""YAML of `train.phases`."""


def overrides_of(seed: int, folder: Path, phases: str | None, given: Sequence[str]) -> list[str]:
    parts = ("encoders.vision", "encoders.audio", "language_model", "generators.image")
    seeds = [f"train.seed={seed}", f"data.seed={seed}", *(f"model.{part}.seed={seed}" for part in parts)]
    whole = [*seeds, f"train.output={folder}", "train.eval_every=0", *given]
    return whole if phases is None else [*whole, f"train.phases={phases}"]


def trained(overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Processor and wall seconds of the training, which is done unless the folder has its export."""
    record = folder / "seconds.json"
    if not record.is_file():
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        motet.train(RUN_FILE, [*overrides, "train.overwrite=true"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        record.write_text(json.dumps({"processor_s": processor_s, "wall_s": time.perf_counter() - started}))
    seconds: dict[str, float] = json.loads(record.read_text())
    return seconds


def asked(config: RunConfig, export: Path, num_each: int, num_questions: int, picture: Path) -> dict[str, Any]:
    """Counts of right drawings, by guidance and request, and the measures of one model."""
    requests = AskedToDraw(config, export, num_each=num_each)
    kinds = np.array([content.request for content in requests.contents])
    found: dict[str, Any] = {}
    for guidance in (2.0, 1.0, 0.0):
        drawn = requests.draw(guidance=guidance, num_steps=NUM_STEPS)
        is_right = requests.is_right(drawn)
        found[f"{guidance:.0f}"] = {
            kind: [int(is_right[kinds == kind].sum()), int((kinds == kind).sum())] for kind in REQUESTS
        }
        if guidance == 2.0:
            found |= requests.likeness(drawn)
            requests.sheet(drawn).save(picture)
    accuracy = ask_exported(config, export, num_samples=num_questions).accuracy
    return found | {"reads": accuracy.seen_digits or 0.0, "hears": accuracy.heard_digits or 0.0}


def share(models: Sequence[dict[str, Any]], guidance: str, kinds: Sequence[str]) -> float:
    """Pooled over the models."""
    counts = [model[guidance][kind] for model in models for kind in kinds]
    return sum(right for right, _ in counts) / max(1, sum(number for _, number in counts))


def main(argv: Sequence[str] | None = None) -> Report | None:
    """None: the models were only trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=200, help="of each request and seed")
    parser.add_argument("--questions", type=int, default=500, help="of each seed")
    parser.add_argument("--phases", action="store_true", help="train the language model first, then freeze it")
    parser.add_argument("--speak", type=int, default=450, help="steps of the first phase")
    parser.add_argument("--draw", type=int, default=650, help="steps of the second phase")
    parser.add_argument("--folder", type=Path, default=Path("runs/drawing"))
    parser.add_argument("--only-train", action="store_true", help="no report")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b.c=value")
    given = parser.parse_args(argv)
    phases = PHASES.format(speak=given.speak, draw=given.draw) if given.phases else None
    name = "drawing-in-phases" if phases else "drawing"
    report = Report(name, "Digits drawn by the demo's model" + (", trained in phases" if phases else ""))
    models, seconds = [], []
    for seed in given.seeds:
        folder = given.folder / (f"phases_{seed}" if phases else f"seed_{seed}")
        overrides = overrides_of(seed, folder, phases, given.overrides)
        seconds.append(trained(overrides, folder))
        if given.only_train:
            continue
        config = load_run_config(RUN_FILE, [*overrides, f"data.num_held_out={24 * given.images}"])
        export = folder / "draw" / "export" if phases else folder / "export"
        models.append(asked(config, export, given.images, given.questions, folder / "drawings.png"))
    if given.only_train:
        return None
    for each in (lambda: _tables(report, given.seeds, models, seconds), lambda: _goals(report, models, bool(phases))):
        each()
    return report


def _tables(
    report: Report, seeds: Sequence[int], models: Sequence[dict[str, Any]], seconds: Sequence[dict[str, float]]
) -> None:
    num = sum(number for model in models for _, number in model["2"].values())
    report.add(
        f"{len(models)} models, {num} drawings at each guidance, {NUM_STEPS} sampling steps. Answers are generated "
        "freely. The classifier was trained on scans that no generator was trained on; of those of the training it "
        f"reads {share_read_in_training_scans():.1%}."
    )
    for guidance, what in (("2", "guidance 2"), ("1", "guidance 1"), ("0", "the null condition alone")):
        rows = [
            (f"seed {seed}", *(f"{share([model], guidance, [kind]):.1%}" for kind in REQUESTS))
            for seed, model in zip(seeds, models, strict=True)
        ]
        pooled = ("all", *(f"{share(models, guidance, [kind]):.1%}" for kind in REQUESTS))
        report.add(f"Read rightly at {what}:")
        report.table(("", *REQUESTS), [*rows, pooled])
    report.add("Reading and hearing up to 8 digits (digits that are right), drawings beside real ones, and training:")
    report.table(
        ("", "reads", "hears", "spread within a digit", "distance to training scans", "processor s", "wall s"),
        [
            (
                f"seed {seed}",
                *(f"{model[key]:.1%}" for key in ("reads", "hears")),
                *(f"{model[key]:.2f}" for key in ("spread", "novelty")),
                *(f"{own[key]:.0f}" for key in ("processor_s", "wall_s")),
            )
            for seed, model, own in zip(seeds, models, seconds, strict=True)
        ],
    )


def _goals(report: Report, models: Sequence[dict[str, Any]], in_phases: bool) -> None:
    if in_phases:
        worst = share(models, "2", list(REQUESTS))
        report.goal(f"at least {LEAST_IN_PHASES:.0%} at guidance 2", worst >= LEAST_IN_PHASES, f"{worst:.1%}")
        return
    for kind, least in LEAST.items():
        own = share(models, "2", [kind])
        report.goal(f"{kind}: at least {least:.0%} at guidance 2", own >= least, f"{own:.1%}")
    worst = min(share(models, "1", [kind]) for kind in REQUESTS)
    report.goal(f"each at least {LEAST_UNGUIDED:.0%} at guidance 1", worst >= LEAST_UNGUIDED, f"{worst:.1%}")
    by_chance = share(models, "0", list(REQUESTS))
    most = f"at most {MOST_UNCONDITIONAL:.0%} from the null condition"
    report.goal(most, by_chance <= MOST_UNCONDITIONAL, f"{by_chance:.1%}")
    for key, least, what in (
        ("spread", LEAST_SPREAD, "of the real spread within a digit"),
        ("novelty", LEAST_NOVELTY, "of held-out scans' distance to training scans"),
        ("reads", LEAST_READ, "of digits read"),
        ("hears", LEAST_HEARD, "of digits heard"),
    ):
        mean = float(np.mean([model[key] for model in models]))
        report.goal(f"at least {least:.0%} {what}", mean >= least, f"{mean:.1%}")


if __name__ == "__main__":
    if (report := main()) is not None:
        report.write()
