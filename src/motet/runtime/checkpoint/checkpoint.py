"""Checkpoints by torch.distributed.checkpoint, in safetensors, that can be resumed under another plan.

A checkpoint holds whole tensors under their names in the whole model (`model/...`, `optimizer/exp_avg/...`), so that no
plan shows in it. Of parameters in bfloat16 it holds the masters, in float32. How its folder comes into being, and what
is checked of it: `motet.runtime.checkpoint.folder`. Nothing in it is unpickled.

Limits: tensor-parallel shards are gathered and written by one rank of their group; all ranks must see the same file
system.
"""

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from motet.devices import barrier, has_own_memory, synchronize
from motet.errors import UserError
from motet.runtime.checkpoint import folder as checkpoint_folder
from motet.runtime.checkpoint.folder import Manifest, TrainingState
from motet.runtime.communication.agreement import on_every_rank, on_first_rank
from motet.runtime.local_model import LocalModel, LocalParameter
from motet.runtime.training.master_weights import MASTER
from motet.runtime.training.optimizer import AVERAGE, Optimizer

Shapes = dict[str, tuple[int, ...]]
"""Shapes of whole tensors, by name."""

MODEL = "model/"
OPTIMIZER = "optimizer/"


class OptimizerStates(Protocol):
    """The tensors of an optimizer."""

    def states(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """Returns the states that this rank holds, by parameter."""

    def writes_state(self, p: LocalParameter) -> bool:
        """Whether this rank writes the parameter's states into checkpoints."""

    @property
    def keeps_masters(self) -> bool:
        """Whether states hold the float32 masters of trainable parameters in half precision; alike on all ranks."""


def checkpoint_bytes(model: LocalModel, optimizer: Optimizer) -> int:
    """Size of one checkpoint on disk: parameters, and the optimizer's states of the trainable ones. Collective."""
    mine = sum(
        math.prod(p.full_shape) * _written_dtype(p).itemsize * (1 + optimizer.num_states(p))
        for p in model.parameters
        if p.is_written
    )
    return sum(on_every_rank(int, lambda: mine))


def write_checkpoint(
    folder: Path,
    tensors: dict[str, Tensor],
    state: TrainingState,
    *,
    keep: int,
    is_best: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Collective over `group`. Returns the new checkpoint; when it is complete, those before it are deleted but for
    the last `keep` and the best. `tensors`: what this rank writes of it.

    Raises `UserError` on all ranks if it cannot be written; then no trace of it is left."""
    final = folder / f"step_{state.step:08d}"
    partial: Path | None = None
    try:
        partial = on_first_rank(Path, lambda: checkpoint_folder.begin(final), group)
        _write(partial, tensors, group)
        manifest = Manifest(state, _describe_files(partial, group))
        on_first_rank(
            None, lambda: checkpoint_folder.complete(partial, final, manifest, is_best=is_best, keep=keep), group
        )
    except OSError as error:
        if partial is not None:
            on_first_rank(None, lambda: checkpoint_folder.abandon(partial), group)
        raise UserError(
            f"train.output: the checkpoint {final} cannot be written ({error.strerror or error}); free space or choose "
            "another folder, and continue with train.resume: latest"
        ) from error
    return final


def _write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def _describe_files(folder: Path, group: dist.ProcessGroup | None) -> dict[str, checkpoint_folder.FileRecord]:
    """Computes sizes and checksums of the files, a share on each rank."""
    names = on_first_rank(list[str], lambda: sorted(path.name for path in folder.iterdir()), group)
    kind = dict[str, checkpoint_folder.FileRecord]
    shares = on_every_rank(kind, lambda: checkpoint_folder.describe_files(folder, _share(names, group)), group)
    return {name: record for share in shares for name, record in share.items()}


def _share(items: Iterable[Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    return list(items)[dist.get_rank(group) :: dist.get_world_size(group)]


def read_training_state(checkpoint: Path) -> TrainingState:
    """Collective: checks the manifest, and every shard's size and checksum, each rank its share of them.

    Raises `UserError` on all ranks, naming the file that is missing, cut short or changed."""
    manifest = on_first_rank(Manifest, lambda: checkpoint_folder.read_manifest(checkpoint))
    on_every_rank(None, lambda: checkpoint_folder.check_files(checkpoint, _share(manifest.files.items())))
    return manifest.state


def read_latest(folder: Path) -> tuple[Path, TrainingState] | None:
    """Collective: the whole checkpoint of the highest step; None if there are no checkpoints.

    Rank 0 says on stderr which checkpoints there are and which were passed over, and why. Raises `UserError` if all
    are damaged."""
    checkpoints = on_first_rank(list[Path], lambda: checkpoint_folder.find_checkpoints(folder))
    if checkpoints:
        _tell(f"checkpoints in {folder}: {', '.join(path.name for path in checkpoints)}")
    for checkpoint in reversed(checkpoints):
        try:
            return checkpoint, read_training_state(checkpoint)
        except UserError as error:
            _tell(f"{str(error).partition(';')[0]}; trying the checkpoint before it")
    if checkpoints:
        raise UserError(
            f"train.resume: none of the {len(checkpoints)} checkpoints in {folder} is complete; start again"
        )
    return None


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def load_checkpoint(checkpoint: Path, model: LocalModel, optimizer: Optimizer) -> None:
    """Collective. Fills this rank's parameters and its share of the optimizer's states.

    Raises `UserError` on all ranks if the checkpoint belongs to another model."""
    optimizer.initialize_states()
    fill(checkpoint, model, optimizer)


class _NoStates:
    """The optimizer of a run that begins with the weights alone."""

    keeps_masters = False

    def states(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        return {}

    def writes_state(self, p: LocalParameter) -> bool:
        return False


def load_weights(checkpoint: Path, model: LocalModel) -> None:
    """Collective. Fills this rank's parameters, and no states of an optimizer.

    Raises `UserError` on all ranks if the checkpoint belongs to another model."""
    fill(checkpoint, model, _NoStates())


def fill(checkpoint: Path, model: LocalModel, optimizer: OptimizerStates) -> None:
    """Loads a checkpoint into optimizer states that exist. Collective. Buffers that it lacks, as old ones do, stay as
    they are."""
    stored = on_first_rank(Shapes, lambda: _stored_shapes(checkpoint))
    buffers = {MODEL + p.name for p in model.parameters if not isinstance(p.parameter, nn.Parameter)}
    wanted = {n: tensor for n, tensor in _tensors_to_load(model, optimizer) if n in stored or n not in buffers}
    _check_model(checkpoint, stored, wanted)
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    states = optimizer.states()
    with torch.no_grad():
        for p in model.parameters:
            if not p.is_kept or MODEL + p.name not in wanted:
                continue
            values = p.cut(wanted[MODEL + p.name])
            p.parameter.copy_(values)
            for key, value in states.get(p.parameter, {}).items():
                if key == MASTER:
                    value.copy_(values)
                    continue
                full = wanted[f"{OPTIMIZER}{key}/{p.name}"]
                value.copy_(full if value.dim() == 0 else p.cut(full))


def tensors_to_save(model: LocalModel, optimizer: OptimizerStates) -> Iterator[tuple[str, Tensor]]:
    """Returns the tensors that this rank writes. Collective: tensor-parallel groups gather shards, in the same order
    on every member."""
    states = optimizer.states()
    for p in model.parameters:
        if not p.is_kept:
            continue
        has_master = optimizer.keeps_masters and p.parameter.requires_grad and _written_dtype(p) != p.parameter.dtype
        if not has_master:
            full = p.gather(p.parameter).to(_written_dtype(p))
            if p.is_written:
                yield MODEL + p.name, full
        for key, value in states.get(p.parameter, {}).items():
            full = value if value.dim() == 0 else p.gather(value)
            if optimizer.writes_state(p):
                yield MODEL + p.name if key == MASTER else f"{OPTIMIZER}{key}/{p.name}", full


def _written_dtype(p: LocalParameter) -> torch.dtype:
    return torch.promote_types(p.parameter.dtype, torch.float32)


def _tensors_to_load(model: LocalModel, optimizer: OptimizerStates) -> Iterator[tuple[str, Tensor]]:
    states = optimizer.states()
    for p in model.parameters:
        if not p.is_kept:
            continue
        yield MODEL + p.name, torch.empty(p.full_shape, dtype=_written_dtype(p))
        for key, value in states.get(p.parameter, {}).items():
            if key == MASTER:
                continue
            shape = () if value.dim() == 0 else p.full_shape
            yield f"{OPTIMIZER}{key}/{p.name}", torch.empty(shape, dtype=value.dtype)


def _check_model(checkpoint: Path, stored: Shapes, wanted: dict[str, Tensor]) -> None:
    """Checks that the checkpoint holds exactly the tensors that all ranks together load, in the same shapes."""
    shapes = {name: tuple(t.shape) for name, t in wanted.items()}
    on_every_rank(None, lambda: _check_shapes(checkpoint, stored, shapes))
    names = on_every_rank(list[str], lambda: [name for name in wanted if name.startswith(MODEL)])
    unwanted = {name for name in stored if name.startswith(MODEL)}.difference(*names)
    if unwanted:
        raise UserError(
            f"train.resume: {checkpoint} belongs to another model: it has {min(unwanted).removeprefix(MODEL)}, which "
            "this one does not have; resume with the run file that wrote it"
        )


def stored_optimizer_shapes(checkpoint: Path) -> Shapes:
    """The shapes of the optimizer's states in a checkpoint, by `<state>/<parameter>`."""
    return {
        name.removeprefix(OPTIMIZER): shape
        for name, shape in _stored_shapes(checkpoint).items()
        if name.startswith(OPTIMIZER)
    }


def _stored_shapes(checkpoint: Path) -> Shapes:
    metadata = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in metadata.items() if isinstance(tensor, TensorStorageMetadata)}


def _check_shapes(checkpoint: Path, stored: Shapes, wanted: Shapes) -> None:
    for name, shape in wanted.items():
        if name in stored and stored[name] == shape:
            continue
        if name in stored:
            difference = f"{name.removeprefix(MODEL)} is {list(stored[name])} there and {list(shape)} here"
        elif name.startswith(MODEL):
            difference = f"it has no {name.removeprefix(MODEL)}"
        else:
            if name.startswith(f"{OPTIMIZER}{AVERAGE}/"):
                raise UserError(
                    f"train.resume: {checkpoint} has no moving average of {name.split('/', 2)[2]}; it was written "
                    "without ema, so leave that out or start again"
                )
            raise UserError(
                f"train.resume: {checkpoint} has no optimizer state of {name.split('/', 2)[2]}; it was written while "
                "that part was frozen, so freeze it or start again"
            )
        raise UserError(
            f"train.resume: {checkpoint} belongs to another model: {difference}; resume with the run file that wrote it"
        )


# Writes checkpoints beside the training: a step waits for a copy of the tensors, not for the disk.
#
# Each rank writes in a thread of its own, over a process group of its own, one checkpoint at a time. The copies stay
# for the next checkpoint, so a process holds what it writes twice, in main memory. What fails is told on all ranks
# alike, when the next checkpoint begins or the training ends. (DCP's own `async_save` covers the shards alone:
# checksums and the rename, which make a checkpoint complete, would be left to the training.)


TIMEOUT = timedelta(minutes=30)
"""Timeout of the process group that writes: how long other ranks wait for the slowest disk."""


class CheckpointWriter:
    """Collective: every rank makes one, with the same arguments, and calls its methods in the same order.

    All but the last `keep` checkpoints in `folder` and the best are deleted when another is complete.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # On CUDA too: files are written from main memory.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._before: threading.Thread | None = None
        self.is_unfinished = False
        """Whether a checkpoint was begun and is not complete, perhaps because it failed."""
        self.last: Path | None = None
        """The last complete checkpoint."""

    def save(self, model: LocalModel, optimizer: Optimizer, state: TrainingState, *, is_best: bool = False) -> None:
        """Returns as soon as everything is copied and the checkpoint before it is complete.

        Raises as `finish` does, on behalf of the one before."""
        self.finish()
        if self._before is not None:
            self._before.join()
            self._before = None
        self._copy(tensors_to_save(model, optimizer))
        self.is_unfinished = True
        # A daemon: a process whose peers have died must not wait for them when it ends.
        self._thread = threading.Thread(target=self._write, args=(state, is_best), name="checkpoint", daemon=True)
        self._thread.start()

    def follow(self, other: "CheckpointWriter") -> None:
        """Makes this writer wait until `other`, of an earlier world, has ended; what it was writing is lost."""
        self._before = other._thread if other._thread is not None else other._before

    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors one at a time, because each is gathered whole on the device."""
        copies, devices = self._copies, set[torch.device]()
        self._copies = {}
        for name, tensor in tensors:
            devices.add(tensor.device)
            copy = copies.get(name)
            if copy is None or copy.shape != tensor.shape:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_own_memory(tensor.device))
            self._copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            synchronize(device)

    def _write(self, state: TrainingState, is_best: bool) -> None:
        try:
            # Nobody touches the folder before all have ended what they were writing in a world before this one.
            barrier(self._group)
            self.last = write_checkpoint(
                self._folder, self._copies, state, keep=self._keep, is_best=is_best, group=self._group
            )
            self.is_unfinished = False
        except BaseException as failure:
            self._failure = failure

    def finish(self) -> Path | None:
        """Waits until what is being written is complete, and returns the last checkpoint.

        Raises `UserError` on all ranks if it could not be written; then the one before is untouched."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if isinstance(failure, UserError):
            there = self.last if self.last is not None and self.last.exists() else "none"
            raise UserError(f"{failure}; last complete checkpoint: {there}") from failure
        if failure is not None:
            raise failure
        return self.last
