"""A node without room for its ranks does not take part, and a run on one machine does not begin without room."""

from collections.abc import Callable
from pathlib import Path

import pytest
from interrupted_training import config_of, failures, train_and, undisturbed
from joining_nodes import one_that_joins
from training import plan_of, run_config
from waiting import wait_until

from motet.api import read_problem
from motet.cli.main import main
from motet.planner.evaluate import evaluate
from motet.resilience.failure_log import FAILURES
from motet.resilience.health import free_memory
from motet.resilience.health.free_memory import MIB, MemoryNeeds, free_host_bytes, needs_of_ranks, why_too_little
from motet.runtime.training.trainer import Trainer


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    return lambda free: monkeypatch.setattr(free_memory, "free_host_bytes", lambda: free)


def test_all_ranks_of_a_machine_count(set_free: Callable[[int | None], None]) -> None:
    needs = MemoryNeeds(host_bytes=10 * MIB)
    set_free(20 * MIB)
    assert why_too_little(needs, 2, None) is None
    told = "its machine has 20 MiB of free memory, and its 3 ranks need 30 MiB by the plan's prediction"
    assert why_too_little(needs, 3, None) == told
    set_free(None)
    assert why_too_little(needs, 3, None) is None


def test_a_device_that_others_use() -> None:
    needs = MemoryNeeds(device_bytes=100 * MIB)
    assert why_too_little(needs, 8, 100 * MIB) is None
    told = "its device has 99 MiB of free memory, and a rank needs 100 MiB by the plan's prediction"
    assert why_too_little(needs, 8, 100 * MIB - 1) == told


MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   6000 kB\nHugePages_Total:       0\n"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_counts(tmp_path: Path, version: int) -> None:
    """That of the machine, of the group, or of a group around it; page cache that the kernel frees is free."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert free_host_bytes(proc, groups) is None
    (proc / "meminfo").write_text(MEMINFO)
    assert free_host_bytes(proc, groups) == 6000 * 1024
    (proc / "self/cgroup").write_text("3:cpu:/a\n0::/job/step\n" if version == 2 else "4:cpu,memory:/job/step\n0::/\n")
    assert free_host_bytes(proc, groups) == 6000 * 1024
    if version == 2:
        write(groups / "job/step", memory__max="max", memory__current=10, memory__stat="anon 1\ninactive_file 0")
        write(groups / "job", memory__max=5000, memory__current=4000, memory__stat="anon 1\ninactive_file 500")
    else:
        of_step = {"memory__limit_in_bytes": 2**63 - 4096, "memory__usage_in_bytes": 10}
        write(groups / "memory/job/step", **of_step, memory__stat="cache 1\ntotal_inactive_file 0")
        of_job = {"memory__limit_in_bytes": 5000, "memory__usage_in_bytes": 4000}
        write(groups / "memory/job", **of_job, memory__stat="inactive_file 1\ntotal_inactive_file 500")
    assert free_host_bytes(proc, groups) == 1500


def test_this_machine_tells() -> None:
    free = free_host_bytes()
    assert free is not None
    assert free > 0


def test_the_need_is_that_of_the_plan_with_its_copies(tmp_path: Path) -> None:
    cluster = {"num_devices": 2, "num_nodes": 2}
    config = run_config(tmp_path, cluster=cluster)
    evaluation = evaluate(read_problem(config), plan_of(config))
    plain = needs_of_ranks(config, evaluation)
    assert [each.host_bytes for each in plain] == list(evaluation.result.peak_memory_bytes)
    assert MemoryNeeds.largest(plain).host_bytes == max(evaluation.result.peak_memory_bytes)
    with_copies = needs_of_ranks(run_config(tmp_path, cluster=cluster, train__failures={"copy_every": 1}), evaluation)
    static = [evaluation.costs.static_by_kind(rank) for rank in range(len(plain))]
    more = [4 * (kinds["weights"] + kinds["moments"]) for kinds in static]
    assert [b.host_bytes - a.host_bytes for a, b in zip(plain, with_copies, strict=True)] == more
    assert MemoryNeeds.largest([]) == MemoryNeeds()


def test_a_run_that_does_not_fit_on_this_machine_does_not_begin(
    tmp_path: Path, set_free: Callable[[int | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_free(1 * MIB)
    config = config_of(tmp_path / "output", cluster={"num_devices": 4, "num_nodes": 4})
    run_file = tmp_path / "run.yaml"
    run_file.write_text(config.model_dump_json())
    assert main(["train", str(run_file)]) == 2
    told = capsys.readouterr().err
    assert "motet: error: cluster.num_devices: the 4 ranks need" in told
    assert "and 1 MiB are free; end other programs" in told


def test_a_node_without_room_is_not_taken_in_and_the_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = config_of(tmp_path), plan_of(config_of(tmp_path))
    log = tmp_path / FAILURES

    def at_step(trainer: Trainer) -> None:
        if trainer.finished_steps == 3:
            wait_until(lambda: log.exists() and "refused" in log.read_text())

    needs = MemoryNeeds(host_bytes=2**60)
    with one_that_joins(config, plan, lambda: None, needs=needs):
        result = train_and(config, at_step)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [line] = failures(config)
    [refused] = line["changes"]
    assert (refused["kind"], refused["node"], line["done"]) == ("refused", None, "nothing")
    assert "MiB of free memory, and its rank needs 1099511627776 MiB" in refused["how"]
