"""Checkpoints: resumed exactly and under other plans; written at once or not at all; refused when damaged."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from sampling import in_campaigns
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from toy_training import Toy, toy_plan
from training import Layout, run_config, stored_tensors, train

from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.runtime.checkpoint import folder as checkpoint_folder
from motet.runtime.checkpoint.checkpoint import load_checkpoint, read_latest, read_training_state
from motet.runtime.checkpoint.folder import find_checkpoints

PP2: Layout = {"language_model": {"pp": 2}}
TP2: Layout = {"language_model": {"tp": 2}}
FSDP2: Layout = {"language_model": {"cp": 2, "fully_sharded": True, "context": {"block_size": 4}}}
SHARED: Layout = {
    "vision": {"dp": 2, "fully_sharded": True},
    "audio": {"dp": 2},
    "language_model": {"dp": 2, "pp": 2, "fully_sharded": True},
}
DP2: Layout = {name: {"dp": 2} for name in ("vision", "audio", "language_model")}


# Resuming: 24 samples in batches of 4 make epochs of 6 steps; the checkpoint is of step 4.


def test_resumes_to_the_last_bit_with_dropout(tmp_path: Path) -> None:
    dropout = {"model__language_model__values__attention_dropout": 0.3, "model__encoders__audio__values__dropout": 0.2}
    common = {"train__steps": 8, "train__checkpoint_every": 4}
    whole = run_config(tmp_path / "whole", TP2, **common, **dropout)
    resumed = run_config(
        tmp_path / "resumed",
        TP2,
        **common,
        **dropout,
        train__resume=str(tmp_path / "whole" / "checkpoints" / "step_00000004"),
    )
    undisturbed, gone_on, without_dropout = train(whole, resumed, run_config(tmp_path / "without", TP2, **common))
    assert gone_on["losses"] == undisturbed["losses"][4:]
    assert undisturbed["losses"][1:] != without_dropout["losses"][1:]
    expected, found = (stored_tensors(Path(result["checkpoint"])) for result in (undisturbed, gone_on))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The checkpoint of step 4 of a run with PP 2, and the losses of the steps after it."""
    output = tmp_path_factory.mktemp("origin")
    (result,) = train(run_config(output, PP2, train__steps=8, train__checkpoint_every=4))
    return output / "checkpoints" / "step_00000004", result["losses"][4:]


