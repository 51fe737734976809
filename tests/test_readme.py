"""What the README shows is true: its run file, what commands print, its program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from checkout import ROOT
from distributed import run_distributed

from motet.cli.main import main
from motet.config import load_run_config

README = (ROOT / "README.md").read_text()


def code_block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL).group(1)  # type: ignore[union-attr]


def without_numbers(text: str) -> str:
    return re.sub(r" +", " ", re.sub(r"\d[\d.e+-]*", "N", text))


def test_it_is_short() -> None:
    assert len(README.encode()) <= 8192


def test_the_run_file_is_the_example(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(code_block("yaml"))
    assert load_run_config(path) == load_run_config(ROOT / "examples" / "tiny.yaml")


def test_commands_print_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but numbers, which depend on the machine's number of cores."""
    plan = tmp_path / "plan.json"
    shown = re.findall(r"^    \$ motet (plan|simulate) (\S+) .*\n((?:    [^$\n].*\n)+)", README, re.M)
    assert [command for command, _, _ in shown] == ["plan", "simulate"]
    for command, run_file, output in shown:
        assert main([command, str(ROOT / run_file), "--out" if command == "plan" else "--plan", str(plan)]) == 0
        printed = [without_numbers(line).strip() for line in capsys.readouterr().out.splitlines()]
        lines = [without_numbers(line).strip() for line in output.splitlines()]
        assert [line for line in lines if line != "..." and line not in printed] == []


def test_the_programs_imports_need_nothing_before_them(tmp_path: Path) -> None:
    """In a new process, as motet makes a torchvision for CUDA importable beside a torch for CPUs."""
    imports = "".join(re.findall(r"^(?:import|from) .*\n", code_block("python"), flags=re.MULTILINE))
    assert "transformers" in imports
    finished = subprocess.run(
        [sys.executable, "-c", imports], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


def test_the_program_runs_and_learns(capfd: pytest.CaptureFixture[str]) -> None:
    program = compile(code_block("python"), "README.md", "exec")

    def work(rank: int) -> None:
        dist.init_process_group = lambda backend: None  # type: ignore[assignment]  # There is a group already.
        exec(program, {"__name__": "__main__"})

    run_distributed(work, 3, timeout=240)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capfd.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
