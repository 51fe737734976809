"""Trainings whose processes are killed at random moments, and what they must come to.

A trial is drawn from its seed alone. Nodes have one process each. In a quarter of the trials pipelines are alike, and
those that lose a node are left out; in a quarter pipelines are two replicas that share all parameters by rows, and are
left out likewise. In the others they come from templates, are unlike, and become others when nodes
are lost: who is left takes another place and gets what it lacks from its peers. In a quarter templates differ in tensor
parallelism besides, so that halves are made of wholes and wholes of halves. In a third of the trials, of every kind but
where rows are shared, optimizer states are kept by f + 1 pipelines only (ZeRO-1), and there is one pipeline more.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from distributed import run_distributed
from ledger import Ids, applied_ids, recorded
from shared_segments import no_segment_left
from training import plan_of, run_config, train
from victims import PHASES, Board, Kill, Victim, observed

from motet.api import read_problem
from motet.config import RunConfig
from motet.models.from_run_file import build_node
from motet.plan import Plan, Replica, Stage
from motet.planner.from_run_file import plan_for
from motet.planner.templates.pipelines import Template, Templates
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.resilience.failure_log import FAILURES
from motet.resilience.launch_nodes import train_on_nodes
from motet.runtime.training.worker import train_worker

Layout = Literal["alike", "rows", "unlike", "shards"]
LAYOUTS: tuple[Layout, ...] = ("alike", "rows", "unlike", "shards")
LEFT_OUT: tuple[Layout, ...] = ("alike", "rows")
"""Without templates: pipelines that lose a node are left out."""
LARGEST_PIPELINE = {"alike": 2, "rows": 2, "unlike": 3, "shards": 4}
"""Nodes; all others have two."""
HOW = ("process", "process", "process", "process", "hang", "agent")
STEPS = 5
DETECT_S = float(os.environ.get("MOTET_CHAOS_DETECT_S", "8"))
"""More than the usual: machines that run tests may be busy, and a node that is not killed must not be lost. With 1 on a
quiet machine, trials tell how soon losses are noticed."""
LONGEST_DELAY_S = {"forward": 4e-3, "backward": 6e-3, "reduction": 3e-3, "optimizer step": 2e-3, "saving": 2e-2,
                   "recovery": 0.15}  # fmt: skip
"""About as long as the phase lasts."""
LONGEST_S = 120.0
"""Of a trial: two losses that are noticed by silence take 2 `DETECT_S`; with more, something had hung."""


@dataclass(frozen=True)
class Trial:
    seed: str
    layout: Layout
    tolerate: int
    kills: tuple[Kill, ...]
    zero1: bool = False

    @property
    def pipelines(self) -> tuple[int, ...]:
        """Nodes of each."""
        return pipelines_of(self.layout, self.tolerate, self.zero1)

    @property
    def num_nodes(self) -> int:
        return sum(self.pipelines)


def pipelines_of(layout: Layout, tolerate: int, zero1: bool) -> tuple[int, ...]:
    """Nodes of each. Where f + 1 keep all, ZeRO-1 would be nothing."""
    return (2,) * (tolerate + zero1) + (LARGEST_PIPELINE[layout],)


def draw_trial(seed: str, phase: str | None = None, layout: Layout | None = None, zero1: bool | None = None) -> Trial:
    """`phase`: of the first kill, or of the second if it is the recovery from another one."""
    rng = Random(seed)
    if zero1 is None:
        zero1 = Random(f"zero1/{seed}").random() < 1 / 3
    phase = phase or rng.choice(PHASES[:-1])
    layout = layout or rng.choice(LAYOUTS)
    zero1 = zero1 and layout != "rows"
    tolerate = 2 if phase == "recovery" else rng.choice([1, 2])
    nodes = _draw_nodes(rng, layout, pipelines_of(layout, tolerate, zero1))
    if phase == "recovery":
        kills = [draw_kill(rng, nodes[0], rng.choice(PHASES[:5])), draw_kill(rng, nodes[1], "recovery")]
    else:
        kills = [draw_kill(rng, nodes[0], phase)]
        if tolerate > 1 and rng.random() < 0.6:  # At the same moment, or in another step.
            same = rng.random() < 0.5
            kills.append(draw_kill(rng, nodes[1], phase, kills[0].after_steps if same else None))
        if tolerate == 1 and layout not in LEFT_OUT and kills[0].after_steps + 2 < STEPS:
            # Once the first is recovered from: what has two holders again may lose one.
            kills.append(draw_kill(rng, nodes[1], phase, kills[0].after_steps + 2))
    return Trial(seed, layout, tolerate, tuple(kills), zero1)


def with_last(trial: Trial, how: str) -> Trial:
    """The last node is lost in that way."""
    return replace(trial, kills=(*trial.kills[:-1], replace(trial.kills[-1], how=how)))


def _draw_nodes(rng: Random, layout: Layout, pipelines: tuple[int, ...]) -> list[int]:
    """Two that may be lost at once where two are tolerated."""
    if layout not in LEFT_OUT:
        return rng.sample(range(sum(pipelines)), k=2)
    # Who is killed during a recovery must have a part in it, so its own pipeline is whole.
    return [2 * pipeline + rng.randrange(2) for pipeline in rng.sample(range(len(pipelines)), k=2)]


def draw_kill(rng: Random, node: int, phase: str, after_steps: int | None = None) -> Kill:
    steps = rng.randrange(STEPS - 1) if after_steps is None else after_steps
    if phase == "saving":
        steps = max(1, steps)
    if phase == "recovery":
        steps = 0
    delay_s = rng.random() * LONGEST_DELAY_S[phase]
    return Kill(node, steps, phase, rng.randrange(3) if phase in PHASES[:3] else 0, delay_s, rng.choice(HOW))


def config_of(output: Path, tolerate: int, layout: Layout = "alike", zero1: bool = False) -> RunConfig:
    pipelines = pipelines_of(layout, tolerate, zero1)
    config = run_config(
        output,
        {name: {"dp": len(pipelines)} for name in ("vision", "audio", "language_model")},
        train__steps=STEPS,
        train__global_batch_size=12 if layout != "alike" or zero1 else 6,
        train__dtype="float64",
        train__checkpoint_every=1,
        train__failures={"tolerate": tolerate, "detect_s": DETECT_S},
        data__num_train=24,
        parallel__zero1=zero1,
    )
    if layout == "alike":
        return config
    values = config.model_dump(exclude_unset=True)
    if layout == "rows":
        number = sum(pipelines)
        values["cluster"] = {"num_devices": number, "num_nodes": number}
        values["parallel"] = {"planner": "fsdp", "num_microbatches": 1, "limits": {"dp": (number,)}}
        return RunConfig.model_validate(values)
    del values["model"]["encoders"]["audio"]  # A pipeline of two nodes has room for one encoder.
    values["data"] |= {"no_sound": 1.0, "no_image": 0.0}
    values["cluster"] = {"num_devices": sum(pipelines), "num_nodes": sum(pipelines)}
    values["parallel"] = {"planner": "oobleck", "num_microbatches": 2, "zero1": zero1}
    return RunConfig.model_validate(values)


@cache
def plan_and_templates(
    layout: Layout, tolerate: int, pipelines: tuple[int, ...], zero1: bool = False
) -> tuple[Plan, Templates | None]:
    config = config_of(Path(), tolerate, layout, zero1)
    if layout == "alike":
        return plan_of(config), None
    problem = read_problem(config)
    if layout == "rows":
        return plan_for(config, problem), None
    templates = make_templates(problem)
    if layout == "shards":
        templates = replace(templates, by_nodes=_shards(*(m.workload.num_layers for m in problem.modules.values())))
    return plan_with_sizes(problem, templates, pipelines), templates


def _shards(num_vision_layers: int, num_layers: int) -> dict[int, Template]:
    """Pipelines of three nodes have a tensor-parallel language model, those of four a tensor-parallel encoder."""

    def chain(*stages: tuple[int, int, tuple[int, ...]]) -> Replica:
        return Replica(stages=tuple(Stage(layers=(a, b), ranks=ranks, tp_size=len(ranks)) for a, b, ranks in stages))

    chains = {
        2: (chain((0, num_vision_layers, (0,))), chain((0, num_layers, (1,)))),
        3: (chain((0, num_vision_layers, (0,))), chain((0, num_layers, (1, 2)))),
        4: (chain((0, num_vision_layers, (0, 1))), chain((0, 2, (2,)), (2, num_layers, (3,)))),
    }
    return {
        n: Template(num_nodes=n, replicas={"vision": vision, "language_model": language_model})
        for n, (vision, language_model) in chains.items()
    }


@cache
def import_models() -> None:
    """Here, so that not every process of every trial has to."""
    config = config_of(Path(), 1)
    for name in config.model.module_names:
        build_node(config, name, None, torch.float64)


@cache
def undisturbed(
    tolerate: int, layout: Layout = "alike", zero1: bool = False
) -> tuple[tuple[float, ...], dict[int, Ids]]:
    """The losses, and the samples of every step. `zero1`: of trials with it; all ranks keep all states here."""
    with tempfile.TemporaryDirectory() as folder, recorded(Path(folder)):
        config = config_of(Path(folder), tolerate, layout, zero1)
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero1": False})})
        if layout == "alike":
            result = train(config, timeout=500)[0]
        else:
            plan, _ = plan_and_templates(layout, tolerate, (2,) * (tolerate + 1))
            result = run_distributed(lambda _: train_worker(config, plan), plan.num_ranks, timeout=500)[0]
        return tuple(result["losses"]), applied_ids(Path(folder))


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    killed: tuple[tuple[str, Kill], ...]
    """The phase in which each victim was, of those that were killed."""
    max_loss_error: float
    seconds: float
    """From the start of the processes to their end."""
    noticed_s: tuple[float | None, ...]
    """For each of `killed`: from the moment of the loss until an agent proposed to go on without the node; None: the
    training was over before."""
    log: tuple[dict[str, Any], ...]
    """Recoveries."""

    @property
    def killed_in(self) -> tuple[str, ...]:
        return tuple(phase for phase, _ in self.killed)

    @property
    def moved_bytes(self) -> int:
        return sum(line["moved_bytes"] for line in self.log)

    def to_json(self) -> str:
        """For benchmarks/chaos.py, which counts."""
        return json.dumps(
            {
                "seed": self.trial.seed,
                "layout": self.trial.layout,
                "tolerate": self.trial.tolerate,
                "detect_s": DETECT_S,
                "zero1": self.trial.zero1,
                "nodes": self.trial.num_nodes,
                "losses": [
                    {
                        "phase": phase,
                        "how": kill.how,
                        "node": kill.node,
                        "after_steps": kill.after_steps,
                        "noticed_s": noticed_s,
                    }
                    for (phase, kill), noticed_s in zip(self.killed, self.noticed_s, strict=True)
                ],
                "done": [line["done"] for line in self.log],
                "moved_bytes": self.moved_bytes,
                "max_loss_error": self.max_loss_error,
                "recovery_s": [line["recovery_s"] for line in self.log],
                "seconds": self.seconds,
            }
        )


def note(outcome: Outcome) -> None:
    """Prints what came of a trial, and appends it to the file that `MOTET_CHAOS_LOG` names."""
    line = outcome.to_json()
    print(line, flush=True)
    if path := os.environ.get("MOTET_CHAOS_LOG"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def run_trial(trial: Trial, board: Board | None = None) -> Outcome:
    """Raises `AssertionError` if something is not as it must be."""
    import_models()
    losses, ids = undisturbed(trial.tolerate, trial.layout, trial.zero1)
    plan, templates = plan_and_templates(trial.layout, trial.tolerate, trial.pipelines, trial.zero1)
    board = board or Board()
    victim = Victim(trial.kills, board)
    with no_segment_left(), tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), trial.tolerate, trial.layout, trial.zero1)
        started = time.monotonic()
        with recorded(Path(folder)), observed(victim):
            result = train_on_nodes(config, plan, templates, num_nodes=trial.num_nodes, node_size=1)
        seconds = time.monotonic() - started
        path = Path(folder) / FAILURES
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert applied_ids(Path(folder)) == ids, trial  # No sample lost or doubled, and their order.
    board.check_phases()
    log = tuple(lines)
    fired = {kill: board.fired_at(i) for i, kill in enumerate(trial.kills) if board.is_fired(i)}
    assert len(result["losses"]) == len(losses), (trial, result["losses"], log)
    assert result["checkpoint"].endswith(f"step_{STEPS:08d}"), (trial, result["checkpoint"], log)
    assert seconds < LONGEST_S, (trial, seconds, log)
    error = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], losses, strict=True))
    assert error <= 1e-6, (trial, error, log)
    lost = {change["node"] for line in log for change in line["changes"] if change["kind"] == "lost"}
    assert lost <= {kill.node for kill in fired}, (trial, log)
    for line in log:
        assert line["done"].startswith(("went on", "nothing had been trained")), (trial, log)
    noticed_s = tuple(_noticed_s(kill, fired_at, log) for kill, fired_at in fired.items())
    killed = tuple((board.phase_of(kill), kill) for kill in fired)
    return Outcome(trial, killed, error, seconds, noticed_s, log)


def _noticed_s(kill: Kill, fired_at: float, log: Sequence[dict[str, Any]]) -> float | None:
    lost_at = fired_at + (kill.delay_s if kill.how in ("process", "hang", "cut") else 0.0)
    changes = (change for line in log for change in line["changes"])
    return next((change["noticed_at"] - lost_at for change in changes if change["node"] == kill.node), None)
