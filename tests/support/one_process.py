"""Scenarios against one process of plain transformers, as `motet verify` compares them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from distributed import run_distributed
from scenario import PLACEHOLDERS, Scenario, ScenarioBatch

from motet.config import RunConfig
from motet.families.configured_graph import read_graph
from motet.models.from_run_file import build_node, plain_nodes
from motet.models.materialize import float64_throughout
from motet.plan import LANGUAGE_MODEL
from motet.runtime.assembly import PARAMETER_DTYPES, build_engine
from motet.runtime.engine import Engine
from motet.runtime.verification.verify import Comparison, verify_batch

T = TypeVar("T")
CPU = torch.device("cpu")


@torch.no_grad()
def perturb(engine: Engine) -> None:
    """Fresh norms, biases and gates (of one, zero and zero) would hide mistakes."""
    for p in engine.model.parameters:
        if not p.is_kept:
            continue
        generator = torch.Generator().manual_seed(len(p.name) * 1009 + sum(map(ord, p.name)))
        noise = 0.15 * torch.randn(p.full_shape, generator=generator, dtype=torch.float64)
        is_gate = noise.numel() == 1
        p.parameter.add_(p.cut((noise + 0.7 * is_gate).to(p.parameter)))


Before = Callable[[Engine, RunConfig, ScenarioBatch], None]
"""Collective: what is done with the engine before its gradients are compared."""


def verify(
    scenario: Scenario,
    before: Before = lambda engine, config, batch: None,
    device: torch.device = CPU,
    after: Before = lambda engine, config, batch: None,
) -> Comparison | None:
    """Collective: called on every rank of the plan. `device`: of the stages; the reference runs on the CPU. `after`:
    what is done with the engine after its gradients were compared."""
    config = scenario.config()
    plan = scenario.plan(config)
    assert dist.get_world_size() == plan.num_ranks
    with float64_throughout() if scenario.dtype == "float64" else nullcontext():
        engine: Engine = build_engine(config, plan, device)
        perturb(engine)
        batch = ScenarioBatch(scenario, config)
        before(engine, config, batch)
        comparison = verify_batch(
            engine,
            batch,
            lambda: plain_nodes(config, PLACEHOLDERS),
            dtype=scenario.dtype,
        )
        after(engine, config, batch)
        return comparison


def prepare(scenario: Scenario) -> None:
    """Reads shapes and what blocks read before processes are forked, which would read them all again."""
    config = scenario.config()
    plan = scenario.plan(config)
    read_graph(config)
    first = plan.modules[LANGUAGE_MODEL].replicas[0].stages[0].layers
    with float64_throughout() if scenario.dtype == "float64" else nullcontext():
        build_node(config, LANGUAGE_MODEL, first, PARAMETER_DTYPES[config.train.dtype]).make_stage(first)


def check(scenario: Scenario, *, tolerance: float = 1e-9, before: Before = lambda engine, config, batch: None) -> None:
    """On processes of its own."""
    prepare(scenario)
    comparison = run_distributed(lambda rank: verify(scenario, before), scenario.num_ranks)[0]
    assert comparison.failures == []
    assert comparison.max_grad_rel_err <= tolerance


Run = Callable[..., list[Any]]
"""Starts processes, as `run_distributed` does."""


def check_together(
    scenarios: Sequence[Scenario],
    *,
    before: Before = lambda engine, config, batch: None,
    run: Run = run_distributed,
) -> dict[Scenario, Comparison]:
    """All must pass. Those with one number of ranks share a start of processes."""
    by_size: dict[int, list[Scenario]] = defaultdict(list)
    for scenario in scenarios:
        by_size[scenario.num_ranks].append(scenario)
    found = {}
    for num_ranks, group in sorted(by_size.items()):
        for scenario in group:
            prepare(scenario)
        comparisons = run(_verify_all, num_ranks, group, before, timeout=500)[0]
        found.update(zip(group, comparisons, strict=True))
    return found


def _verify_all(rank: int, scenarios: Sequence[Scenario], before: Before) -> list[Comparison | None]:
    comparisons = []
    for scenario in scenarios:
        try:
            comparison = verify(scenario, before)
            if comparison is not None:
                assert comparison.passed, comparison.failures
                assert comparison.world_size == scenario.num_ranks
        except BaseException as error:
            error.add_note(str(scenario))
            raise
        comparisons.append(comparison)
    return comparisons


def check_drawn(draw: Callable[[Random], T], check: Callable[[T], None], seed: str, num_draws: int) -> None:
    """`num_draws` scenarios; a failure tells its own."""
    for i in range(num_draws):
        scenario = draw(Random(f"{seed}/{i}"))
        try:
            check(scenario)
        except BaseException as error:
            error.add_note(f"draw(Random('{seed}/{i}')): {scenario}")
            raise
