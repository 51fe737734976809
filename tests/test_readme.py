"""What the README shows is true: its tree, its run file, its program."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from checkout import ROOT
from distributed import run_distributed

from motet.config import load_run_config

README = (ROOT / "README.md").read_text()


def code_block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL).group(1)  # type: ignore[union-attr]


def test_the_tree_names_every_file_once() -> None:
    tree = README.partition("## What is where")[2].partition("A reader's way in")[0]
    entries = re.findall(r"^( +)(\S+?)(/| +)(?: |$)", tree, flags=re.MULTILINE)
    listed, folders = set(), list[str]()
    for indent, name, slash in entries:
        depth = len(indent) // 4 - 1
        folders = folders[:depth]
        if slash == "/":
            folders.append(name)
        else:
            path = "/".join([*folders, name])
            assert path not in listed, f"{path} stands twice"
            listed.add(path)
    source = ROOT / "src" / "motet"
    present = {str(path.relative_to(source)) for path in source.rglob("*.py") if path.name != "__init__.py"}
    assert listed == present, f"missing: {sorted(present - listed)}; gone: {sorted(listed - present)}"


def test_the_run_file_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(code_block("yaml"))
    assert load_run_config(path).train.dtype == "bfloat16"


def test_the_program_runs_and_learns(capfd: pytest.CaptureFixture[str]) -> None:
    program = compile(code_block("python"), "README.md", "exec")

    def work(rank: int) -> None:
        dist.init_process_group = lambda backend: None  # type: ignore[assignment]  # There is a group already.
        exec(program, {"__name__": "__main__"})

    run_distributed(work, 3, timeout=240)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capfd.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