@pytest.mark.parametrize(
    ("layout", "zero1"),
    [(TP2, False), (DP2, True), (SHARED, False), *in_campaigns([({}, False), (FSDP2, False)])],
    ids=["TP 2", "DP 2, ZeRO-1", "replicas share parameters", "PP 1", "FSDP"],
)
def test_resumes_under_another_plan(
    tmp_path: Path,
    origin: tuple[Path, list[float]],
    layout: Layout,
    zero1: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoint, expected = origin
    config = run_config(tmp_path, layout, train__steps=8, train__resume=str(checkpoint), parallel__zero1=zero1)
    assert train(config)[0]["losses"] == pytest.approx(expected, rel=1e-6)
    said = capfd.readouterr().err.splitlines()
    assert said[0] == f"going on from {checkpoint}, which was written under another plan"


def test_other_data_are_told(
    tmp_path: Path, origin: tuple[Path, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = origin
    train(run_config(tmp_path, PP2, train__steps=5, train__resume=str(checkpoint), data__max_digits=1))
    said = capfd.readouterr().err.splitlines()
    assert said[0] == (
        f"going on from {checkpoint}; the data or what prepares them have changed since, so samples may come again or "
        "not at all"
    )


def test_resumes_the_latest_checkpoint_or_begins(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With one command, whether it is the first try or not."""
    config = run_config(tmp_path, train__steps=3, train__checkpoint_every=2, train__resume="latest")
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})})
    first, second = train(config, longer)
    assert [len(first["losses"]), len(second["losses"])] == [3, 1]
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("step ")]
    assert said == [
        "no checkpoint yet: beginning with step 1",
        f"checkpoints in {tmp_path}/checkpoints: step_00000002, step_00000003",
        f"going on from {tmp_path}/checkpoints/step_00000003",
    ]


@pytest.mark.parametrize(
    ("layout", "zero1"),
    [
        pytest.param({**DP2, "language_model": {"tp": 2, "dp": 2}}, True, id="ZeRO-1"),
        pytest.param(FSDP2, False, id="FSDP"),
        pytest.param(SHARED, False, id="replicas share parameters", marks=pytest.mark.campaign),
    ],
)
def test_resumes_whole_what_was_written_sharded(tmp_path: Path, layout: Layout, zero1: bool) -> None:
    sharded = run_config(tmp_path, layout, train__steps=8, train__checkpoint_every=4, parallel__zero1=zero1)
    expected = train(sharded)[0]["losses"][4:]
    config = run_config(tmp_path, PP2, train__steps=8, train__resume=str(tmp_path / "checkpoints/step_00000004"))
    assert train(config)[0]["losses"] == pytest.approx(expected, rel=1e-6)


# The rest needs no language model: two toy layers on two ranks.


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refusal:
        action()
    return str(refusal.value)


def kill_this_process(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after_half_a_shard(writer: HuggingFaceStorageWriter, *_: object) -> None:
    (Path(writer.path) / "shard.safetensors").write_bytes(b"half")
    kill_this_process()


def kill_at_second_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            kill_this_process()
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)


CRASHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "in mid-write": lambda patch: patch.setattr(HuggingFaceStorageWriter, "write_data", kill_after_half_a_shard),
    "before the manifest": lambda patch: patch.setattr(checkpoint_folder, "_write_to_disk", kill_this_process),
    "before the rename": lambda patch: patch.setattr(Path, "rename", kill_this_process),
    "before latest is moved": lambda patch: patch.setattr(checkpoint_folder, "_link", kill_this_process),
}


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str) -> None:
    def train_and_die(rank: int) -> None:
        toy = Toy(toy_plan())
        toy.step()
        toy.save(tmp_path)
        torch.save(toy.weights(), tmp_path / f"expected_{rank}")
        toy.step()
        CRASHES[crash](monkeypatch)
        toy.save(tmp_path)

    with pytest.raises((AssertionError, TimeoutError)):
        run_distributed(train_and_die, 2, timeout=20)

    def go_on(rank: int) -> tuple[int, bool]:
        toy = Toy(toy_plan())
        checkpoint, state = read_latest(tmp_path)
        load_checkpoint(checkpoint, toy.model, toy.optimizer)
        toy.finished_steps = state.step
        if state.step == 1:
            expected = torch.load(tmp_path / f"expected_{rank}")
            assert all(torch.equal(weight, expected[name]) for name, weight in toy.weights().items())
        toy.step()
        toy.save(tmp_path)
        return state.step

    # Once the new name is there, the new checkpoint is the good one.
    assert run_distributed(go_on, 2) == [2 if crash == "before latest is moved" else 1] * 2
    assert not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "latest").resolve() == find_checkpoints(tmp_path)[-1]


def test_a_crash_while_a_checkpoint_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is written again after a resume from an older one: at no moment is there neither."""

    def write_again_and_die(rank: int) -> None:
        toy = Toy(toy_plan())
        toy.step()
        toy.save(tmp_path)
        kill_at_second_rename(monkeypatch)
        toy.save(tmp_path)

    with pytest.raises((AssertionError, TimeoutError)):
        run_distributed(write_again_and_die, 2, timeout=20)

    def go_on(rank: int) -> int:
        toy = Toy(toy_plan())
        checkpoint, state = read_latest(tmp_path)
        load_checkpoint(checkpoint, toy.model, toy.optimizer)
        toy.finished_steps = state.step
        toy.save(tmp_path)
        return state.step

    assert run_distributed(go_on, 2) == [1, 1]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]


def largest_shard(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda c: os.truncate(largest_shard(c), 50), "safetensors is cut short: 50 of "),
    "longer": (lambda c: largest_shard(c).open("ab").write(b"more"), "safetensors is too long: "),
    "flipped": (lambda c: flip_a_bit(largest_shard(c)), "safetensors has changed since it was written"),
    "missing": (lambda c: largest_shard(c).unlink(), "safetensors is missing"),
    "no manifest": (lambda c: (c / "checkpoint.json").unlink(), "is not a checkpoint: checkpoint.json is missing"),
    "half a manifest": (lambda c: os.truncate(c / "checkpoint.json", 30), "checkpoint.json is damaged ("),
    "no state": (lambda c: (c / "checkpoint.json").write_text('{"files": {}}'), "checkpoint.json is damaged ("),
    "binary": (lambda c: (c / "checkpoint.json").write_bytes(b"\xff\xfe\x00"), "checkpoint.json is damaged ("),
}


def test_damage_is_told_on_every_rank(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, str]:
        toy = Toy(toy_plan())
        toy.step()
        whole = toy.save(tmp_path)
        messages = {}
        for name, (damage, _) in DAMAGES.items():
            damaged = tmp_path / name
            if rank == 0:
                shutil.copytree(whole, damaged)
                damage(damaged)
            dist.barrier()
            messages[name] = refused(lambda damaged=damaged: read_training_state(damaged))
        assert read_training_state(whole).step == 1
        return messages

    first, second = run_distributed(work, 2)
    assert first == second
    for name, (_, expected) in DAMAGES.items():
        assert first[name].startswith(f"train.resume: {tmp_path / name}"), first[name]
        assert expected in first[name]


def test_latest_passes_over_what_is_damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int) -> tuple[str, str]:
        assert read_latest(tmp_path) is None
        toy = Toy(toy_plan())
        for _ in range(3):
            toy.step()
            toy.save(tmp_path, keep=3)
        if rank == 0:
            flip_a_bit(largest_shard(tmp_path / "step_00000003"))
        dist.barrier()
        found, state = read_latest(tmp_path)
        assert state.step == 2
        if rank == 0:
            for name in ("step_00000001", "step_00000002"):
                (tmp_path / name / "checkpoint.json").write_text("{}")
        dist.barrier()
        return found.name, refused(lambda: read_latest(tmp_path))

    expected = ("step_00000002", f"train.resume: none of the 3 checkpoints in {tmp_path} is complete; start again")
    assert run_distributed(work, 2) == [expected] * 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 6, "rank 0 alone speaks: twice in the first search, four times in the second"
    assert said[0] == f"checkpoints in {tmp_path}: step_00000001, step_00000002, step_00000003"
    assert "step_00000003" in said[1]
    assert said[1].endswith("has changed since it was written; trying the checkpoint before it")


def test_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        toy = Toy(toy_plan(trainable=((1, 9),)))
        toy.step()
        checkpoint = toy.save(tmp_path)
        larger, smaller, thawed, other_shape = (
            Toy(toy_plan(3, trainable=((1, 9),))),
            Toy(without_last_layer(toy_plan(trainable=((1, 9),)))),
            Toy(toy_plan()),
            Toy(toy_plan(trainable=((1, 9),))),
        )
        widen(other_shape)
        return [
            refused(lambda other=other: load_checkpoint(checkpoint, other.model, other.optimizer))
            for other in (larger, smaller, thawed, other_shape)
        ]

    first, second = run_distributed(work, 2)
    assert first == second
    larger, smaller, thawed, other_shape = first
    assert "belongs to another model: it has no llm.weights.2; resume" in larger
    assert "belongs to another model: it has llm.weights.1, which this one does not have" in smaller
    assert "has no optimizer state of llm.weights.0; it was written while that part was frozen" in thawed
    assert "belongs to another model: llm.weights.1 is [5, 5] there and [5, 6] here" in other_shape


def without_last_layer(plan: Plan) -> Plan:
    """One layer, with a replica on each rank."""
    replicas = tuple(Replica(stages=(Stage(layers=(0, 1), ranks=(rank,), tp_size=1),)) for rank in range(2))
    module = replace(plan.modules["llm"], num_layers=1, replicas=replicas, trainable=())
    return replace(plan, modules={"llm": module})


def widen(toy: Toy) -> None:
    for i, p in enumerate(toy.model.parameters):
        if p.name == "llm.weights.1":
            toy.model.parameters[i] = replace(p, parameter=nn.Parameter(torch.zeros(5, 6, dtype=torch.float64)))


def no_space_on_rank_1(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_data(writer: HuggingFaceStorageWriter, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            (Path(writer.path) / "shard.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(writer, plan, planner)

    return write_data


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["shards", "manifest"])
def test_no_space_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def work(rank: int) -> str:
        toy = Toy(toy_plan())
        toy.step()
        toy.save(tmp_path)
        toy.step()
        if where == "shards":
            writer = HuggingFaceStorageWriter
            monkeypatch.setattr(writer, "write_data", no_space_on_rank_1(writer.write_data))
        else:
            monkeypatch.setattr(checkpoint_folder, "_write_to_disk", no_space)
        return refused(lambda: toy.save(tmp_path))

    message = f"train.output: the checkpoint {tmp_path}/step_00000002 cannot be written (No space left on device)"
    for refusal in run_distributed(work, 2):
        assert refusal.startswith(message)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]


def test_keeps_the_last_ones_and_the_best(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("step_*"))

    def work(rank: int) -> list[list[str]]:
        seen = []
        toy = Toy(toy_plan())
        for step in range(1, 6):
            toy.step()
            toy.save(tmp_path, is_best=step in (1, 2))
            seen.append(names())
        # A training that had to go back: later steps were damaged, and are not its own to count or delete.
        back = Toy(toy_plan())
        for _ in range(3):
            back.step()
        back.save(tmp_path, keep=1)
        return [*seen, names()]

    (*seen, gone_back), _ = run_distributed(work, 2)
    kept = [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert seen == [[f"step_{step:08d}" for step in steps] for steps in kept]
    assert gone_back == [f"step_{step:08d}" for step in (2, 3, 4, 5)]
    assert (tmp_path / "best").resolve().name == "step_00000002"
    assert (tmp_path / "latest").resolve().name == "step_00000003"


def test_a_link_can_be_resumed(tmp_path: Path) -> None:
    """`latest` and `best` are folders to whoever opens them."""

    def work(rank: int) -> int:
        toy = Toy(toy_plan())
        toy.step()
        toy.save(tmp_path, is_best=True)
        return read_training_state(tmp_path / "best").step

    assert run_distributed(work, 2) == [1, 1]
