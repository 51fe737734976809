"""Killed and damaged at random moments and places: the last good checkpoint is always found, and it is the right one.

Weights of a step are known (constant gradients), so what is found is compared with them, not only opened.
"""

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from sampling import in_campaigns
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from toy_model import initial_weight
from toy_training import Toy, toy_plan
from training import stored_tensors
from waiting import wait_until

from motet.errors import UserError
from motet.runtime.checkpoint.checkpoint import CheckpointWriter, load_checkpoint, read_latest
from motet.runtime.checkpoint.folder import TrainingState, check_files, find_checkpoints, read_manifest

PHASES = ("starting", "resuming", "training", "copying", "waiting for the writing", "ended")
FORK = multiprocessing.get_context("fork")


@cache
def weights_after(step: int) -> dict[str, torch.Tensor]:
    """Of `Toy`: by plain AdamW in this process."""
    weights = {f"llm.weights.{i}": initial_weight("llm", i).requires_grad_() for i in range(2)}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for finished in range(step):
        for weight in weights.values():
            weight.grad = torch.full_like(weight, 1.0 + finished)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def assert_is_of_its_step(checkpoint: Path) -> int:
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest.files.items())
    step = manifest.state.step
    assert manifest.state.data == {"samples_seen": 4 * step}
    stored = stored_tensors(checkpoint)
    for name, weight in weights_after(step).items():
        assert torch.allclose(stored[f"model/{name}"], weight, rtol=0, atol=1e-12), f"{name} is not of step {step}"
    return step


def train_until_killed(rank: int, folder: Path, rendezvous: Path, seed: int, phases: Any, saves: Any) -> None:
    """Resumes, steps and saves for ever. Rank 0 writes down which checkpoints it has seen completed. `saves`: how many
    each rank has begun."""
    generator = random.Random(seed)  # The same on both ranks: they step in lockstep.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    phases[rank] = PHASES.index("resuming")
    toy = Toy(toy_plan())
    writer = CheckpointWriter(folder / "checkpoints", keep=2)
    if found := read_latest(folder / "checkpoints"):
        checkpoint, state = found
        load_checkpoint(checkpoint, toy.model, toy.optimizer)
        toy.finished_steps = state.step
        for name, weight in toy.weights().items():
            assert torch.allclose(weight, weights_after(state.step)[name], rtol=0, atol=1e-12)
    while True:
        phases[rank] = PHASES.index("training")
        toy.step()
        time.sleep(generator.choice([0.0, 0.02, 0.1]))
        phases[rank] = PHASES.index("waiting for the writing")
        if writer.finish() and rank == 0:
            with (folder / "completed").open("a") as log:
                log.write(f"{writer.last.name}\n")
        phases[rank] = PHASES.index("copying")
        state = TrainingState(toy.finished_steps, {"samples_seen": 4 * toy.finished_steps}, "")
        writer.save(toy.model, toy.optimizer, state)
        saves[rank] += 1


def kill_at_random(folder: Path, rendezvous: Path, seed: int) -> str:
    """One launch and its end. Returns the phase in which the first victim was."""
    generator = random.Random(seed)
    phases, saves = FORK.Array("i", 2, lock=False), FORK.Array("i", 2, lock=False)
    workers = [
        FORK.Process(target=train_until_killed, args=(rank, folder, rendezvous, seed, phases, saves), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    victims = generator.choice([workers[:1], workers[1:], workers])
    first = workers.index(victims[0])
    # Half of the kills come while all start, half when some have been saved.
    begun, saved = PHASES.index(generator.choice(PHASES[:3])), generator.choice([0, 0, 0, 1, 2, 3])
    wait_until(lambda: phases[first] >= begun and saves[first] >= saved)
    time.sleep(generator.uniform(0.0, 0.1))
    assert all(worker.is_alive() for worker in workers), "a worker failed by itself"
    phase = PHASES[phases[first]]
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    time.sleep(generator.choice([0.0, 0.05]))  # The survivor writes on.
    for worker in workers:
        worker.kill()
        worker.join()
    return phase


def last_completed(folder: Path) -> int:
    log = folder / "completed"
    return max((int(line.removeprefix("step_")) for line in log.read_text().split()), default=0) if log.exists() else 0


@pytest.mark.parametrize("num_kills", [6, *in_campaigns([100])])
def test_killed_at_random_moments_of_saving_and_resuming(tmp_path: Path, num_kills: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(num_kills):
        phase = kill_at_random(tmp_path, tmp_path / f"rendezvous_{seed}", seed)
        counts[phase] += 1
        whole = find_checkpoints(tmp_path / "checkpoints")
        newest = max((assert_is_of_its_step(checkpoint) for checkpoint in whole), default=0)
        assert newest >= last_completed(tmp_path), f"seed {seed}: a completed checkpoint was lost in {phase}"
    print(f"{num_kills} kills, last step {newest}, by phase: {dict(counts)}")
    assert newest > 0


def damage_at_random(checkpoint: Path, generator: random.Random) -> str:
    """One file of it, once. Returns what was done."""
    path = generator.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))
    content = bytearray(path.read_bytes())
    place = generator.randrange(len(content))
    how = generator.choice(["cut", "flipped", "deleted", "zeroed"])
    if how == "deleted":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:place])
    else:
        content[place] = content[place] ^ (1 << generator.randrange(8)) if how == "flipped" else not content[place]
        path.write_bytes(content)
    return f"{path.name} {how} at {place} of {len(content)}"


