"""The run file's `data`: what is trained on. `data.kind` chooses among these."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from motet.config.section import CountOrNever, Fraction, PositiveNumber, Section


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


NumSamples = Annotated[int, Field(ge=1, le=100_000_000)]
"""Of a task that makes its own: an epoch's order of them stands in memory."""
Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class PreparedDataConfig(Section):
    """How samples are prepared, of every kind of data that can be trained on (docs/data-service.md)."""

    workers: CountOrNever = 1
    """Processes that read, decode and tokenize: for each rank, or of a data server. 0: a thread of the rank does it."""
    batches_ahead: CountOrNever = 2
    """Global batches that are prepared while others are trained on."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """What follows a sample that cannot be prepared: the end, or a batch without it, named in `skipped_samples.jsonl`;
    all samples are then decoded before their batch is cut."""
    servers: Files = ()
    """Addresses of data servers, such as `grpc://host:8815` or `grpc+tls://host:8815`; none: workers of the ranks."""
    server_timeout_s: PositiveNumber = 60.0
    """For which a data server may be silent before another is asked, and no server may answer before the run ends."""
    token_file: str | None = None
    """File with the secret that data servers ask for; null: the environment variable MOTET_DATA_TOKEN."""
    tls_roots: str | None = None
    """PEM file of the authorities that sign the servers' certificates; null: the system's."""


class DialADigitConfig(PreparedDataConfig):
    """The task *dial a digit*, which needs no download."""

    kind: Literal["dial-a-digit"]
    seed: CountOrNever = 0
    """Of the examples."""
    max_digits: Annotated[int, Field(ge=1, le=8)] = 8
    """In one image, and in one clip."""
    max_images: Annotated[int, Field(ge=1, le=64)] = 1
    """In one example."""
    max_clips: Annotated[int, Field(ge=1, le=64)] = 1
    """In one example."""
    no_image: Fraction = 0.15
    """Share of examples without an image."""
    no_sound: Fraction = 0.15
    """Share of examples without a sound; with `no_image` at most 1."""
    sum_questions: Fraction = 0.2
    """Share of questions for the sum of all digits."""
    num_train: NumSamples = 100_000
    """Examples in one epoch."""
    num_held_out: NumSamples = 1000
    """Examples in handwriting that is never trained on."""

    @model_validator(mode="after")
    def _leaves_something(self) -> "DialADigitConfig":
        if self.no_image + self.no_sound > 1:
            raise ValueError(f"no_image and no_sound are {self.no_image + self.no_sound} together; give at most 1")
        return self


class ConversationsConfig(PreparedDataConfig):
    """Conversations in the LLaVA form: JSON lines (or one JSON list) with image and audio files beside them, WebDataset
    shards (`.tar`), or Parquet files."""

    kind: Literal["conversations"]
    files: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
    """One file or several; patterns such as `shards/*.tar` too."""
    eval_files: Files = ()
    """Held-out conversations."""
    image_folder: str = "."
    """What the images' paths are relative to."""
    audio_folder: str = "."
    """What the clips' paths are relative to."""
    tokenizer: str | None = None
    """Hub id or folder; null: beside the language model."""
    processors: dict[str, str] = {}
    """For each encoder, hub id or folder of its image processor or feature extractor; not given: beside the encoder."""
    seed: CountOrNever = 0
    """Of the order of the conversations."""


class SameDigitsConfig(PreparedDataConfig):
    """A task for towers that needs no download: handwritten digits, the sound of dialling them, and their names."""

    kind: Literal["same-digits"]
    seed: CountOrNever = 0
    """Of the examples."""
    min_digits: Annotated[int, Field(ge=1, le=8)] = 3
    """In one example."""
    max_digits: Annotated[int, Field(ge=1, le=8)] = 5
    """In one example."""
    num_train: NumSamples = 100_000
    """Examples in one epoch."""
    num_held_out: NumSamples = 1024
    """Examples in handwriting that is never trained on."""

    @model_validator(mode="after")
    def _has_a_range(self) -> "SameDigitsConfig":
        if self.max_digits < self.min_digits:
            raise ValueError(f"max_digits: is {self.max_digits}, less than min_digits {self.min_digits}")
        return self


class PairsConfig(PreparedDataConfig):
    """Samples for towers, as JSON lines: `{"image": path, "audio": path, "text": "..."}`, one key for each tower's
    modality."""

    kind: Literal["pairs"]
    files: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
    """One file or several."""
    eval_files: Files = ()
    """Held-out samples."""
    image_folder: str = "."
    """What the images' paths are relative to."""
    audio_folder: str = "."
    """What the clips' paths are relative to."""
    tokenizer: str | None = None
    """Hub id or folder; null: beside the text tower."""
    processors: dict[str, str] = {}
    """For each tower of images or sounds, hub id or folder of its processor; not given: beside the tower."""


Pixels = Annotated[int, Field(ge=1, le=100_000)]
NumItems = Annotated[int, Field(ge=1, le=10_000)]


class DescribedImagesConfig(Section):
    """Images of one size in every sample."""

    height: Pixels
    """In pixels, as the encoder's processor returns them."""
    width: Pixels
    """In pixels."""
    count: NumItems = 1
    """In one sample."""


class DescribedSoundsConfig(Section):
    """Clips of one length in every sample."""

    seconds: Annotated[float, Field(gt=0, le=100_000)]
    """Of one clip."""
    count: NumItems = 1
    """In one sample."""


class DescribedConfig(Section):
    """Samples by their sizes alone: to plan and to simulate without data. They cannot be trained on."""

    kind: Literal["described"]
    text_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 1024
    """Of each sample; all carry loss. Of a text tower: its sequence."""
    images: dict[str, DescribedImagesConfig] = {}
    """By encoder."""
    sounds: dict[str, DescribedSoundsConfig] = {}
    """By encoder."""
    generated: dict[str, DescribedImagesConfig] = {}
    """By generator: the images that it makes, in pixels; it works on latents of an eighth of each side."""
    num_train: NumSamples = 1_000_000
    """Samples in one epoch."""
