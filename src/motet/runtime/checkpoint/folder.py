"""A folder of checkpoints: creates them atomically, lists them and checks that they are complete.

    checkpoints/
        step_00000120/      shards in safetensors, and checkpoint.json with every shard's size and SHA-256, and its own
        step_00000140.tmp/  being written or deleted; never read
        latest, best        symbolic links to a checkpoint

A checkpoint is complete when its folder has lost `.tmp`. What is replaced is moved aside first, so a crash at any
moment leaves the last good one. Checkpoints are ordered by the step in their names, never by the times of their files.
What is damaged or has no `checkpoint.json` is neither counted among those that are kept nor deleted.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.config import PartConfig, RunConfig
from motet.errors import UserError
from motet.families.configured_graph import read_graph
from motet.families.discovery.composite import read_composite_config
from motet.models.from_run_file import KIND_OF, media_attention_of
from motet.models.materialize import read_part_config
from motet.plan import LANGUAGE_MODEL

# Files that exist whole or not at all, also if a process is killed while it writes them.


def write_atomically(path: Path, text: str) -> None:
    """Replaces what there is. Its folder must be there; until it is complete, it is a hidden file beside it.

    Limits: a power failure may still cut it short (it is not synced), and two must not write the same file at once."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    partial.replace(path)


MANIFEST = "checkpoint.json"
PARTIAL = ".tmp"
REPLACED = ".old"
_NAME = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")


@dataclass(frozen=True)
class TrainingState:
    """The contents of a checkpoint besides the tensors of model and optimizer."""

    step: int
    """Number of finished steps."""
    data: dict[str, Any]
    """The loader's state."""
    plan: str
    """The plan's JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Values that determine what the model computes (`computation_of`); empty in old checkpoints."""


