"""Asks an exported model held-out questions of dial-a-digit, and for drawings, in one process.

transformers and diffusers load and run the model. Answers are generated freely: what is drawn follows from the answer
that the model itself gave, not from the right one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

    from motet.config import RunConfig
    from motet.data.example import Modality
    from motet.data.tasks.dial_a_digit import Accuracy, Dialled, Drawing
    from motet.models.hub.generation import Prompt

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
    from motet.models.hub.generation import generate_answers

    held_out = _HeldOut(config)
    indices = [i for i in range(held_out.num_examples) if held_out.task.drawing("held_out", i) is None][:num_samples]
    prompts = [held_out.prompt(i, (denied,) if denied else ()) for i in indices]
    tokenizer = held_out.tokenizer
    tokens = generate_answers(export, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=tokenizer.eos_token_id)
    contents = tuple(held_out.task.dialled("held_out", i) for i in indices)
    return Asked(contents, tuple(tokenizer.batch_decode(tokens, skip_special_tokens=True)))


class _HeldOut:
    """The held-out examples of a run file of dial-a-digit."""

    def __init__(self, config: "RunConfig") -> None:
        from transformers.utils.logging import disable_progress_bar

        from motet.data.run_file import open_data
        from motet.data.tasks.dial_a_digit import DialADigitExamples

        disable_progress_bar()
        data = open_data(config)
        assert data.held_out is not None
        examples: Any = data.held_out.examples
        assert isinstance(examples, DialADigitExamples)
        self.task, self.num_examples, self._preparation = examples.task, len(examples), data.preparation
        self.tokenizer = data.preparation.conversation.tokenizer
        self._encoders = tuple(config.model.encoders)

    def prompt(self, index: int, denied: "Sequence[Modality]" = ()) -> "Prompt":
        from motet.models.hub.generation import Prompt

        example, preparation = self.task.example("held_out", index, denied=denied), self._preparation
        layouts = preparation.sample(example).layouts
        read = {name: layouts[name] for name in self._encoders if layouts.get(name)}
        return Prompt(
            input_ids=preparation.prompt(example),
            segments=read,
            features={name: preparation.features(example, name) for name in read},
        )


class AskedToDraw:
    """Requests to draw, held-out ones, and what an exported model answered to them."""

    def __init__(self, config: "RunConfig", export: Path, *, num_each: int) -> None:
        """`num_each`: requests of each kind, as far as there are as many held-out examples."""
        import torch

        from motet.data.tasks.dial_a_digit import REQUESTS
        from motet.models.hub.drawing import load_generator
        from motet.models.hub.export import load_export
        from motet.models.hub.generation import generate_answers

        held_out = _HeldOut(config)
        by_request: dict[str, list[tuple[int, Drawing]]] = {request: [] for request in REQUESTS}
        for i in range(held_out.num_examples):
            drawing = held_out.task.drawing("held_out", i)
            if drawing is not None and len(by_request[drawing.request]) < num_each:
                by_request[drawing.request].append((i, drawing))
        chosen = [each for of_request in by_request.values() for each in of_request]
        self.contents: tuple[Drawing, ...] = tuple(drawing for _, drawing in chosen)
        name = next(name for name, part in config.model.generators.items() if not part.makes_sounds)
        self._model, self._generator = load_export(export), load_generator(export, name)
        prompts = [held_out.prompt(i) for i, _ in chosen]
        tokenizer = held_out.tokenizer
        answers = generate_answers(
            self._model, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=tokenizer.eos_token_id
        )
        place = self._generator.placeholder_token_id
        texts = [own[: own.index(place)] if place in own else own for own in answers]
        self.answers: tuple[str, ...] = tuple(tokenizer.batch_decode(texts, skip_special_tokens=True))
        self.wants_to_draw = np.array([place in own for own in answers], dtype=bool)
        """Whether the answer has a place for a drawing."""
        self._prompts = [
            replace(prompt, input_ids=torch.cat([prompt.input_ids, torch.tensor(own, dtype=torch.long)]))
            for prompt, own in zip(prompts, texts, strict=True)
        ]

    @property
    def digits(self) -> np.ndarray:
        """The digits to be drawn: int [drawings]."""
        return np.array([content.digit for content in self.contents], dtype=np.int64)

    def is_right(self, drawings: np.ndarray) -> np.ndarray:
        """Whether something was drawn and the classifier reads it as what should be drawn: bool [drawings]."""
        from motet.data.tasks.drawn_digits import read_digits

        # The classifier reads a digit in a blank image, too.
        right: np.ndarray = self.wants_to_draw & (read_digits(drawings) == self.digits)
        return right

    def share(self, drawings: np.ndarray) -> float | None:
        """The share of drawings that are read rightly; None: there are none."""
        return float(self.is_right(drawings).mean()) if len(drawings) else None

    def shares(self, drawings: np.ndarray) -> dict[str, float | None]:
        """The same by kind of request."""
        from motet.data.tasks.dial_a_digit import REQUESTS

        right = self.is_right(drawings)
        own = {request: right[[content.request == request for content in self.contents]] for request in REQUESTS}
        return {request: float(each.mean()) if len(each) else None for request, each in own.items()}

    def likeness(self, drawings: np.ndarray) -> dict[str, float]:
        """How drawings differ from each other and from training images, without those that are blank."""
        from motet.data.tasks.drawn_digits import relative_novelty, relative_spread

        drawn, digits = drawings[self.wants_to_draw], self.digits[self.wants_to_draw]
        return {"spread": relative_spread(drawn, digits), "novelty": relative_novelty(drawn)}

    def shown(self, num: int) -> list[dict[str, str]]:
        """The first requests of different kinds, and the texts of their answers."""
        from motet.data.tasks.dial_a_digit import REQUESTS

        kinds = [content.request for content in self.contents]
        first = [kinds.index(request) for request in REQUESTS if request in kinds]
        return [
            {
                "question": self.contents[i].question,
                "right": str(self.contents[i].digit),
                "answer": self.answers[i],
            }
            for i in first[:num]
        ]

    def sheet(self, drawings: np.ndarray, *, num_each: int = 2) -> "Image":
        """A contact sheet: for each kind of request `num_each` drawings of every digit."""
        from motet.data.tasks.dial_a_digit import REQUESTS
        from motet.data.tasks.drawn_digits import contact_sheet

        right, rows = self.is_right(drawings), []
        for request, text in REQUESTS.items():
            chosen = []
            for digit in range(10):
                own = [i for i, c in enumerate(self.contents) if (c.request, c.digit) == (request, digit)]
                chosen += own[:num_each]
            if chosen:
                rows.append((text.format("..", ".."), drawings[chosen], right[chosen].tolist()))
        return contact_sheet(rows)

    def draw(self, *, guidance: float, num_steps: int, seed: int = 0) -> np.ndarray:
        """Drawings of all requests: [drawings, 8, 8] between 0 and 1. Where the answer has no place they are blank."""
        import torch

        from motet.data.tasks.dial_a_digit import SCAN_SIZE
        from motet.models.hub.drawing import draw

        shape = (len(self._prompts), self._generator.model.config.in_channels, SCAN_SIZE, SCAN_SIZE)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        drawn = draw(self._model, self._generator, self._prompts, noise, guidance=guidance, num_steps=num_steps)
        pixels: np.ndarray = ((drawn.mean(1).float().numpy() + 1) / 2).clip(0, 1)
        return pixels * self.wants_to_draw[:, None, None]
