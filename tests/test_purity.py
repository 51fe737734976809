"""The rooms that decide import no torch: a laptop without it can plan, and `motet plan --help` is quick."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import motet

PURE = (
    *(
        "errors",
        "ragged_arrays",
        "addresses",
        "timeline",
        "recomputation",
        "plan",
        "config",
        "cluster",
        "shapes",
        "assignment",
    ),
    *("balancing", "schedule", "parallel.tensor.tensor_plans", "attention.masks", "simulator", "costs", "planner"),
    "report",
    *(
        "families.hf_config",
        "families.encoders.token_counts",
        "families.configured_graph",
        "api",
        "cli",
        "strict_parsing",
    ),
    *(
        "data.formats",
        "data.tasks",
        "data.chat",
        "data.layouts",
        "data.loader",
        "data.run_file",
        "data.service.tickets",
    ),
    *(
        "resilience.agent",
        "resilience.failure_log",
        "resilience.health.clock",
        "resilience.health.free_memory",
        "resilience.health.neighbours",
        "resilience.interruptible_wait",
        "resilience.membership",
        "resilience.process_control",
        "resilience.stragglers",
        "resilience.store",
        "resilience.succession",
        "resilience.training_end",
    ),
)
"""Modules, and packages with all that they hold."""

IMPURE = ("costs.profiling",)
"""Of these packages, what measures on real devices."""

SCRIPT = """
import importlib, json, sys
guilty = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if not guilty and {"torch", "transformers"} & sys.modules.keys():
        guilty.append(name)
print(json.dumps(guilty))
"""


def modules(*rooms: str) -> list[str]:
    every = [module.name for module in pkgutil.walk_packages(motet.__path__, "motet.", onerror=lambda name: None)]
    return [name for name in every if any(f"{name}.".startswith(f"motet.{room}.") for room in rooms)]


def first_to_import_torch(names: list[str], path: str = "") -> list[str]:
    """`path`: a folder whose modules go before others of their names."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(names)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, *sys.path])}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_what_decides_imports_no_torch() -> None:
    impure = modules(*IMPURE)
    assert first_to_import_torch([name for name in modules(*PURE) if name not in impure]) == []


@pytest.mark.parametrize("name", [*PURE, *IMPURE])
def test_every_name_exists(name: str) -> None:
    assert modules(name)


def test_the_test_can_fail(tmp_path: Path) -> None:
    """With an empty module in the place of torch, which takes seconds to import."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "imports_torch.py").write_text("import torch")
    names = ["motet.plan", "imports_torch", "motet.schedule"]
    assert first_to_import_torch(names, str(tmp_path)) == ["imports_torch"]
