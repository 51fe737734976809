"""The rooms that decide import no torch: a laptop without it can plan, and `motet plan --help` is quick."""

import json
import pkgutil
import subprocess
import sys

import pytest

import motet

PURE = (
    *("errors", "ragged_arrays", "addresses", "timeline", "plan", "config", "cluster", "shapes", "assignment"),
    *("balancing", "schedule", "parallel.tensor_plans", "attention.masks", "simulator", "costs", "planner", "report"),
    *("families.hf_config", "families.token_counts", "families.configured_graph", "api", "cli", "strict_parsing"),
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
        "resilience.interruptible_wait",
        "resilience.membership",
        "resilience.process_control",
        "resilience.stragglers",
        "resilience.store.store_failover",
        "resilience.succession",
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


def first_to_import_torch(names: list[str]) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(names)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_what_decides_imports_no_torch() -> None:
    impure = modules(*IMPURE)
    assert first_to_import_torch([name for name in modules(*PURE) if name not in impure]) == []


@pytest.mark.parametrize("name", [*PURE, *IMPURE])
def test_every_name_exists(name: str) -> None:
    assert modules(name)


def test_the_test_can_fail() -> None:
    assert first_to_import_torch(["motet.plan", "motet.runtime.executor"]) == ["motet.runtime.executor"]
