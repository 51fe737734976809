"""The section `data` of the run file: the training data, by `data.kind`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from motet.config.section import Count, CountOrNever, Fraction, PositiveNumber, Section, TimeoutS


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


NumSamples = Annotated[int, Field(ge=1, le=100_000_000)]
"""Number of examples that a task makes; the order of an epoch is held in memory."""
Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class PreparedDataConfig(Section):
    """Keys of all kinds of data that can be trained on: how samples are prepared (docs/data-service.md)."""

    workers: Annotated[int, Field(ge=0, le=256)] = 1
    """Number of processes of each rank, or of a data server, that read, decode and tokenize; 0: a thread of the rank
    does this."""
    batches_ahead: Annotated[int, Field(ge=0, le=1000)] = 2
    """Number of global batches that are prepared in advance."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """What to do with a sample that cannot be prepared: stop the run, or leave the sample out of its batch and list it
    in `skipped_samples.jsonl`. With `skip`, all samples are decoded before their batch is assigned."""
    servers: Files = ()
    """Addresses of data servers, such as `grpc://host:8815` or `grpc+tls://host:8815`; empty: ranks prepare samples."""
    server_timeout_s: TimeoutS = 60.0
    """Seconds without an answer after which another server is asked, and after which the run ends if none answers."""
    token_file: str | None = None
    """File with the token of the data servers; null: the environment variable MOTET_DATA_TOKEN."""
    tls_roots: str | None = None
    """PEM file of the certificate authorities that sign the servers' certificates; null: the system's."""


class DialADigitConfig(PreparedDataConfig):
    """The task *dial a digit*, which needs no download."""

    kind: Literal["dial-a-digit"]
    """Selects these data."""
    seed: CountOrNever = 0
    """Seed of the examples."""
    max_digits: Annotated[int, Field(ge=1, le=8)] = 8
    """Maximum number of digits in one image and in one clip."""
    max_images: Annotated[int, Field(ge=1, le=64)] = 1
    """Maximum number of images in one example."""
    max_clips: Annotated[int, Field(ge=1, le=64)] = 1
    """Maximum number of clips in one example."""
    no_image: Fraction = 0.15
    """Share of examples without an image."""
    no_sound: Fraction = 0.15
    """Share of examples without a sound; together with `no_image` at most 1."""
    sum_questions: Fraction = 0.2
    """Share of questions that ask for the sum of all digits."""
    drawings: Fraction = 0.0
    """Share of examples that ask to draw a digit that is told, a sum, seen or heard; needs a generator of images of 8 x
    8 pixels."""
    num_train: NumSamples = 100_000
    """Number of examples in one epoch."""
    num_held_out: NumSamples = 1000
    """Number of held-out examples, in handwriting that is not trained on."""

    @model_validator(mode="after")
    def _leaves_something(self) -> "DialADigitConfig":
        if self.no_image + self.no_sound > 1:
            raise ValueError(f"no_image and no_sound are {self.no_image + self.no_sound} together; give at most 1")
        return self


class VideoConfig(Section):
    """Sampling of a video's frames, which are spread evenly from the first frame to the last."""

    fps: PositiveNumber | None = None
    """Number of frames per second; null: 1, unless `frames` is given."""
    frames: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of frames of every video, instead of `fps`; of a video with fewer frames, all are used."""
    max_frames: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Maximum number of frames of a video."""
    max_tokens: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Maximum number of tokens of a video in the language model; the number of frames is reduced to meet it. null: no
    limit."""

    @model_validator(mode="after")
    def _has_one_rule(self) -> "VideoConfig":
        if self.fps is not None and self.frames is not None:
            raise ValueError("fps and frames are both given; give one of them")
        return self


class FileLimits(Section):
    """Limits and checks of the files from which samples are read."""

    image_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = 100_000_000
    """Maximum number of pixels of an image or of a frame of a video; a decoded pixel takes 3 bytes. The upper limit is
    Pillow's."""
    audio_s: PositiveNumber = 7200.0
    """Maximum length of a clip in seconds."""
    audio_samples: Count = 2**28
    """Maximum number of audio samples of a clip, over all channels and also at the encoder's sampling rate; each takes
    4 bytes."""
    records_bytes: Count = 4 * 2**30
    """Maximum size of a JSON file in bytes; every rank holds its content in memory."""
    outside_folders: bool = False
    """Whether paths of media may leave their folder: absolute paths, paths with `..`, and links to other places."""
    repeated_ids: bool = False
    """Whether several samples may have the same id."""


