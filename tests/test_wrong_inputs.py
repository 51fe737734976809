"""Wrong inputs: each is refused in one line that names the key or the place, and none hangs."""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from forked_commands import ForkedCommands, forked_commands
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from training import plan_of, run_config
from wrong_inputs import CORPUS, RIGHT, RIGHT_VALUES, WrongInput, write_right_files

from motet.api import read_problem
from motet.cli.main import main
from motet.config import load_run_config
from motet.errors import UserError
from motet.plan import Plan
from motet.strict_parsing import parse_yaml

LONGEST_LINE = 2000
HANGS_S = 120
"""On a busy machine."""
HANGS_CPU_S = 10
"""Beyond the import of torch and transformers, which takes 5 s on one machine and 10 s on another."""
YES = "yes\n" * 9


@pytest.fixture(scope="module")
def right_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_right_files(tmp_path_factory.mktemp("right"))


def arguments_for(given: WrongInput, folder: Path, right_files: Path) -> list[str]:
    """Writes the input into a folder. Returns the arguments of the command line."""
    if given.text is None:
        shutil.copytree(right_files, folder, dirs_exist_ok=True)
        given.change(folder)
    else:
        (folder / "run.yaml").write_text(given.text)
    return ["plan", "run.yaml", *(part for override in given.overrides for part in ("--set", override))]


def check_refusal(given: WrongInput, status: int, out: str, err: str, folder: Path) -> None:
    assert status == 2, err[-2000:]
    assert out == ""
    (line,) = err.splitlines()
    assert len(line) < LONGEST_LINE
    assert re.search(f"^motet: error: .*{given.expected}" if given.expected else "^motet: error: ", line), line
    assert not (folder / "executed").exists()


def test_there_are_many() -> None:
    assert len(CORPUS) >= 350
    assert len({given.name for given in CORPUS}) == len(CORPUS)


def test_the_right_files_are_read(
    tmp_path: Path, right_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RIGHT_VALUES))
    assert load_run_config(tmp_path / "run.yaml") == RIGHT
    monkeypatch.chdir(right_files)
    assert main(["plan", "run.yaml"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("given", CORPUS, ids=str)
def test_each_is_refused(
    given: WrongInput,
    tmp_path: Path,
    right_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = arguments_for(given, tmp_path, right_files)
    monkeypatch.chdir(tmp_path)
    status = main(arguments)
    check_refusal(given, status, *capsys.readouterr(), tmp_path)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    with forked_commands(write_right_files(tmp_path_factory.mktemp("commands")), ["plan", "run.yaml"]) as commands:
        yield commands


@pytest.fixture(scope="module")
def import_cpu_s() -> float:
    """Processor seconds for the imports of what reads a model's configuration."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import motet.families.shape_reading.shape_walker"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.campaign
@pytest.mark.parametrize("given", CORPUS, ids=str)
def test_each_is_refused_by_the_command_line(
    given: WrongInput, tmp_path: Path, right_files: Path, commands: ForkedCommands, import_cpu_s: float
) -> None:
    """A process of its own, whose stdin says yes to whatever it asks."""
    arguments = arguments_for(given, tmp_path, right_files)
    result = commands.run(tmp_path, arguments, given=YES, timeout_s=HANGS_S)
    check_refusal(given, result.status, result.out, result.err, tmp_path)
    assert result.cpu_s < HANGS_CPU_S + import_cpu_s


@pytest.mark.campaign
@pytest.mark.parametrize("given", CORPUS[::20], ids=str)
def test_some_are_refused_by_a_command_line_that_has_imported_nothing(
    given: WrongInput, tmp_path: Path, right_files: Path
) -> None:
    command = [sys.executable, "-m", "motet", *arguments_for(given, tmp_path, right_files)]
    result = subprocess.run(command, cwd=tmp_path, input=YES, capture_output=True, text=True, timeout=HANGS_S)
    check_refusal(given, result.returncode, result.stdout, result.stderr, tmp_path)


def test_a_device_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(UserError, match="/dev/zero: is larger than 4 MiB"):
        load_run_config("/dev/zero")


@pytest.mark.parametrize("rank", [10**9, -1, 7])
def test_ranks_of_a_plan(rank: int) -> None:
    plan = json.loads(plan_of(run_config(Path())).to_json())
    plan["modules"]["language_model"]["replicas"][0]["stages"][0]["ranks"] = [rank]
    with pytest.raises(ValueError, match="rank") as refused:
        Plan.from_json(json.dumps(plan))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("number", [10**6 + 1, 10**30])
@pytest.mark.parametrize("key", ["num_microbatches", "replica_microbatches"])
def test_microbatches_of_a_plan(key: str, number: int) -> None:
    """A schedule of so many would not end."""
    plan = json.loads(plan_of(run_config(Path())).to_json())
    num_replicas = len(plan["modules"]["language_model"]["replicas"])
    plan[key] = number if key == "num_microbatches" else [number] * num_replicas
    where = key if key == "num_microbatches" else rf"{key}\[0\]"
    with pytest.raises(ValueError, match=f"{where}: is {number}; give at most 1000000"):
        Plan.from_json(json.dumps(plan))


def test_costs_of_a_model_of_other_layers(
    tmp_path: Path, right_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were measured before the model was changed."""
    monkeypatch.chdir(right_files)
    table = json.loads(read_problem(load_run_config("run.yaml")).table.to_json())
    table["modules"]["vision"]["1"]["layers"].pop()
    (tmp_path / "costs.json").write_text(json.dumps(table))
    capsys.readouterr()
    assert main(["plan", "run.yaml", "--set", f"cluster.costs={tmp_path / 'costs.json'}"]) == 2
    assert "costs: vision has 4 layers in the table, but 5 in the model" in capsys.readouterr().err


@examples(200)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda drawn: drawn.decode("latin-1")))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        parse_yaml(text, "run.yaml")
    except UserError as error:
        message = str(error)
    assert "\n" not in message
