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
    "motet.arrays",
    "motet.catalogue",
    "motet.cluster",
    "motet.device",
    "motet.workload",
    "motet.workload_diffusion",
    "motet.timeline",
    "motet.errors",
    "motet.data.sample",
    "motet.data.assignment",
    "motet.data.conversation_sources",
    "motet.data.described",
    "motet.data.assignment_baselines",
    "motet.data.assignment_disttrain",
    "motet.data.assignment_entrain",
    "motet.data.assignments",
    "motet.data.packing",
    "motet.data.pairwise_deferral",
    "motet.data.encoder_layout",
    "motet.data.loader",
    "motet.data.plain_tokenizer",
    "motet.data.preprocessing.access",
    "motet.data.preprocessing.facts",
    "motet.data.preprocessing.producer",
    "motet.data.preprocessing.tickets",
    "motet.data.processor_sizes",
    "motet.data.run_file_samples",
    "motet.data.sample_layout",
    "motet.models.composite_towers",
    "motet.models.token_counts",
    "motet.attention.interval_mask",
    "motet.attention.layout",
    "motet.attention.rules",
    "motet.attention.own_masks",
    "motet.attention.bitfield",
    "motet.attention.blocks",
    "motet.attention.distribution",
    "motet.attention.execution",
    "motet.attention.kernels.tasks",
    "motet.attention.shares",
    "motet.schedule",
    "motet.simulator",
    "motet.planner",
    "motet.plots",
    "motet.costs",
    "motet.reproduce",
    "motet.resilience.pipelines",
    "motet.resilience.microbatches",
    "motet.resilience.sizes",
    "motet.resilience.holdings",
    "motet.resilience.kept_states",
    "motet.resilience.reconfigure",
    "motet.resilience.node_tables",
    "motet.resilience.mapping_problem",
    "motet.resilience.failures",
    "motet.resilience.interfaces",
    "motet.resilience.members",
    "motet.resilience.waits",
    "motet.resilience.replay",
    "motet.resilience.forecast",
    "motet.resilience.counted_tables",
    "motet.resilience.combinations",
    "motet.resilience.stage_mapping",
    "motet.resilience.agent",
    "motet.resilience.children",
    "motet.resilience.control",
    "motet.resilience.copies",
    "motet.resilience.state_keepers",
    "motet.resilience.senders",
    "motet.resilience.failure_log",
    "motet.resilience.gathering",
    "motet.resilience.membership",
    "motet.resilience.reunion",
    "motet.resilience.run_record",
    "motet.resilience.stragglers",
    "motet.resilience.succession",
    "motet.resilience.votes",
    "motet.resilience.watchdog",
    "motet.resilience.watched_process",
    "motet.resilience.whereabouts",
)
"""Modules, and packages with all that they hold."""

IMPURE = "motet.costs.profiler"
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