USUAL_LIMITS = FileLimits()


class FilesConfig(PreparedDataConfig):
    """Keys of the kinds of data that are read from files."""

    files: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
    """One file or a list of files; for conversations also patterns such as `shards/*.tar`."""
    eval_files: Files = ()
    """Files of held-out samples."""
    image_folder: str = "."
    """Folder to which the paths of images are relative."""
    audio_folder: str = "."
    """Folder to which the paths of clips are relative."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; null: that of the language model, or of the text tower."""
    processors: dict[str, str] = {}
    """By encoder or tower, the hub id or folder of its image processor or feature extractor; if it is not given, that
    of the encoder's own folder."""
    seed: CountOrNever | None = None
    """Seed of the samples' order; null: `train.seed`."""
    limits: FileLimits = USUAL_LIMITS
    """Limits and checks of files."""


class ConversationsConfig(FilesConfig):
    """Conversations in the forms LLaVA, ShareGPT or messages (docs/data.md): JSON lines (or one JSON list) with media
    files beside them, WebDataset shards (`.tar`), or Parquet files."""

    kind: Literal["conversations"]
    """Selects these data."""
    video_folder: str = "."
    """Folder to which the paths of videos are relative."""
    media_folder: str = "."
    """Folder to which the paths of media of your own modalities (`motet.register_encoder`) are relative."""
    video: VideoConfig = VideoConfig()
    """Sampling of the frames of videos."""


class SameDigitsConfig(PreparedDataConfig):
    """A task for towers that needs no download: handwritten digits, the sound of dialling them and their names."""

    kind: Literal["same-digits"]
    """Selects these data."""
    seed: CountOrNever = 0
    """Seed of the examples."""
    min_digits: Annotated[int, Field(ge=1, le=8)] = 3
    """Minimum number of digits in one example."""
    max_digits: Annotated[int, Field(ge=1, le=8)] = 5
    """Maximum number of digits in one example."""
    num_train: NumSamples = 100_000
    """Number of examples in one epoch."""
    num_held_out: NumSamples = 1024
    """Number of held-out examples, in handwriting that is not trained on."""

    @model_validator(mode="after")
    def _has_a_range(self) -> "SameDigitsConfig":
        if self.max_digits < self.min_digits:
            raise ValueError(f"max_digits: is {self.max_digits}, less than min_digits {self.min_digits}")
        return self


class PairsConfig(FilesConfig):
    """Samples for towers, as JSON lines: `{"image": path, "audio": path, "text": "..."}`, with a key for the modality
    of each tower."""

    kind: Literal["pairs"]
    """Selects these data."""


Pixels = Annotated[int, Field(ge=1, le=100_000)]
NumItems = Annotated[int, Field(ge=1, le=10_000)]


class DescribedImagesConfig(Section):
    """Images of one size in every sample."""

    height: Pixels
    """Height in pixels, as the encoder's processor returns the images."""
    width: Pixels
    """Width in pixels."""
    count: NumItems = 1
    """Number in one sample."""


class DescribedSoundsConfig(Section):
    """Clips of one length in every sample."""

    seconds: Annotated[float, Field(gt=0, le=100_000)]
    """Length of one clip."""
    count: NumItems = 1
    """Number in one sample."""


class DescribedConfig(Section):
    """Samples described by their sizes, to plan and simulate without data. They cannot be trained on."""

    kind: Literal["described"]
    """Selects these data."""
    text_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 1024
    """Text tokens of each sample, all of which carry loss; for a text tower, the length of its sequence."""
    images: dict[str, DescribedImagesConfig] = {}
    """Images, by encoder."""
    sounds: dict[str, DescribedSoundsConfig] = {}
    """Sounds, by encoder."""
    generated: dict[str, DescribedImagesConfig] = {}
    """Sizes of generated images in pixels, by generator; generators work on latents with an eighth of the height and
    width. For generators of sounds: spectrograms of `height` mel bands and `width` frames, or codes of `height`
    codebooks and `width` frames."""
    num_train: NumSamples = 1_000_000
    """Number of samples in one epoch."""
