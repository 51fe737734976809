"""Has an exported model answer held-out questions of *dial a digit*, and counts what is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from motet.config import RunConfig
from motet.data.conversation.example import Modality
from motet.data.run_file.datasets import open_data
from motet.data.tasks.dial_a_digit import QUESTIONS, DialADigitExamples, Dialled
from motet.data.tasks.scoring import Accuracy, accuracy
from motet.models.hub.generation import Prompt, generate_answers
from motet.plan import LANGUAGE_MODEL

MAX_NEW_TOKENS = 12
"""More than any answer has: a digit is a token, and a sum has at most three."""


@dataclass(frozen=True)
class Asked:
    contents: tuple[Dialled, ...]
    answers: tuple[str, ...]

    @property
    def accuracy(self) -> Accuracy:
        return accuracy(zip(self.contents, self.answers, strict=True))

    def shown(self, num: int) -> list[dict[str, str]]:
        """The first few, to be printed."""
        return [
            {"question": QUESTIONS[content.question], "right": content.answer, "answer": answer}
            for content, answer in list(zip(self.contents, self.answers, strict=True))[:num]
        ]


def ask_exported(config: RunConfig, export: Path, *, num_samples: int, denied: Modality | None = None) -> Asked:
    """Greedy, free-running answers. `denied`: images are blank, or sounds are noise alone."""
    disable_progress_bar()
    data = open_data(config)
    assert data.held_out is not None
    examples: Any = data.held_out.examples
    assert isinstance(examples, DialADigitExamples)
    preparation = data.conversational
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
    tokenizer = preparation.tokenizer
    tokens = generate_answers(export, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=tokenizer.eos_token_id)
    return Asked(tuple(contents), tuple(tokenizer.batch_decode(tokens, skip_special_tokens=True)))
