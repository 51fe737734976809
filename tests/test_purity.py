"""What decides imports no torch: a laptop without it can plan, and `motet plan --help` is quick."""

import json
import pkgutil
import subprocess
import sys

import pytest

import motet

PURE = (
    "motet.plan",
    "motet.addresses",
    "motet.config",
    "motet.ragged_arrays",
    "motet.shapes.module_shape",
    "motet.shapes.diffusion",
    "motet.timeline",
    "motet.errors",
    "motet.assignment.sample",
    "motet.assignment.batch_assignment",
    "motet.data.formats.conversation_sources",
    "motet.data.formats.described",
    "motet.balancing",
    "motet.assignment.batch_assignment",
    "motet.data.preparation.encoder_layout",
    "motet.data.loader",
    "motet.data.conversation.chat",
    "motet.data.service.tickets",
    "motet.data.service.tickets",
    "motet.data.service.producer",
    "motet.data.service.tickets",
    "motet.data.preparation.encoder_layout",
    "motet.data.run_file.samples",
    "motet.data.preparation.sample_layout",
    "motet.families.hf_config",
    "motet.families.token_counts",
    "motet.attention.masks.interval_mask",
    "motet.attention.masks.token_layout",
    "motet.attention.masks.rules",
    "motet.attention.masks.rules",
    "motet.attention.masks.bitfield",
    "motet.attention.masks.tile_counts",
    "motet.attention.masks.distribution",
    "motet.attention.masks.attention_time",
    "motet.attention.kernels.device_mask",
    "motet.attention.masks.distribution",
    "motet.schedule",
    "motet.simulator",
    "motet.planner",
    "motet.report",
    "motet.costs",
    "motet.addresses",
    "motet.resilience.interruptible_wait",
    "motet.resilience.agent",
    "motet.resilience.process_control",
    "motet.resilience.failure_log",
    "motet.resilience.store.store_failover",
    "motet.resilience.membership",
    "motet.resilience.stragglers",
    "motet.resilience.succession",
)
"""Modules, and packages with all that they hold."""

IMPURE = "motet.costs.profiling"
"""What begins so measures on real devices."""

SCRIPT = """
import importlib, json, sys
guilty = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if not guilty and {"torch", "transformers"} & sys.modules.keys():
        guilty.append(name)
print(json.dumps(guilty))
"""


def pure_modules() -> list[str]:
    every = [module.name for module in pkgutil.walk_packages(motet.__path__, "motet.", onerror=lambda name: None)]
    return [
        name
        for name in every
        if any(name == pure or name.startswith(f"{pure}.") for pure in PURE) and not name.startswith(IMPURE)
    ]


def first_to_import_torch(names: list[str]) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(names)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_what_decides_imports_no_torch() -> None:
    assert first_to_import_torch(pure_modules()) == []


@pytest.mark.parametrize("name", PURE)
def test_every_pure_name_exists(name: str) -> None:
    assert name in pure_modules()


def test_the_test_can_fail() -> None:
    assert first_to_import_torch(["motet.plan", "motet.runtime.executor"]) == ["motet.runtime.executor"]