@dataclass(frozen=True)
class FileRecord:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    state: TrainingState
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        files = {name: vars(record) for name, record in self.files.items()}
        content = {"state": vars(self.state), "files": files}
        return json.dumps({**content, "sha256": _sha256_of(content)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Raises `ValueError`, `KeyError` or `TypeError` if the text is not what `to_json` writes."""
        document = json.loads(text)
        if document.pop("sha256") != _sha256_of(document):
            raise ValueError("its checksum is wrong")
        files = {name: FileRecord(**record) for name, record in document["files"].items()}
        return Manifest(TrainingState(**document["state"]), files)


def begin(final: Path) -> Path:
    """Makes an empty folder to write the checkpoint `final` into."""
    partial = final.with_name(final.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def complete(partial: Path, final: Path, manifest: Manifest, *, is_best: bool, keep: int) -> None:
    """Makes what was written into `partial` the checkpoint `final`, and deletes the ones before it, but for the last
    `keep` (itself included) and the best. Later steps were there when this training began, damaged, and stay.

    Whatever other partial checkpoint is in the folder was left by a crash, and is deleted too."""
    _write_to_disk(partial / MANIFEST, manifest.to_json())
    _flush(partial)
    replaced = final.with_name(final.name + REPLACED)
    if _looks_whole(replaced):  # Left by a crash; what has the name may be damaged.
        delete_checkpoints([final] if final.exists() else [])
    elif final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _flush(final.parent)
    try:
        _link(final.parent / "latest", final.name)
        if is_best:
            _link(final.parent / "best", final.name)
        _delete_before(final, keep)
    except OSError as error:  # The new one is complete all the same.
        told = f"{error.filename2 or error.filename or final.parent} cannot be deleted ({error.strerror or error})"
        print(f"train.output: {told}; training goes on", file=sys.stderr, flush=True)


def abandon(partial: Path) -> None:
    """Deletes a checkpoint that could not be completed."""
    shutil.rmtree(partial, ignore_errors=True)


def _delete_before(newest: Path, keep: int) -> None:
    folder, last_step = newest.parent, step_of(newest)
    best = (folder / "best").resolve()
    earlier = [path for path in find_checkpoints(folder) if step_of(path) <= last_step]
    whole = [path for path in earlier if _looks_whole(path)]
    superseded = [path for path in whole if path.name.endswith(REPLACED) and path.with_suffix("") in whole]
    surplus = [path for path in whole if path not in superseded][:-keep]
    delete_checkpoints([*superseded, *(path for path in surplus if path.resolve() != best)])
    for path in folder.glob(f"step_*{PARTIAL}"):
        if _NAME.fullmatch(path.name.removesuffix(PARTIAL)):
            _delete(path)


def _delete(path: Path) -> None:
    """Deletes a folder. Of a link only itself, as what it leads to is not this folder's."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _looks_whole(checkpoint: Path) -> bool:
    """Whether the manifest is complete and the files have their sizes. Contents are not read."""
    try:
        records = read_manifest(checkpoint).files.items()
        return all((checkpoint / name).stat().st_size == record.num_bytes for name, record in records)
    except (UserError, OSError):
        return False


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints that are not being written or deleted, by step, smallest first; they may be damaged."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    # One that is about to be replaced comes before the one that replaces it.
    return sorted(found, key=lambda path: (step_of(path), not path.name.endswith(REPLACED)))


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a checkpoint that `find_checkpoints` lists."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def delete_checkpoints(checkpoints: Iterable[Path]) -> None:
    """Deletes checkpoints such that a crash leaves none that is half deleted and looks complete."""
    for path in checkpoints:
        partial = path.with_name(path.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        path.rename(partial)
        _delete(partial)


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises `UserError` if it is missing or damaged, or if it is of another step than the folder's name says."""
    try:
        if not (checkpoint / MANIFEST).is_file():  # Reading a pipe would not end.
            raise FileNotFoundError
        manifest = Manifest.from_json((checkpoint / MANIFEST).read_text())
        if _NAME.fullmatch(checkpoint.name) and manifest.state.step != step_of(checkpoint):
            raise ValueError(f"it states step {manifest.state.step}")
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"train.resume: {checkpoint} is not a checkpoint: {MANIFEST} is missing; give another, or latest"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"train.resume: {checkpoint / MANIFEST} is damaged ({error}); use another checkpoint") from None


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Returns size and checksum of files, after flushing them to disk."""
    return {name: FileRecord((folder / name).stat().st_size, _sha256(folder / name, flush=True)) for name in names}


def check_files(checkpoint: Path, records: Iterable[tuple[str, FileRecord]]) -> None:
    """Raises `UserError` naming the file that is missing, cut short or changed."""
    for name, expected in records:
        path = checkpoint / name
        if not path.is_file():
            raise UserError(f"train.resume: {path} is missing; use another checkpoint")
        size = path.stat().st_size
        if size != expected.num_bytes:
            wrong = "cut short" if size < expected.num_bytes else "too long"
            raise UserError(
                f"train.resume: {path} is {wrong}: {size} of {expected.num_bytes} bytes; use another checkpoint"
            )
        if _sha256(path) != expected.sha256:
            raise UserError(f"train.resume: {path} has changed since it was written; use another checkpoint")


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Raises `UserError` if the file system of `folder` has less than `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"train.output: no space for a checkpoint in {folder}: those that are kept take "
            f"{num_bytes / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free; choose another folder, fewer "
            "train.keep_checkpoints or train.checkpoint_every: 0"
        )


def _sha256_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path, *, flush: bool = False) -> str:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_to_disk(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(link: Path, target: str) -> None:
    """Replaces the link atomically."""
    partial = link.with_name(link.name + PARTIAL)
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)


# The keys of a run file's model that a checkpoint stores, so that a run that computes something else cannot resume it.
#
# Shapes and names of parameters do not show everything: a `feature_layer`, the number of heads, the base of rotary
# positions. So a checkpoint holds the run file's `model` and the whole transformers configuration of each part, flat,
# by key. What another value of a key may do is one of three:
#
# * nothing, or nothing any more: where weights come from, how they were drawn, names and versions; these are left out;
# * train otherwise: frozen parts, weights of losses, dropout, the placeholder tokens of items; this is reported; *
# compute something else: all others; this is refused.
#
# Limits: keys that only one side has, as other versions of motet and transformers do, are not compared.


Values = Mapping[str, Any]
"""Values by key, such as `model.encoders.vision.values.hidden_act`."""

SOURCE_KEYS = frozenset(PartConfig.model_fields) | {"projector_learning_rate", "queries_learning_rate", "part"}
"""Keys of a part in the run file: its source and its learning rates."""
NAME_KEYS = {"_name_or_path", "architectures", "transformers_version", "problem_type", "id2label", "label2id", "dtype"}
GENERATION_KEYS = {"use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder"}
INITIALIZATION_KEYS = {
    "initializer_range",
    "initializer_factor",
    "init_std",
    "init_xavier_std",
    "logit_scale",
    "logit_bias",
}
SEEN_IN_PARAMETERS = {"tie_word_embeddings", "max_position_embeddings", "width"}
TOKEN_KEYS = {"bos_token_id", "eos_token_id"}
NOT_COMPARED = frozenset(
    NAME_KEYS | GENERATION_KEYS | INITIALIZATION_KEYS | SEEN_IN_PARAMETERS | TOKEN_KEYS | SOURCE_KEYS
)
"""Keys that are not compared, at any depth."""
TRAINING = frozenset({"train", "loss_weight", "max_logit_scale", "placeholder_tokens", "null_condition", "ema"})
"""Parts of keys that say how the model is trained."""


def computation_of(config: RunConfig) -> dict[str, Any]:
    """Returns the values that `check_same_computation` compares, in JSON types.

    Raises `UserError` if a part's configuration cannot be read."""
    found = dict(_flat("model", config.model.model_dump(mode="json")))
    if config.model.composite is not None:
        found.update(_flat("model.values", read_composite_config(config.model.composite).to_dict()))
    for name, module in read_graph(config).modules.items():
        if type(module.part) not in KIND_OF:
            continue
        assert isinstance(module.part, PartConfig)
        transformers_config = read_part_config(module.part, KIND_OF[type(module.part)], where=module.key)
        found.update(_flat(f"{module.key}.values", transformers_config.to_dict()))
        if name == LANGUAGE_MODEL:
            found["model.media_attention"] = media_attention_of(config, transformers_config.model_type)
    return dict(json.loads(json.dumps(found, default=str)))


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        if name not in NOT_COMPARED:
            yield from _flat(f"{key}.{name}", inner)


def check_same_computation(checkpoint: object, saved: Values, now: Values) -> None:
    """Raises `UserError` naming a key that changes what the model computes. `saved`: empty in old checkpoints."""
    for key in _differing(saved, now):
        if not _is_training_key(key):
            raise UserError(
                f"train.resume: {checkpoint} belongs to another model: {key} is {json.dumps(saved[key])} there and "
                f"{json.dumps(now[key])} here; resume with the run file that wrote it"
            )


def changes_of_training(saved: Values, now: Values) -> list[str]:
    """Describes the changes in how the model is trained."""
    return [
        f"{key} was {json.dumps(saved[key])} and is {json.dumps(now[key])}"
        for key in _differing(saved, now)
        if _is_training_key(key)
    ]


def _differing(saved: Values, now: Values) -> list[str]:
    return [key for key, value in now.items() if key in saved and saved[key] != value]


def _is_training_key(key: str) -> bool:
    words = key.split(".")
    if words[-2:] == ["lora", "alpha"]:
        return False
    return not TRAINING.isdisjoint(words) or "drop" in words[-1]
