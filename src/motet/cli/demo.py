"""`motet demo`: from nothing to a trained multimodal model that plain transformers and diffusers load, and that answers
questions and draws."""

import argparse
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.cli.run_file import file_to_write, load_config, write_text
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import RunConfig

HELP = "run the whole workflow on a small real task: profile, plan, train, export, and ask the exported model"

RUN_FILE = Path(__file__).with_name("demo.yaml")

NUM_ASKED = 500
"""Held-out questions that the exported model answers."""
NUM_SHOWN = 4
NUM_DRAWN = 50
"""Drawings of each kind of request."""
GUIDANCE, NUM_SAMPLING_STEPS = 2.0, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_file",
        metavar="RUN.yaml",
        nargs="?",
        default=str(RUN_FILE),
        help="a run file of dial-a-digit (default: the demo's own)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    clock = _Clock()
    config = load_config(arguments)
    from motet.config import DialADigitConfig

    if not isinstance(config.data, DialADigitConfig):
        raise UserError(f"data.kind: is {config.data.kind}; the demo needs dial-a-digit; use motet train for your data")
    if not config.train.checkpoint_every:
        raise UserError("train.checkpoint_every: is 0, so the demo would have nothing to export; give at least 1")
    if not config.train.export:
        raise UserError("train.export: is false, but the demo asks the exported model; leave it out")
    draws = config.data.drawings > 0
    from motet.api import make_plan, profile, train
    from motet.report.plan_report import report_text
    from motet.report.timelines import timeline_text

    if config.model.generators:
        from motet.families.diffusion_models import diffusion_class

        # Before minutes are spent on what cannot draw. diffusers warns of what `.to` may do to modules that none has.
        diffusion_class("logging").set_verbosity_error()
    output = Path(config.train.output)

    _headline("1. Profile: what each layer costs on this machine")
    costs = Path(config.cluster.costs or output / "costs.json")
    if config.cluster.costs is None:
        write_text(file_to_write(str(costs), "train.output"), profile(config).to_json() + "\n", "train.output")
        arguments.overrides.append(f"cluster.costs={costs}")
        config = load_config(arguments)
    print(f"costs are in {costs}")
    clock.lap("profile")

    _headline("2. Plan: who holds what, and what an iteration will take")
    prediction = make_plan(config)
    write_text(output / "plan.json", prediction.plan.to_json() + "\n", "train.output")
    print(report_text(prediction.report))
    print(f"\nPredicted timeline of one iteration:\n{timeline_text(prediction.timeline)}")
    clock.lap("plan")

    _headline(f"3. Train: {config.train.steps} steps on {prediction.plan.num_ranks} processes")
    result = train(config, plan=prediction.plan)
    clock.lap("train")

    with_what = "transformers and diffusers" if draws else "transformers"
    _headline(f"4. Ask the exported model, loaded by {with_what} in one process")
    answers = _ask(config, Path(result["export"]))
    _show_answers(answers)
    result |= {"answers": answers}
    drawings = _draw(config, Path(result["export"]), output / "drawings.png") if draws else None
    if drawings is not None:
        result |= {"drawings": drawings}
        _show_drawings(drawings)
    elif draws:
        print("\nNo held-out example asks for a drawing; data.num_held_out gives more of them.")
    clock.lap("evaluate")

    _headline("5. What came of it")
    result |= {"seconds": sum(clock.laps.values()), "seconds_of": clock.laps}
    _show_summary(config, result)
    return result