@pytest.mark.parametrize("num_damages", [20, pytest.param(400, marks=pytest.mark.campaign)])
def test_damaged_at_random_places(tmp_path: Path, num_damages: int) -> None:
    """The newest of two is damaged: it is passed over, or no content of it has changed (a blank in the manifest)."""

    def work(rank: int) -> tuple[int, int]:
        toy = Toy(toy_plan())
        writer = CheckpointWriter(tmp_path / "whole", keep=2)
        for step in (1, 2):
            toy.step()
            writer.save(toy.model, toy.optimizer, TrainingState(step, {"samples_seen": 4 * step}, ""))
        writer.finish()
        num_passed_over, num_harmless = 0, 0
        for seed in range(num_damages):
            folder = tmp_path / f"damaged_{seed}"
            what = ""
            if rank == 0:
                shutil.copytree(tmp_path / "whole", folder, symlinks=True)
                what = damage_at_random(folder / "step_00000002", random.Random(seed))
                os.utime(folder / "step_00000002", (1, 1))
            dist.barrier()
            found, state = read_latest(folder)
            assert state == read_manifest(tmp_path / "whole" / found.name).state, f"seed {seed}: {what}"
            load_checkpoint(found, toy.model, toy.optimizer)
            for name, weight in toy.weights().items():
                assert torch.allclose(weight, weights_after(state.step)[name], atol=1e-12), f"seed {seed}: {what}"
            num_passed_over += state.step == 1
            num_harmless += state.step == 2
        return num_passed_over, num_harmless

    (num_passed_over, num_harmless), _ = run_distributed(work, 2, timeout=300)
    print(f"{num_damages} damages: {num_passed_over} passed over, {num_harmless} without effect")
    assert num_passed_over > num_harmless


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing waits for two more steps, which could not come if they waited for it; and it writes what was."""

    def work(rank: int) -> int:
        toy = Toy(toy_plan())
        stepped = FORK.Event()
        original = HuggingFaceStorageWriter.write_data

        def write_data(*args: Any) -> Any:
            assert stepped.wait(30), "training did not go on"
            return original(*args)

        monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
        writer = CheckpointWriter(tmp_path, keep=2)
        toy.step()
        writer.save(toy.model, toy.optimizer, TrainingState(1, {"samples_seen": 4}, ""))
        toy.step()
        toy.step()
        stepped.set()
        checkpoint = writer.finish()
        return assert_is_of_its_step(checkpoint)

    assert run_distributed(work, 2) == [1, 1]


def test_what_failed_is_told_when_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> str:
        toy = Toy(toy_plan())
        writer = CheckpointWriter(tmp_path, keep=2)
        toy.step()
        state = TrainingState(1, {}, "")
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(
                    HuggingFaceStorageWriter, "write_data", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
                )
            writer.save(toy.model, toy.optimizer, state)
            with pytest.raises(UserError) as refusal:
                writer.save(toy.model, toy.optimizer, state)
        assert writer.is_unfinished, "whoever goes on after the failure has to know"
        writer.save(toy.model, toy.optimizer, state)
        assert writer.finish() == tmp_path / "step_00000001"
        assert not writer.is_unfinished
        return str(refusal.value)

    for message in run_distributed(work, 2):
        assert message.startswith(f"train.output: the checkpoint {tmp_path}/step_00000001 cannot be written (full)")


@pytest.mark.parametrize("leftover", ["step_00000001.tmp", "step_00000001.old.tmp"])
def test_what_a_crash_left_does_not_stand_in_the_way(tmp_path: Path, leftover: str) -> None:
    """A folder that was being deleted when the process died, and whose name is needed again to delete another."""

    def work(rank: int) -> list[str]:
        toy = Toy(toy_plan())
        writer = CheckpointWriter(tmp_path, keep=1)
        for step in (1, 2):
            if rank == 0:
                (tmp_path / leftover).mkdir(exist_ok=True)
                (tmp_path / leftover / "shard").write_text("half")
                if leftover.count(".") == 2 and step == 2:
                    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000001.old")
            dist.barrier()
            toy.step()
            writer.save(toy.model, toy.optimizer, TrainingState(step, {"samples_seen": 4 * step}, ""))
            writer.finish()
        return sorted(path.name for path in tmp_path.glob("step_*"))

    assert run_distributed(work, 2) == [["step_00000002"]] * 2
