"""The public names of `motet`: lazy, typed, and the same as what the command line runs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from tiny_run import write_tiny_run

import motet
from motet.cli.main import main

TYPED = """
import motet
from motet import Plan

reveal_type(motet.Plan)
reveal_type(motet.make_plan("run.yaml").plan.num_ranks)
reveal_type(motet.ParallelSpec(pp_size=2))
reveal_type(motet.load_run_config("run.yaml"))
reveal_type(motet.verify("run.yaml"))

def fastest(run: str) -> Plan:
    try:
        predictions = [motet.make_plan(run, [f"parallel.planner={name}"]) for name in ("megatron", "cornstarch")]
    except motet.UserError as error:
        raise SystemExit(str(error)) from None
    return min(predictions, key=lambda prediction: prediction.iteration_time_s).plan

motet.make_plan(64)
motet.nothing
"""
"""A user's script with two mistakes in its last lines."""


def mypy(script: Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return result.stdout.splitlines()


def test_types_of_a_users_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TYPED)
    lines = mypy(script)
    revealed = [found[1] for line in lines if (found := re.search(r'Revealed type is "(.*)"', line))]
    assert "-> motet.plan.Plan" in revealed[0]
    assert [name.replace("builtins.", "") for name in revealed[1:]] == [
        "int",
        "motet.runtime.parallel_specs.ParallelSpec",
        "motet.config.run_file.RunConfig",
        "dict[str, Any]",
    ]
    errors = [line for line in lines if ": error: " in line and "Call to untyped" not in line]
    num_lines = len(TYPED.splitlines())
    assert [int(line.split(":")[1]) for line in errors] == [num_lines - 1, num_lines], lines


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "motet" / "py.typed").exists()


@pytest.mark.parametrize("name", motet.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(motet, name) is not None
    assert name in dir(motet)


def test_every_lazy_name_has_a_type() -> None:
    source = (ROOT / "src" / "motet" / "__init__.py").read_text()
    typed = set(re.findall(r"^    from (\S+) import (\w+) as \2$", source, re.M))
    assert typed == {(module, name) for name, module in re.findall(r'^    "(\w+)": "(\S+)",$', source, re.M)}
    assert {name for _, name in typed} == set(motet.__all__) - {"__version__"}


def test_importing_the_package_and_planning_import_no_torch(tmp_path: Path) -> None:
    run = write_tiny_run(tmp_path)
    code = (
        "import sys, motet\n"
        "assert not {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        f"assert motet.simulate({str(run)!r}, plan=motet.make_plan({str(run)!r}).plan).fits\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([str(argument) for argument in (*arguments, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


def without_times(report: Any) -> dict[str, Any]:
    values = json.loads(json.dumps(dict(report)))
    return {key: value for key, value in values.items() if key != "planning_time_s"}


def test_functions_return_what_commands_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, plan = write_tiny_run(tmp_path), tmp_path / "plan.json"
    prediction = motet.make_plan(run, ["parallel.num_microbatches=2"])
    plan.write_text(prediction.plan.to_json())
    override = ("--set", "parallel.num_microbatches=2")
    assert without_times(prediction.report) == without_times(printed(capsys, "plan", run, *override))
    slowed = motet.simulate(run, plan=plan, straggler_factors={1: 3.0}, jitter=0.1, seed=5)
    options = ("--straggler", "1=3", "--jitter", 0.1, "--seed", 5)
    expected = printed(capsys, "simulate", run, "--plan", plan, *options)
    assert without_times(slowed.report) == without_times(expected)
    assert slowed.iteration_time_s > prediction.iteration_time_s
    assert f"{1e3 * slowed.iteration_time_s:.2f} ms" in str(slowed)


def test_a_configuration_takes_no_overrides(tmp_path: Path) -> None:
    config = motet.load_run_config(write_tiny_run(tmp_path))
    assert motet.make_plan(config).plan.num_ranks == config.cluster.num_devices
    with pytest.raises(motet.UserError, match=r"overrides: 'train.steps=3' changes a run file; give its path"):
        motet.make_plan(config, ["train.steps=3"])
