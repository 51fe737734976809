"""`motet demo`: from nothing to a trained multimodal model that plain transformers loads and that answers questions."""

import argparse
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.cli.run_file import file_to_write, load_config, write_text
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.data.example import Modality
    from motet.data.tasks.dial_a_digit import Accuracy, Dialled

HELP = "run the whole workflow on a small real task: profile, plan, train, export, and ask the exported model"

RUN_FILE = Path(__file__).with_name("demo.yaml")

NUM_ASKED = 500
"""Held-out questions that the exported model answers."""
NUM_SHOWN = 4
MAX_NEW_TOKENS = 12
"""More than any answer has: each digit is a token, and a sum has at most three."""


@dataclass(frozen=True)
class Asked:
    contents: "tuple[Dialled, ...]"
    answers: tuple[str, ...]

    @property
    def accuracy(self) -> "Accuracy":
        from motet.data.tasks.dial_a_digit import accuracy

        return accuracy(zip(self.contents, self.answers, strict=True))

    def shown(self, num: int) -> list[dict[str, str]]:
        """The first `num` questions and answers."""
        from motet.data.tasks.dial_a_digit import QUESTIONS

        return [
            {"question": QUESTIONS[content.question], "right": content.answer, "answer": answer}
            for content, answer in list(zip(self.contents, self.answers, strict=True))[:num]
        ]


def ask_exported(config: "RunConfig", export: Path, *, num_samples: int, denied: "Modality | None" = None) -> Asked:
    """Greedy, free-running answers to held-out questions. `denied`: images are blank, or sounds are noise alone."""
    from transformers.utils.logging import disable_progress_bar

    from motet.data.run_file import open_data
    from motet.data.tasks.dial_a_digit import DialADigitExamples
    from motet.models.hub.generation import Prompt, generate_answers

    disable_progress_bar()
    data = open_data(config)
    assert data.held_out is not None
    examples: Any = data.held_out.examples
    assert isinstance(examples, DialADigitExamples)
    preparation = data.preparation
    contents, prompts = [], []
    for i in range(min(num_samples, len(examples))):
        contents.append(examples.task.dialled("held_out", i))
        example = examples.task.example("held_out", i, denied=(denied,) if denied else ())
        layouts = preparation.sample(example).layouts
        segments = {name: layout for name, layout in layouts.items() if name != LANGUAGE_MODEL}
        prompts.append(
            Prompt(
                input_ids=preparation.prompt(example),
                segments=segments,
                features={name: preparation.features(example, name) for name, own in segments.items() if own},
            )
        )
    tokenizer = preparation.conversation.tokenizer
    tokens = generate_answers(export, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=tokenizer.eos_token_id)
    return Asked(tuple(contents), tuple(tokenizer.batch_decode(tokens, skip_special_tokens=True)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_file",
        metavar="RUN.yaml",
        nargs="?",
        default=str(RUN_FILE),
        help="a run file of dial-a-digit (default: the demo's own)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    config = load_config(arguments)
    if config.data.kind != "dial-a-digit":
        raise UserError(f"data.kind: is {config.data.kind}; the demo needs dial-a-digit; use motet train for your data")
    if not config.train.checkpoint_every:
        raise UserError("train.checkpoint_every: is 0, so the demo would have nothing to export; give at least 1")
    from motet.api import make_plan, profile, train
    from motet.report.plan_report import report_text
    from motet.report.timelines import timeline_text

    output = Path(config.train.output)

    _headline("1. Profile: what each layer costs on this machine")
    costs = Path(config.cluster.costs or output / "costs.json")
    if config.cluster.costs is None:
        write_text(file_to_write(str(costs), "train.output"), profile(config).to_json() + "\n", "train.output")
        arguments.overrides.append(f"cluster.costs={costs}")
        config = load_config(arguments)
    print(f"costs are in {costs}")

    _headline("2. Plan: who holds what, and what an iteration will take")
    prediction = make_plan(config)
    write_text(output / "plan.json", prediction.plan.to_json() + "\n", "train.output")
    print(report_text(prediction.report))
    print(f"\nPredicted timeline of one iteration:\n{timeline_text(prediction.timeline)}")

    _headline(f"3. Train: {config.train.steps} steps on {prediction.plan.num_ranks} processes")
    result = train(config, plan=prediction.plan)

    _headline("4. Ask the exported model, loaded by transformers in one process")
    answers = _ask(config, Path(result["export"]))
    _show_answers(answers)

    _headline("5. What came of it")
    result |= {"answers": answers, "seconds": time.monotonic() - started}
    _show_summary(config, result)
    return result


def _ask(config: "RunConfig", export: Path) -> dict[str, Any]:
    """The accuracy of answers, and of answers without the image or without the sound."""
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


def _show_answers(answers: dict[str, Any]) -> None:
    for shown in answers["examples"]:
        print(f"  {shown['question']}  right: {shown['right']!r}  answer: {shown['answer']!r}")
    whole, blind, deaf = (answers[key] for key in ("accuracy", "accuracy_without_image", "accuracy_without_sound"))
    print(f"\nHeld-out accuracy on {answers['num_samples']} samples, handwriting never trained on:")
    print(f"  seen digits   {_percent(whole['seen_digits'])}   (with a blank image {_percent(blind['seen_digits'])})")
    print(f"  heard digits  {_percent(whole['heard_digits'])}   (with noise alone {_percent(deaf['heard_digits'])})")
    for question, share in whole["answers"].items():
        print(f"  whole answers to {question!r}: {_percent(share)} of {whole['num_answers'][question]}")


def _percent(share: float | None) -> str:
    return "none asked" if share is None else f"{share:.1%}"


def _show_summary(config: "RunConfig", result: dict[str, Any]) -> None:
    predicted, measured = result["predicted"]["iteration_time_s"], result["measured"]["iteration_time_s"]
    output = config.train.output
    print(
        textwrap.dedent(
            f"""\
            iteration: predicted {1e3 * predicted:.1f} ms, measured {1e3 * measured:.1f} ms
            whole demo: {result["seconds"]:.0f} s

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
    )


def _headline(text: str) -> None:
    print(f"\n== {text}", flush=True)
