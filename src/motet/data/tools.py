"""The tokenizers and processors of a run file's modules.

Tasks have tokenizers and processors made for them; for other data they are named in the run file or stored with the
model. `PlainTools` reads their files without torch, which is enough for layouts; `TransformersTools` loads the objects
that make tensors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from motet.config import PartConfig
from motet.data.chat import plain_word_level_tokenizer, read_tokenizer, word_level_tokenizer
from motet.data.tasks.dial_a_digit import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD, SAMPLING_RATE
from motet.errors import UserError, one_line
from motet.families.configured_graph import ConfiguredModule
from motet.families.encoders.token_counts import modality_of

PROCESSOR_FILES = (
    ("preprocessor_config.json", ()),
    ("processor_config.json", ("image_processor", "feature_extractor")),
)
"""Files that hold a processor's values, and the keys under which they hold them."""
POSITIVE = ("rescale_factor", "sampling_rate", "feature_size", "hop_length", "n_fft", "chunk_length")
"""Values of processors that are above 0."""


class NeedsTransformersError(Exception):
    """Only transformers can load this tokenizer or processor, or knows the sizes that it makes."""


class Tools(Protocol):
    def tokenizer(self, node: ConfiguredModule) -> Any: ...

    def processor(self, name: str, node: ConfiguredModule) -> Any:
        """The processor of the encoder `name`. Raises `UserError` naming the key that is wrong."""


class PlainTools:
    """Tokenizers and processors read without torch. Raises `NeedsTransformersError` for those that cannot be.

    `words`: all words of a task's texts; (): tokenizers and processors are read from files. `data`: the run file's."""

    def __init__(self, data: Any, words: Sequence[str]) -> None:
        self._data, self._words = data, words

    def tokenizer(self, node: ConfiguredModule) -> Any:
        if self._words:
            return plain_word_level_tokenizer(self._words)
        source = self._data.tokenizer or _source_of(node)
        try:
            tokenizer = read_tokenizer(partial(_stored_file, source))
        except Exception as error:  # Whatever stands in the files: the library has no exceptions of its own.
            raise UserError(f"data.tokenizer: {source} cannot be loaded: {one_line(error)[:200]}") from None
        if tokenizer is None:
            raise NeedsTransformersError
        return tokenizer

    def processor(self, name: str, node: ConfiguredModule) -> Mapping[str, Any]:
        """The values of the processor."""
        if self._words:
            return task_processor(node)
        source = self._data.processors.get(name) or _source_of(node)
        for file_name, keys in PROCESSOR_FILES:
            file = _stored_file(source, file_name)
            if file is not None:
                try:
                    values = json.loads(file.read_text(encoding="utf-8"))
                    nested = [values[key] for key in keys if key in values]
                except (OSError, ValueError, TypeError, RecursionError) as error:
                    raise UserError(f"data.processors.{name}: {file} cannot be read: {one_line(error)[:200]}") from None
                return _checked(nested[0] if nested else values, f"data.processors.{name}: {file}")
        raise NeedsTransformersError


class TransformersTools:
    """Tokenizers and processors of transformers. Arguments are those of `PlainTools`."""

    def __init__(self, data: Any, words: Sequence[str]) -> None:
        self._data, self._words = data, words

    def tokenizer(self, node: ConfiguredModule) -> Any:
        if self._words:
            return word_level_tokenizer(self._words)
        return self._stored("AutoTokenizer", self._data.tokenizer, node, "data.tokenizer")

    def processor(self, name: str, node: ConfiguredModule) -> Any:
        if not self._words:
            modality = modality_of(node.workload.config)
            kind = "AutoImageProcessor" if modality == "image" else "AutoFeatureExtractor"
            key = f"data.processors.{name}"
            processor = self._stored(kind, self._data.processors.get(name), node, key)
            _checked(processor.to_dict(), key)
            return processor
        from transformers import WhisperFeatureExtractor
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        classes: dict[str, type] = {
            "SiglipImageProcessor": SiglipImageProcessorPil,
            "PixtralImageProcessor": PixtralImageProcessorPil,
            "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
            "WhisperFeatureExtractor": WhisperFeatureExtractor,
        }
        values = task_processor(node)
        kind = values.pop("image_processor_type", None) or values.pop("feature_extractor_type")
        return classes[kind](**values)

    def _stored(self, kind: str, given: str | None, node: ConfiguredModule, key: str) -> Any:
        """Loads a tokenizer or processor from the given source, or from that of the module's weights."""
        import transformers

        source = given or _source_of(node)
        if source is None:
            raise UserError(f"{key}: is missing, and the model has random weights; give a hub id or a folder")
        try:
            return getattr(transformers, kind).from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # Whatever stands in the files: the libraries raise what they meet.
            raise UserError(f"{key}: {source} cannot be loaded: {one_line(error)[:200]}") from None


def _checked(values: Any, where: str) -> Mapping[str, Any]:
    """The values of a processor. Raises `UserError` for values with which it would output no numbers."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: is not a mapping; save the processor again")
    std = values.get("image_std")
    each = std if isinstance(std, list | tuple) else [] if std is None else [std]
    for key, given in (*(("image_std", one) for one in each), *((key, values.get(key)) for key in POSITIVE)):
        if given is not None and not (_is_number(given) and 0 < given < math.inf):
            raise UserError(f"{where}: {key} holds {given!r}; give numbers above 0")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def task_processor(node: ConfiguredModule) -> dict[str, Any]:
    """The values of a processor that fits the images and sounds of tasks to the encoder's sizes."""
    config = node.workload.config
    if modality_of(config) == "audio":
        return _task_extractor(config, node.key)
    look = {"image_mean": [IMAGE_MEAN] * 3, "image_std": [IMAGE_STD] * 3}
    if config["model_type"] == "qwen2_5_vl_vision":
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": config["patch_size"],
            "temporal_patch_size": config["temporal_patch_size"],
            "merge_size": config["spatial_merge_size"],
            "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": 4 * IMAGE_SIZE**2},
            **look,
        }
    if config["model_type"] == "pixtral":
        patch = {"height": config["patch_size"], "width": config["patch_size"]}
        size = {"longest_edge": config["image_size"]}
        return {"image_processor_type": "PixtralImageProcessor", "patch_size": patch, "size": size, **look}
    side = config["image_size"]
    height, width = (side, side) if isinstance(side, int) else side
    size = {"height": height, "width": width}
    return {"image_processor_type": "SiglipImageProcessor", "size": size, **look}


def _task_extractor(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    num_frames = 2 * config["max_source_positions"]
    chunk_s = max(1, num_frames // 100)
    if chunk_s * SAMPLING_RATE % num_frames:
        raise UserError(
            f"{key}.values.max_source_positions: {config['max_source_positions']} does not divide "
            f"{chunk_s} s of sound into whole frames; give e.g. 25"
        )
    hop_length = chunk_s * SAMPLING_RATE // num_frames
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "chunk_length": chunk_s,
        "hop_length": hop_length,
        "n_fft": max(400, hop_length * 3 // 2),
        "sampling_rate": SAMPLING_RATE,
    }


def _source_of(node: ConfiguredModule) -> str | None:
    """The folder or hub id of the module's weights."""
    assert isinstance(node.part, PartConfig)
    return node.part.path or node.part.hub


def _stored_file(source: str | None, name: str) -> Path | None:
    """A file of a folder or of a model on the hub; None if there is no such file."""
    if source is None:
        return None
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, name))
    except Exception:  # No such file or model, or offline: transformers reports which.
        return None
