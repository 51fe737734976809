"""A node whose device fails is lost before it takes part; the others go on without it."""

from pathlib import Path

import pytest
import torch
from interrupted_training import config_of, failures, once, undisturbed
from training import plan_of

from motet.resilience import recover
from motet.resilience.health import device as device_check
from motet.resilience.health.device import why_unfit
from motet.resilience.launch_nodes import train_on_nodes

CPU = torch.device("cpu")


def test_a_sound_device_is_fit() -> None:
    assert why_unfit(CPU) is None


def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.is_floating_point() and 1.0))
    assert why_unfit(CPU) == "cpu computes wrongly: a product of small whole numbers is not exact"


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "PROBE_BYTES", 2**60)
    assert (why_unfit(CPU) or "").startswith("cpu fails: ")


def test_a_device_that_is_gone() -> None:
    assert (why_unfit(torch.device("cuda:99")) or "").startswith("cuda:99 fails: ")


@pytest.mark.campaign
def test_the_others_go_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, first = config_of(tmp_path), once()
    monkeypatch.setattr(recover, "why_unfit", lambda device: "its device is hot" if first() else None)
    plan = plan_of(config)
    result = train_on_nodes(config, plan, None, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    lost = [change for line in failures(config) for change in line["changes"] if change["kind"] == "lost"]
    assert [change["how"] for change in lost] == ["its device is hot"]
