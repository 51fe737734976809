"""Reads and writes weights in the format of transformers, tensor by tensor: the whole model is never in memory.

`save_part` writes config.json and safetensors shards under the names that `save_pretrained` of this transformers would
give them; `CheckpointTensors` reads what `motet.runtime.checkpoint.checkpoint` wrote. Nothing is pickled or unpickled.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from motet.errors import UserError
from motet.families.classes import model_on_meta
from motet.families.discovery.language_model_parts import causal_paths
from motet.families.stored_weights import StoredForm, is_within, stored_buffers, weights_of

MAX_SHARD_SIZE = "5GB"
CHECKPOINT_PREFIX = "model/"
"""Prefix of the model's tensors in a checkpoint; the optimizer's tensors have another."""
AVERAGE_PREFIX = "optimizer/average/"
"""Prefix of moving averages of the model's tensors."""


class CheckpointTensors(Mapping[str, Tensor]):
    """Mapping of the tensors in a checkpoint's folder by their names in the whole model. Tensors are read on access; of
    parameters with a moving average, it is the average that is read.

    Raises `UserError` naming the folder or file that is not a checkpoint's or is damaged.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        """Files by name and prefix."""
        for path in sorted(Path(checkpoint).glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: is damaged ({error}); use another checkpoint") from None
            names: list[str] = list(file.keys())
            for name in names:
                for prefix in (CHECKPOINT_PREFIX, AVERAGE_PREFIX):
                    if name.startswith(prefix):
                        self._found.setdefault(name.removeprefix(prefix), {})[prefix] = file
        if not self._found:
            raise UserError(f"{checkpoint}: holds no model; give a checkpoint's folder, such as .../step_00000100")

    def __getitem__(self, name: str) -> Tensor:
        files = self._found[name]
        prefix = AVERAGE_PREFIX if AVERAGE_PREFIX in files else CHECKPOINT_PREFIX
        tensor: Tensor = files[prefix].get_tensor(prefix + name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class RenamedTensors(Mapping[str, Tensor]):
    """View of another mapping's tensors under new names; tensors are read on access."""

    def __init__(self, tensors: Mapping[str, Tensor], old_names: Mapping[str, str]) -> None:
        """`old_names`: the names in `tensors`, by new name."""
        self._tensors, self.old_names = tensors, old_names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self.old_names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.old_names)

    def __len__(self) -> int:
        return len(self.old_names)


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> RenamedTensors:
    """Returns the tensors whose names begin with `prefix.`, under their names without it."""
    start = f"{prefix}."
    return RenamedTensors(tensors, {name.removeprefix(start): name for name in tensors if name.startswith(start)})


def save_part(
    folder: Path,
    model_class: Any,
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Writes config.json and weights, such that `model_class.from_pretrained(folder)` loads them bitwise.

    Args:
        tensors: every parameter and stored buffer by its name in the model; of tied ones, the first name only.
        where: names the part in messages.
        max_shard_size: of one file; the largest amount that is in memory beside what `tensors` itself holds.

    Raises `UserError` if the tensors are not those of the model, or could not be loaded again.
    """
    skeleton = model_on_meta(model_class, config, torch.float32, where)
    weights = weights_of(skeleton)
    dtypes = check_tensors(weights, tensors, where=where)
    stored = StoredForm(skeleton, weights, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    written = copy.deepcopy(config)
    written.architectures = [model_class.__name__]
    # from_pretrained casts to it. A part has one dtype, or loses nothing by the widest of those that it has.
    written.dtype = reduce(torch.promote_types, dtypes.values())
    written.save_pretrained(folder)
    _save_shards(folder, stored, dtypes, max_shard_size)


def check_part(model_class: Any, config: PretrainedConfig, *, where: str, is_causal: bool) -> None:
    """Raises `UserError` if `save_part` could not write such a model from a checkpoint.

    `is_causal`: whether it has blocks of a causal model, whose stored buffers are in checkpoints."""
    skeleton = model_on_meta(model_class, config, torch.float32, where)
    weights = weights_of(skeleton)
    StoredForm(skeleton, weights, weights)
    buffers = stored_buffers(skeleton)
    saved = (causal_paths(skeleton).blocks,) if buffers and is_causal else ()
    left = [name for name in buffers if not is_within(name, saved)]
    if left:
        raise UserError(
            f"export: checkpoints lack {len(left)} of the stored buffers of a {type(skeleton).__name__} ({left[0]}), "
            "which training does not change; set train.export to false, and take them from the model's own folder"
        )


def check_tensors(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, where: str
) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor. Raises `UserError` for one that is missing, of another shape or unexpected."""
    dtypes = {}
    for name, parameter in expected.items():
        if name not in tensors:
            raise UserError(f"export: {where} has no tensor {name}; give the tensors of the model that is described")
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            raise UserError(
                f"export: {where}.{name} is {list(tensor.shape)} and should be {list(parameter.shape)}; "
                "give the tensors of the model that is described"
            )
        dtypes[name] = tensor.dtype
    for name in tensors:
        if name not in expected:
            raise UserError(f"export: {where} has no parameter {name}; give the tensors of the model that is described")
    return dtypes


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one safetensors file."""
    save_file({name: _own_memory(tensors[name].detach()) for name in tensors}, path, metadata={"format": "pt"})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _save_shards(
    folder: Path, on_disk: StoredForm, dtypes: Mapping[str, torch.dtype], max_shard_size: int | str
) -> None:
    sizes = {
        name: torch.empty(shape, dtype=dtypes[on_disk.origin(name)], device="meta")
        for name, shape in on_disk.shapes.items()
    }
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    for file_name, names in split.filename_to_tensors.items():
        save_tensors(folder / file_name, RenamedTensors(on_disk, {name: name for name in names}))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def _own_memory(tensor: Tensor) -> Tensor:
    """Copies slices of a larger buffer: safetensors refuses tensors that share memory."""
    is_slice = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if is_slice else tensor.contiguous()