class _Clock:
    """Seconds of each part of the demo."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self.laps[part], self._since = now - self._since, now


def _ask(config: "RunConfig", export: Path) -> dict[str, Any]:
    """The accuracy of answers, and of answers without the image or without the sound."""
    from motet.cli.asking import ask_exported

    whole = ask_exported(config, export, num_samples=NUM_ASKED)
    blind = ask_exported(config, export, num_samples=NUM_ASKED, denied="image")
    deaf = ask_exported(config, export, num_samples=NUM_ASKED, denied="audio")
    return {
        "num_samples": len(whole.answers),
        "accuracy": asdict(whole.accuracy),
        "accuracy_without_image": asdict(blind.accuracy),
        "accuracy_without_sound": asdict(deaf.accuracy),
        "examples": whole.shown(NUM_SHOWN),
    }


def _draw(config: "RunConfig", export: Path, sheet: Path) -> dict[str, Any] | None:
    """Measures what a classifier reads in drawings, and how they differ from each other and from training images;
    None: no held-out example asks for one."""
    from motet.cli.asking import AskedToDraw

    asked = AskedToDraw(config, export, num_each=NUM_DRAWN)
    if not asked.contents:
        return None
    drawn = asked.draw(guidance=GUIDANCE, num_steps=NUM_SAMPLING_STEPS)
    by_chance = asked.draw(guidance=0.0, num_steps=NUM_SAMPLING_STEPS)
    asked.sheet(drawn).save(sheet)
    return {
        "num_drawings": len(drawn),
        "guidance": GUIDANCE,
        "sampling_steps": NUM_SAMPLING_STEPS,
        "right": asked.shares(drawn),
        "right_without_condition": asked.share(by_chance),
        **asked.likeness(drawn),
        "sheet": str(sheet),
        "examples": asked.shown(NUM_SHOWN),
    }


def _show_answers(answers: dict[str, Any]) -> None:
    for shown in answers["examples"]:
        print(f"  {shown['question']}  right: {shown['right']!r}  answer: {shown['answer']!r}")
    whole, blind, deaf = (answers[key] for key in ("accuracy", "accuracy_without_image", "accuracy_without_sound"))
    print(f"\nHeld-out accuracy on {answers['num_samples']} samples, handwriting never trained on:")
    print(f"  seen digits   {_percent(whole['seen_digits'])}   (with a blank image {_percent(blind['seen_digits'])})")
    print(f"  heard digits  {_percent(whole['heard_digits'])}   (with noise alone {_percent(deaf['heard_digits'])})")
    for question, share in whole["answers"].items():
        print(f"  whole answers to {question!r}: {_percent(share)} of {whole['num_answers'][question]}")


def _show_drawings(drawings: dict[str, Any]) -> None:
    print()
    for shown in drawings["examples"]:
        print(f"  {shown['question']}  right: {shown['right']!r}  answer: {shown['answer']!r} and a drawing")
    print(
        f"\nDrawings that a classifier reads rightly, of {drawings['num_drawings']}, at guidance "
        f"{drawings['guidance']:.0f} in {drawings['sampling_steps']} steps (it was trained on handwriting that the "
        "model was not):"
    )
    for request, share in drawings["right"].items():
        print(f"  digits {request:6} {_percent(share)}")
    print(f"  without condition {_percent(drawings['right_without_condition'])}")
    print(
        f"  beside handwriting: {drawings['spread']:.0%} of its spread within a digit, {drawings['novelty']:.0%} of its"
        " distance to the nearest image of the training"
    )


def _percent(share: float | None) -> str:
    return "none asked" if share is None else f"{share:.1%}"


def _show_summary(config: "RunConfig", result: dict[str, Any]) -> None:
    predicted, measured = result["predicted"]["iteration_time_s"], result["measured"]["iteration_time_s"]
    output = config.train.output
    parts = result["seconds_of"]
    split = ", ".join(f"{part} {parts[part]:.0f}" for part in ("profile", "plan", "train"))
    sheet = f"\n{output}/drawings.png\n    a contact sheet of drawings" if "drawings" in result else ""
    print(
        textwrap.dedent(
            f"""\
            iteration: predicted {1e3 * predicted:.1f} ms, measured {1e3 * measured:.1f} ms
            whole demo: {result["seconds"]:.0f} s ({split}; evaluation {parts["evaluate"]:.0f})

            {config.cluster.costs}
                what was measured of each layer
            {output}/plan.json        who holds what: edit it, then motet train --plan
            {output}/timeline.png     predicted above measured
            {output}/trace.json       the same for ui.perfetto.dev
            {output}/metrics.jsonl    loss, gradient norm and more of every step
            {result["checkpoint"]}
                the last checkpoint: motet train --set train.resume=latest --set train.steps=...
            {result["export"]}
                the model for plain transformers; its README.md says how"""
        )
        + sheet
    )


def _headline(text: str) -> None:
    print(f"\n== {text}", flush=True)
