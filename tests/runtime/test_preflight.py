"""What is tried before the first step: links by name, and memory by rank."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm
from training import plan_of, run_config

from motet.cli.main import main
from motet.errors import UserError
from motet.parallel.mesh import build_mesh
from motet.plan import Edge, Plan
from motet.runtime.communication import preflight
from motet.runtime.communication.deadline import StepFailedError
from motet.runtime.communication.preflight import check_memory, device_memory_bytes, open_communicators
from motet.runtime.training.worker import train_worker
from motet.schedule.communicators import Link, plan_links
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Message, lower

CPU = torch.device("cpu")


def links_of(forward: set[tuple[int, int]], back: set[tuple[int, int]]) -> list[Link]:
    return sorted({Link(*pair, False) for pair in forward} | {Link(*pair, True) for pair in back})


def test_links_of_a_plan() -> None:
    """Forward ones, and back only where a gradient goes."""
    plan = vision_audio_llm(2, vision_trainable=((1, 2),))
    forward = {(0, 1), (1, 3), (2, 3), (3, 4), (4, 5)}
    back = {(3, 1), (3, 2), (4, 3), (5, 4)}
    assert plan_links(plan) == links_of(forward, back)


def test_no_batch_uses_another_link() -> None:
    plan = Plan(
        modules={
            "vision": module(replica(0), replica(1)),
            "llm": language_model(replica((2, 3), 4), replica((5, 6), 7)),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    links = set(plan_links(plan))
    for lacking in ({}, {0: ["vision"]}, {0: ["vision"], 1: ["vision"], 3: ["vision"]}):
        routes = routes_of(plan, samples(5, ["vision", "llm"], lacking))
        program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
        used = {Link(step.sender, step.receiver, step.gradient) for step in program.steps if isinstance(step, Message)}
        assert used
        assert used <= links


def test_every_replica_of_a_share_may_meet_every_other() -> None:
    """However few microbatches there are: samples are dealt by their work."""
    encoders, llms = [replica(r) for r in range(4)], [replica(4), replica(5)]
    plan = Plan(
        modules={"vision": module(*encoders, trainable=((0, 1),)), "llm": language_model(*llms)},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=1,
    )
    forward = {(0, 4), (1, 4), (2, 5), (3, 5)}
    assert plan_links(plan) == links_of(forward, {(b, a) for a, b in forward})
    three = replace(plan, modules={**plan.modules, "llm": language_model(*llms, replica(6))})
    assert len(plan_links(three)) == 2 * 4 * 3


def test_every_link_and_group_is_tried() -> None:
    """Two replicas of a stage of two ranks and a stage of one."""
    plan = Plan(modules={"llm": language_model(replica((0, 1), 2), replica((3, 4), 5))}, edges=(), num_microbatches=1)

    def work(rank: int) -> int:
        return open_communicators(build_mesh(plan, timedelta(seconds=20)), CPU, {})

    # Ranks 0 and 3 send to the next stage and receive from it, 1 and 4 only receive from it: the tensor-parallel group
    # holds the activation whole. Then each rank has a sum, and those of the first stage have their group.
    assert run_distributed(work, 6) == [4, 3, 4, 4, 3, 4]


def test_a_link_that_is_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = chain(3, 1)
    original = dist.isend

    def isend(tensor: torch.Tensor, receiver: int, group: None, tag: int) -> dist.Work | None:
        if (dist.get_rank(), receiver) == (1, 2):
            raise RuntimeError("no route to host")
        return original(tensor, receiver, group=group, tag=tag)

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(preflight, "LONGEST_TRIAL", timedelta(seconds=1))

    def work(rank: int) -> None:
        mesh = build_mesh(plan, timedelta(seconds=20))
        with pytest.raises(StepFailedError) as failure:
            open_communicators(mesh, CPU, {})
        (tmp_path / str(rank)).write_text(str(failure.value))

    with pytest.raises(AssertionError):  # Connections are broken afterwards.
        run_distributed(work, 3, timeout=300)
    said = [(tmp_path / str(rank)).read_text() for rank in (1, 2)]
    assert said[0] == "rank 1: the link from rank 1 to rank 2 failed: no route to host"
    assert said[1].startswith("rank 2: the link from rank 1 to rank 2 failed: ")


def test_a_group_that_does_not_sum_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(modules={"llm": language_model(replica(0), replica(1))}, edges=(), num_microbatches=1)

    def work(rank: int) -> str:
        mesh = build_mesh(plan, timedelta(seconds=20))
        monkeypatch.setattr(dist, "all_reduce", lambda probe, group: None)
        with pytest.raises(StepFailedError) as failure:
            open_communicators(mesh, CPU, {})
        return str(failure.value)

    assert run_distributed(work, 2) == [
        f"rank {rank}: the sum llm.R[0:1) of ranks 0, 1 summed ones to 1.0" for rank in (0, 1)
    ]


def test_memory_is_refused_on_all_ranks_naming_the_one() -> None:
    def work(rank: int) -> list[str]:
        check_memory([10, 10], CPU, None)
        check_memory([], CPU, 1.0)
        check_memory([100, 200], CPU, 200.0)
        said = []
        for limit in (150.0 * 2**20, None):
            with pytest.raises(UserError) as refusal:
                check_memory([100 * 2**20, 2**60], CPU, limit)
            said.append(str(refusal.value))
        return said

    first, second = run_distributed(work, 2)
    assert first == second
    assert all(
        said.startswith(f"cluster.memory_bytes: rank 1 would need {2**40} MiB, but its device") for said in first
    )
    assert "has 150 MiB; use more pipeline stages" in first[0]
    assert f"has {device_memory_bytes(CPU) / 2**20:.0f} MiB" in first[1]


def test_the_worker_refuses_before_it_builds_anything(tmp_path: Path) -> None:
    config = run_config(tmp_path / "output")
    plan = plan_of(config)
    with pytest.raises(AssertionError, match=r"UserError: cluster\.memory_bytes: rank 1 would need"):
        run_distributed(lambda rank: train_worker(config, plan, (2**20, 2**60)), plan.num_ranks)
    assert not (tmp_path / "output").exists()


def test_the_command_line_passes_the_forecast_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that is smaller than the catalogue's device."""
    monkeypatch.setattr(preflight, "device_memory_bytes", lambda device: 1000)
    config = run_config(tmp_path / "output", cluster={"num_devices": 2})
    run_file = tmp_path / "run.yaml"
    run_file.write_text(config.model_dump_json())
    assert main(["train", str(run_file)]) == 2
    assert "motet: error: cluster.memory_bytes: rank 0 would need" in capsys.readouterr().err
