"""A corpus of wrong inputs, each with the line that refuses it.

`tests/test_wrong_inputs.py` gives each to the command line within its own process, and in campaigns to a process of its
own. The right run file trains an image and a sound encoder with a language model on conversations in files.
"""

import json
import math
import os
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import yaml
from PIL import Image
from pydantic import BaseModel
from tiny_run import TINY_RUN
from training import run_config
from transformers import WhisperFeatureExtractor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from motet.data.chat import word_level_tokenizer


@dataclass(frozen=True)
class WrongInput:
    name: str
    expected: str
    """Regular expression that is found in the line."""
    text: str | None = None
    """The run file; None: the right one on conversations."""
    overrides: tuple[str, ...] = ()
    change: Callable[[Path], object] = lambda folder: None
    """What is done to the right files."""

    def __str__(self) -> str:
        return self.name


SEEN = {"id": "seen", "image": "cat.png", "conversations": [["human", "<image> What is it?"], ["gpt", "A cat."]]}
HEARD = {"id": "heard", "audio": "meow.wav", "conversations": [["human", "What is it? <audio>"], ["gpt", "A meow."]]}


def write_right_files(folder: Path) -> Path:
    """The right run file and all that it names, in a folder of their own."""
    word_level_tokenizer(["What is it? A cat. A meow."]).save_pretrained(folder / "tokenizer")
    SiglipImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder / "vision")
    WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=320, n_fft=400).save_pretrained(
        folder / "audio"
    )
    (folder / "media").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 50, 3), np.uint8)).save(folder / "media/cat.png")
    soundfile.write(folder / "media/meow.wav", np.sin(np.arange(8000) / 10), 16000)
    (folder / "elsewhere.png").write_bytes((folder / "media/cat.png").read_bytes())
    write_records(folder, SEEN, HEARD)
    values = {
        **TINY_RUN,
        "data": {
            "kind": "conversations",
            "files": "train.jsonl",
            "image_folder": "media",
            "audio_folder": "media",
            "tokenizer": "tokenizer",
            "processors": {"vision": "vision", "audio": "audio"},
        },
        "train": {"steps": 1, "global_batch_size": 2, "output": "output"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder


def write_records(folder: Path, *records: Mapping[str, Any]) -> None:
    lines = []
    for record in records:
        turns = [{"from": speaker, "value": text} for speaker, text in record["conversations"]]
        lines.append(json.dumps({**record, "conversations": turns}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


RIGHT = run_config(Path("run"), train__failures={})
RIGHT_VALUES: dict[str, Any] = json.loads(RIGHT.model_dump_json(exclude_unset=True))
TEXTS = {
    "deeply nested": ("model: " + "[" * 50_000, "nested more than 50 deep"),
    "nested": ("model: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
    "a date that is none": ("train: {steps: 2026-13-45}", "'2026-13-45' is no timestamp"),
    "a word as a whole number": ("train: {steps: !!int frobnicate}", "'frobnicate' is no int"),
    "a word as a number": ("train: {eps: !!float frobnicate}", "'frobnicate' is no float"),
    "a word as a truth": ("train: {overwrite: !!bool frobnicate}", "'frobnicate' is no bool"),
    "a word as a date": ("train: {steps: !!timestamp frobnicate}", "'frobnicate' is no timestamp"),
    "bytes that are none": ("train: {steps: !!binary frobnicate!}", "failed to decode base64 data"),
    "5000 digits": ("train: {steps: " + "9" * 5000 + "}", "is no int"),
    "a value in itself": ("model: &a [*a]", "a value contains itself"),
    "a mapping in itself": ("model: &a {b: *a}", "a value contains itself"),
    "an alias bomb": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
        "more than 200000 values",
    ),
    "an object of Python": ("model: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a key that stands twice": ("train: {steps: 1, steps: 2}", "key 'steps' stands twice"),
    "a list as a key": ("? [a]\n: 1", "a key must be a word"),
    "an unknown alias": ("model: *nowhere", "undefined alias"),
    "two documents": ("model: 1\n---\nmodel: 2", "found another document"),
    "nothing": ("", "is not a mapping"),
    "a list": ("- model", "is not a mapping"),
    "a tab": ("train:\n\tsteps: 1", "cannot start any token"),
    "a character of no text": ('train: {output: "a\\0b"}', "a text holds U\\+0000"),
    "half a character": ('train: {output: "\\ud800"}', "a text holds U\\+D800"),
    "a control character": ("train: \x00", "is not YAML|special characters"),
    "no end": ("train: {steps: 1", "expected ',' or '}'"),
    "100 MB": ("x" * (5 * 2**20), "is larger than 4 MiB"),
}
VALUES = {
    "train.learning_rate": (1e300, -1, 0, "fast", None, [1]),
    "train.weight_decay": (1e300, -1),
    "train.betas": ([1, 0.9], [0.9, 1], [0.9], [-0.1, 0.9], "ab"),
    "train.steps": (0, -1, 1.5, "many", 10**30 * -1, True),
    "train.keep_checkpoints": (0, -1, "all"),
    "train.global_batch_size": (0, -8, 0.5),
    "train.failures.detect_s": (0, -1, "soon", 1e300),
    "train.failures.store_patience_s": (0, 1e300),
    "train.step_timeout_s": (0, 1e300),
    "train.failures.slow_ratio": (1, 0, "slow"),
    "train.eps": (0, -1e-8),
    "train.output": ("",),
    "model.language_model.train.lora.rank": (0, 10**9),
    "cluster.num_devices": (0, -1, "all"),
    "cluster.device": ("gpu", "tpu", 1),
    "parallel.planner": ("best", 1),
    "parallel.num_microbatches": (0, -1),
    "model.language_model.learning_rate": (1e300, 0, -1),
    "data.kind": ("nothing", 1),
    "data.workers": (-1, 100_000, "all"),
    "data.batches_ahead": (-1, 10**6),
}


def keys_of(model: BaseModel | Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Paths of all keys that a run file's sections have, and whether each is a section itself."""
    for name in type(model).model_fields:
        inner = getattr(model, name)
        yield (*path, name), isinstance(inner, BaseModel)
        if isinstance(inner, BaseModel):
            yield from keys_of(inner, (*path, name))


def _with_value(path: tuple[str, ...], value: object) -> str:
    values = json.loads(json.dumps(RIGHT_VALUES))
    at = values
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    return yaml.dump(values, Dumper=yaml.CSafeDumper)


def _of_run_files() -> Iterator[WrongInput]:
    for name, (text, expected) in TEXTS.items():
        yield WrongInput(name, expected, text)
    keys = list(keys_of(RIGHT))
    for section in [(), *(path for path, is_section in keys if is_section)]:
        key = ".".join((*section, "frobnicate"))
        text = _with_value((*section, "frobnicate"), 3)
        yield WrongInput(f"misspelt {key}", re.escape(f"{key}: is not a known key"), text)
    for path in (path for path, _ in keys if path[-1] != "values"):
        for value in ({"frobnicate": {"x": 3}}, [[[1]]]):
            key = ".".join(path)
            yield WrongInput(f"{key} a {type(value).__name__}", f": {re.escape(key)}", _with_value(path, value))
    for key, values in VALUES.items():
        for value in values:
            text = _with_value(tuple(key.split(".")), value)
            yield WrongInput(f"{key} {value}"[:60], f": {re.escape(key)}", text)
    for value in ("&a [*a]", "[" * 9999, "2026-13-45", "!!int x", "9" * 5000, "{", "&a", "*a", "\x07"):
        yield WrongInput(f"--set {value}"[:40], "", overrides=(f"train.steps={value}",))

    for key in ("costs", "speeds", "catalogue"):
        expected = "/dev/zero.*(File too large|is larger than 4 MiB)"
        yield WrongInput(f"{key}: /dev/zero", expected, overrides=(f"cluster.{key}=/dev/zero",))


def _of_models() -> Iterator[WrongInput]:
    language = "model.language_model.values"
    vision, audio = (f"model.encoders.{name}.values" for name in ("vision", "audio"))
    for key, value, expected in (
        (f"{language}.frobnicate", 3, "frobnicate: is not a known key"),
        (f"{language}.num_hiden_layers", 2, "num_hiden_layers: is not a known key; did you mean 'num_hidden_layers'"),
        (f"{language}.layers", 2, "layers: is not a known key"),
        (f"{language}.num_layers", 2, "num_layers: is not a known key; did you mean 'num_hidden_layers'"),
        (f"{language}.hidden_dim", 2, "hidden_dim: is not a known key"),
        (f"{language}.trust_remote_code", "true", "trust_remote_code: is not a known key"),
        (f"{language}.auto_map", "{AutoModel: x--y.Z}", "auto_map: is not a known key"),
        (f"{language}.hidden_act", "nope", "hidden_act: is 'nope'; give one of gelu"),
        (f"{language}.hidden_act", "sillu", "hidden_act: is 'sillu'; did you mean 'silu'"),
        (f"{language}.hidden_act", 3, "hidden_act: is 3"),
        (f"{language}.quantization_config", "{load_in_8bit: true}", "quantization_config: quantized weights cannot"),
        (f"{language}.partial_rotary_factor", 7, "partial_rotary_factor: is (not a known key|7)"),
        (f"{language}.rope_theta", -1, "rope_theta: is -1; give a number above 0"),
        (f"{language}.rope_theta", 0, "rope_theta: is 0; give a number above 0"),
        (f"{language}.rope_theta", ".inf", "rope_theta: is (inf|'inf'|'Infinity'|None)"),
        (f"{language}.rope_theta", "big", "rope_theta: is 'big'; give a number above 0"),
        (f"{language}.rope_parameters", "{rope_type: nope}", "rope_parameters.rope_type: is 'nope'; give one of"),
        (f"{language}.rope_parameters", "{rope_theta: -5}", "rope_parameters.rope_theta: is -5"),
        (f"{language}.rope_scaling", "{rope_type: linear, factor: 0}", "rope_scaling.factor: is 0"),
        (f"{language}.rope_scaling", "5", "rope_scaling: is 5; give a mapping"),
        (
            f"{language}.rope_scaling",
            "{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 0}",
            "original_max_position_embeddings: is 0; give a number above 0",
        ),
        (f"{language}.dtype", "nope", "model.language_model.values: .*nope"),
        (language, "{'': 2}", "values.: is not a known key"),
        (language, "{'a b': 2}", "values.a b: is not a known key"),
        (f"{language}.rms_norm_eps", -1.0, "rms_norm_eps: is -1.0; give a number above 0"),
        (f"{language}.rms_norm_eps", "small", "rms_norm_eps: is 'small'"),
        (f"{language}.attention_dropout", 7.0, "attention_dropout: is 7.0; give at least 0 and less than 1"),
        (f"{language}.attention_dropout", -0.5, "attention_dropout: is -0.5"),
        (f"{language}.initializer_range", -1.0, "initializer_range: is -1.0; give at least 0"),
        (f"{language}.num_hidden_layers", 0, "num_hidden_layers: is 0; give a whole number of at least 1"),
        (f"{language}.num_hidden_layers", -3, "num_hidden_layers: is -3"),
        (f"{language}.num_hidden_layers", 2.5, "num_hidden_layers: is 2.5"),
        (f"{language}.num_hidden_layers", 10**9, "num_hidden_layers: is 1000000000; give at most 10000"),
        (f"{language}.hidden_size", "wide", "hidden_size: is 'wide'"),
        (f"{language}.vocab_size", 10**12, "vocab_size: is 1000000000000; give at most"),
        (f"{language}.pad_token_id", -7, "pad_token_id: is -7; give null or a token of the vocabulary, 0 to "),
        (f"{language}.bos_token_id", 99999999, "bos_token_id: is 99999999; give null or a token of the vocabulary"),
        (f"{language}.eos_token_id", "[1, 99999999]", r"eos_token_id: is \[1, 99999999\]; give null or a token"),
        (f"{language}.eos_token_id", "[]", r"eos_token_id: is \[\]; give null or a token"),
        (f"{language}.bos_token_id", "first", "bos_token_id: is 'first'; give null or a token"),
        (f"{audio}.pad_token_id", -7, "pad_token_id: is -7; give null or a token"),
        (f"{language}.tie_word_embeddings", "maybe", "tie_word_embeddings"),
        (f"{language}.num_key_value_heads", 3, "3 heads of keys do not divide"),
        (f"{vision}.hidden_act", "nope", "vision.values.hidden_act: is 'nope'"),
        (f"{vision}.layer_norm_eps", 0.0, "layer_norm_eps: is 0.0; give a number above 0"),
        (f"{vision}.patch_sice", 16, "patch_sice: is not a known key; did you mean 'patch_size'"),
        (f"{vision}.frobnicate", "{a: 1}", "vision.values.frobnicate: is not a known key"),
        (f"{vision}.image_size", 0, "image_size: is 0"),
        (f"{vision}.num_channels", 7, "its processor makes 3 channels, but model.encoders.vision takes 7"),
        (f"{audio}.num_mel_bins", 32, "its processor makes 16 mel bins, but model.encoders.audio takes 32"),
        (f"{audio}.activation_function", "nope", "activation_function: is 'nope'"),
        (f"{audio}.dropout", 1.0, "dropout: is 1.0; give at least 0 and less than 1"),
        (f"{audio}.encoder_layer", 2, "encoder_layer: is not a known key; did you mean 'encoder_layers'"),
    ):
        yield WrongInput(f"{key}={value}", expected, overrides=(f"{key}={value}",))
    stored = {"model_type": "llama", "auto_map": {"AutoConfig": "evil.Evil"}}
    for name, text, expected in (
        ("no JSON", "{", "is not JSON"),
        ("a list", "[]", "is not a mapping"),
        ("nested JSON", "[" * 100_000, "is not JSON"),
        ("an unknown type", '{"model_type": "frobnicate"}', "'frobnicate' is not known"),
        ("a type of foreign code", json.dumps({**stored, "model_type": "evil"}), "'evil' is not known"),
    ):
        yield WrongInput(
            f"config.json: {name}",
            expected,
            overrides=("model.language_model={path: stored}",),
            change=lambda folder, text=text: _write(folder / "stored/config.json", text),
        )


def _of_samples() -> Iterator[WrongInput]:
    def with_record(**changes: object) -> Callable[[Path], None]:
        return lambda folder: write_records(folder, SEEN | changes, HEARD)

    def write(path: str, content: bytes | str) -> Callable[[Path], None]:
        return lambda folder: _write(folder / path, content)

    outside = "leaves image_folder media; give the folder that holds it"
    yield WrongInput("an image above its folder", outside, change=with_record(image="../elsewhere.png"))
    yield WrongInput("an image by a detour", outside, change=with_record(image="../media/cat.png"))
    yield WrongInput(
        "an absolute image",
        outside,
        change=lambda folder: write_records(folder, SEEN | {"image": str(folder / "elsewhere.png")}, HEARD),
    )

    def link_file(folder: Path) -> None:
        (folder / "media/link.png").symlink_to(folder / "elsewhere.png")
        write_records(folder, SEEN | {"image": "link.png"}, HEARD)

    def link_folder(folder: Path) -> None:
        (folder / "media/up").symlink_to(folder)
        write_records(folder, SEEN | {"image": "up/elsewhere.png"}, HEARD)

    yield WrongInput("a link to an image elsewhere", outside, change=link_file)
    yield WrongInput("a linked folder", outside, change=link_folder)
    yield WrongInput("/etc/passwd as an image", outside, change=with_record(image="/etc/passwd"))
    yield WrongInput("/dev/zero as an image", "there is no such file", change=with_record(image="/dev/zero"))
    yield WrongInput("an address as an image", "nothing is downloaded", change=with_record(image="http://x/y.png"))
    yield WrongInput("a data URL that is none", "is not base64", change=with_record(image="data:image/png;base64,@"))
    yield WrongInput("an id that is a list", r"train.jsonl:1: id: is \[1\]; give a text", change=with_record(id=[1]))
    yield WrongInput("an id that is NaN", "train.jsonl:1: id: is nan; give a text", change=with_record(id=math.nan))
    yield WrongInput(
        "an id twice",
        "train.jsonl:2: id 'heard' stands at train.jsonl:1 too; give each sample its own",
        change=with_record(id="heard"),
    )
    for name, content, expected in (
        ("2 GHz", _wav(rate=2 * 10**9), "2000000000 samples per second"),
        ("almost 2 GHz", _wav(rate=1_999_999_999), "1999999999 samples per second"),
        ("0 Hz", _wav(rate=0), "meow.wav: (cannot be read as a sound|has 0 samples)"),
        ("no channel", _wav(channels=0), "cannot be read as a sound"),
        ("cut short", _wav()[:4000], r"is truncated, 4000 of \d+ bytes; replace the clip"),
        ("one byte short", _wav()[:-1], "is truncated"),
        ("a header alone", _wav()[:44], "is truncated|is an empty clip"),
        ("half a header", _wav()[:20], "cannot be read as a sound"),
        ("nothing", b"", "cannot be read as a sound"),
        ("3 hours", _wav(rate=1, frames=3 * 3600), "lasts 10800 s; .*data.limits.audio_s .7200."),
    ):
        yield WrongInput(f"WAV: {name}", expected, change=write("media/meow.wav", content))
    for name, content, expected in (
        ("13,000 x 13,000", _png(13_000, 13_000), "has 13000 x 13000 pixels; .*data.limits.image_pixels .100000000."),
        ("10 GP", _png(100_000, 100_000), "is refused|pixels"),
        ("0 x 0", _png(0, 0), "cat.png: (is no image|is refused|has no pixels)"),
        ("half a header", _png(10, 10)[:20], "is no image that Pillow reads|is refused"),
        ("nothing", b"", "is no image that Pillow reads"),
        ("text", "no picture", "is no image that Pillow reads"),
    ):
        yield WrongInput(f"PNG: {name}", expected, change=write("media/cat.png", content))
    for key, value, expected in (
        ("image_pixels", 10, "has 60 x 50 pixels; .*image_pixels .10."),
        ("audio_s", 0.1, "lasts 0.5 s"),
        ("audio_samples", 100, "has 8000 samples, 0.5 s"),
        ("records_bytes", 10, r"has \d+ bytes; split it into several files"),
        ("image_pixels", 10**9, "image_pixels: is 1000000000; give a whole number at least 1 and at most 178956970"),
        ("audio_s", -1, "audio_s: is -1"),
        ("outside_folders", "sometimes", 'outside_folders: is "sometimes"; give true or false'),
    ):
        yield WrongInput(f"data.limits.{key}={value}", expected, overrides=(f"data.limits.{key}={value}",))
    for name, content, expected in (
        ("no JSON", "{", "train.jsonl:1: is not JSON"),
        ("nested", "[" * 100_000, "train.jsonl: is not JSON"),
        ("nested mappings", '{"a":' * 100_000, "train.jsonl:1: is not JSON"),
        ("5000 digits", '{"id": ' + "9" * 5000 + "}", "train.jsonl:1: is not JSON"),
        ("a list of numbers", "[1, 2]", "record 0: is not a mapping"),
        ("a number", "7", "train.jsonl:1: is not a mapping"),
        ("nothing", "", "no conversation in it"),
        ("bytes", b"\xff\xfe\x00\x01", "is not UTF-8 text"),
        ("an image list in a list", '{"image": [["x"]], "conversations": []}', "image: is \\['x'\\]; give a path"),
        (
            "half a character",
            json.dumps({"conversations": [{"from": "human", "value": "\ud800"}]}),
            "an unpaired surrogate",
        ),
        ("no turns", '{"conversations": "none"}', "conversations: is missing or empty"),
        ("turns of numbers", '{"conversations": [1, 2]}', r"conversations\[0\]: is not a turn"),
        ("a role of a list", '{"conversations": [{"from": ["human"], "value": "x"}]}', "from: is \\['human'\\]; give"),
    ):
        yield WrongInput(f"records: {name}", expected, change=write("train.jsonl", content))
    for file, expected in (
        ("/dev/zero", "/dev/zero: is not a regular file"),
        (".", ": is not a regular file"),
        ("nothing.jsonl", "cannot be read"),
        ("pipe", "pipe: is not a regular file"),
        ("'*.nothing'", "no file matches this pattern"),
        ("cat.tar", "cannot be read as a tar file"),
        ("cat.parquet", "cannot be read as Parquet"),
    ):
        yield WrongInput(f"files: {file}", expected, overrides=(f"data.files={file}",), change=_odd_files)


def _of_tools() -> Iterator[WrongInput]:
    def processor(name: str, **changes: object) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            path = folder / name / "preprocessor_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

        return change

    for name, changes, expected in (
        ("vision", {"image_std": [0.5, 0.0, 0.5]}, "vision.*: image_std holds 0.0; give numbers above 0"),
        ("vision", {"image_std": 0}, "image_std holds 0; give"),
        ("vision", {"image_std": [-1, 1, 1]}, "image_std holds -1; give"),
        ("vision", {"image_std": ["x"]}, "image_std holds 'x'; give"),
        ("vision", {"image_std": [float("nan")] * 3}, "image_std holds nan; give"),
        ("vision", {"rescale_factor": 0}, "rescale_factor holds 0; give"),
        ("vision", {"rescale_factor": float("inf")}, "rescale_factor holds inf; give"),
        ("audio", {"sampling_rate": 0}, "sampling_rate holds 0; give"),
        ("audio", {"sampling_rate": "fast"}, "sampling_rate holds 'fast'; give"),
        ("audio", {"hop_length": -1}, "hop_length holds -1; give"),
        ("audio", {"n_fft": 0}, "n_fft holds 0; give"),
    ):
        yield WrongInput(f"processor: {changes}", expected, change=processor(name, **changes))
    for name, content in (
        ("no JSON", "{"),
        ("a list", "[]"),
        ("nothing", "{}"),
        ("text", "text"),
        ("no model", '{"version": "1.0"}'),
        ("nested", "[" * 10_000),
        ("an unknown model", '{"version": "1.0", "model": {"type": "Frobnicate"}}'),
    ):
        yield WrongInput(
            f"tokenizer.json: {name}",
            "data.tokenizer: tokenizer cannot be loaded",
            change=lambda folder, content=content: _write(folder / "tokenizer/tokenizer.json", content),
        )
    for name, content in (("no JSON", "{"), ("a list", "[]")):
        yield WrongInput(
            f"preprocessor_config.json: {name}",
            "data.processors.vision: .*(cannot be read|is not a mapping)",
            change=lambda folder, content=content: _write(folder / "vision/preprocessor_config.json", content),
        )
    yield WrongInput("a tokenizer of foreign code", "data.tokenizer: tokenizer cannot be loaded", change=_foreign_code)


def _foreign_code(folder: Path) -> None:
    """A tokenizer that only code in its folder can load, which would leave the file `executed`."""
    (folder / "tokenizer/tokenizer.json").unlink()
    values = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    _write(folder / "tokenizer/tokenizer_config.json", json.dumps(values))
    _write(folder / "tokenizer/evil.py", f"open({str(folder / 'executed')!r}, 'w').close()\nclass Evil: ...\n")
    _write(folder / "tokenizer/config.json", json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.E"}}))


def _odd_files(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    _write(folder / "cat.tar", "no shard")
    _write(folder / "cat.parquet", "no table")


def _write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _wav(*, rate: int = 16_000, frames: int = 8000, channels: int = 1) -> bytes:
    """A WAV file of zeros."""
    data = bytes(2 * frames * max(channels, 1))
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels % 2**32, 2 * channels, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _png(height: int, width: int) -> bytes:
    """A PNG file whose header promises pixels that it does not hold."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def _drawn() -> Iterator[WrongInput]:
    """Run files with a few characters changed, of which those stand here that are wrong."""
    rng = random.Random(0)
    right = yaml.safe_dump(RIGHT_VALUES)
    for number in range(60):
        at = rng.randrange(len(right))
        cut = rng.choice(["[", "{", "}", ": :", "!!", "&", "*", "'", '"', "\x01", "- -"])
        yield WrongInput(f"drawn {number}", "", right[:at] + "\n" + cut + "\n" + right[at:])


CORPUS = (*_of_run_files(), *_of_models(), *_of_samples(), *_of_tools(), *_drawn())
