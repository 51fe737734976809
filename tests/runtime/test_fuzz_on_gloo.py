"""The permanent fuzz, executed: drawn plans and assignments on real processes equal one process, in loss and gradients.

Heterogeneous replicas, unequal numbers of them, groups, shared ranks, copies, frozen layers, empty microbatches. Each
plan runs several batches, so that what one iteration leaves behind would show in the next. `MOTET_FUZZ_DRAWS` sets the
number of draws, `MOTET_FUZZ_SEED` the seed. With the first alone the seed is the time; it is printed, and every failure
says how to draw its problem again.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest
import torch
from distributed import run_distributed
from drawing import Limits, Problem, draw_problem
from sampling import in_campaigns
from split_backwards import split_at_random
from toy_model import ToyBatch, reference, toy_stage_maker

from motet.assignment.batch_assignment import contiguous_assignment
from motet.runtime.engine import Engine
from motet.schedule import program
from motet.schedule.generators import GENERATORS

USUAL_DRAWS, USUAL_SEED = 20, "7"
NUM_DRAWS = int(os.environ.get("MOTET_FUZZ_DRAWS", USUAL_DRAWS))
SEED = os.environ.get("MOTET_FUZZ_SEED") or (str(time.time_ns()) if "MOTET_FUZZ_DRAWS" in os.environ else USUAL_SEED)


def draws(num_draws: int = NUM_DRAWS, seed: str = SEED) -> Iterator[tuple[str, Problem]]:
    """(how to draw it again, problem), of those that the runtime takes: holders of a layer have groups of one size."""
    for i in range(num_draws):
        limits = Limits(max_ranks=6, max_group=1 + i % 2, equal_groups=True)
        yield f"draw_problem(Random('{seed}/{i}'), {limits})", draw_problem(Random(f"{seed}/{i}"), limits)


def batches_of(problem: Problem) -> list[Problem]:
    """The drawn batch, then its samples the other way round in an ordinary cut, then the drawn one again."""
    reverse = problem.samples[::-1]
    return [problem, Problem(problem.plan, contiguous_assignment(problem.plan, reverse), reverse), problem]


def run_all(rank: int, problems: list[tuple[str, Problem]]) -> None:
    for how, problem in problems:
        try:
            run_and_compare(problem)
        except BaseException as error:
            error.add_note(f"{how}\n{problem}")
            raise


def run_and_compare(problem: Problem) -> None:
    """Collective. Every rank computes the reference for itself."""
    plan = problem.plan
    batches = iter(batches_of(problem))
    current = problem
    engine = Engine(
        plan,
        toy_stage_maker(plan),
        device=torch.device("cpu"),
        boundary_dtype=torch.float64,
        assign=lambda plan, samples: current.assignment,
    )
    for current in batches:
        batch = ToyBatch(current.samples)
        loss, gradients = reference(plan, batch)
        engine.model.zero_gradients()
        assert engine.run(batch, forward_only=True).loss == pytest.approx(loss, rel=1e-11, abs=1e-13)
        result = engine.run(batch)
        assert result.loss == pytest.approx(loss, rel=1e-11, abs=1e-13)
        norm = float(sum(g.square().sum() for g in gradients.values())) ** 0.5
        assert result.gradient_norm == pytest.approx(norm, rel=1e-10, abs=1e-13)
        for p in engine.model.parameters:
            if p.parameter.requires_grad:
                assert p.parameter.grad is not None, p.name
                torch.testing.assert_close(p.parameter.grad, gradients[p.name], rtol=1e-10, atol=1e-13, msg=p.name)
            else:
                assert p.parameter.grad is None, p.name


@pytest.mark.parametrize("halves", [True, *in_campaigns([False])])
def test_drawn_plans_equal_one_process(halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`halves`: most backwards are cut in two, with their weight halves anywhere after."""
    if halves:
        cut = {name: split_at_random(generator, f"{SEED}/{name}") for name, generator in GENERATORS.items()}
        monkeypatch.setattr(program, "GENERATORS", cut)
    print(f"MOTET_FUZZ_SEED={SEED} MOTET_FUZZ_DRAWS={NUM_DRAWS}")
    by_size: dict[int, list[tuple[str, Problem]]] = defaultdict(list)
    for how, problem in draws():
        by_size[problem.plan.num_ranks].append((how, problem))
    for num_ranks, problems in sorted(by_size.items()):
        run_distributed(run_all, num_ranks, problems, timeout=60 + 10 * len(problems))


def test_the_usual_draws_have_all_that_a_plan_may_have() -> None:
    plans = [problem.plan for _, problem in draws(USUAL_DRAWS, USUAL_SEED)]
    modules = [module for plan in plans for module in plan.modules.values()]
    found = {
        "replicas that differ": any(
            [s.layers for s in a.stages] != [s.layers for s in b.stages]
            for module in modules
            for a in module.replicas
            for b in module.replicas
        ),
        "unequal numbers of replicas": any(len({len(m.replicas) for m in plan.modules.values()}) > 1 for plan in plans),
        "shared ranks": any(sum(len(s.ranks) for *_, s in plan.stages()) > plan.num_ranks for plan in plans),
        "groups": any(len(s.ranks) > 1 for plan in plans for *_, s in plan.stages()),
        "copies": any(module.copy_of for module in modules),
        "frozen modules": any(not module.trainable for module in modules),
        "several losses": any(sum(m.loss_weight > 0 for m in plan.modules.values()) > 1 for plan in plans),
        "several schedules": len({plan.schedule for plan in plans}) > 1,
    }
    assert [name for name, is_there in found.items() if not is_there] == []
