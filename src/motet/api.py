"""The commands as functions over run files: profile, make_plan, simulate, verify, train.

Each takes the path of a run file, or a `RunConfig`, and overrides such as `"train.steps=10"`, and raises `UserError`
in one line where the run file or a plan is wrong. torch is imported only by `profile`, `verify` and `train`.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.config import RunConfig, chosen_run, load_run_config, phases_of
from motet.environment import is_first_process, set_environment
from motet.errors import UserError
from motet.named_files import read_text
from motet.plan import LANGUAGE_MODEL, Plan
from motet.timeline import Timeline

if TYPE_CHECKING:
    from motet.assignment.sample import Sample
    from motet.costs.cost_model import CostTable
    from motet.data.layouts import SampleSource
    from motet.data.loader import LoadedBatch
    from motet.planner.choice import Choice
    from motet.planner.evaluate import Evaluation
    from motet.planner.problem import PlanningProblem
    from motet.resilience.health.free_memory import MemoryNeeds
    from motet.resilience.store.etcd import EtcdAddress, StoreAddress

RunFile = str | Path | RunConfig
PlanFile = str | Path | Plan

MANY_SAMPLES = 200_000
"""Above this size of a global batch, planning prints that it may take minutes."""

MAX_JITTER = 100
MAX_STRAGGLER_FACTOR = 1_000_000

MIN_START_TIMEOUT_S = 300.0
"""Least time for which a rank waits for others before the first step, and while a checkpoint is written."""


@dataclass(frozen=True)
class Prediction:
    """A plan with the predicted time and memory of one iteration."""

    evaluation: "Evaluation"
    """Program, costs and simulated result."""
    report: Mapping[str, Any]
    """The JSON of `motet plan` or `motet simulate`."""
    choice: "Choice | None" = None
    """The comparison of planners, if `parallel.planner` is `auto`."""

    @property
    def plan(self) -> Plan:
        return self.evaluation.plan

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return self.evaluation.fits

    @property
    def iteration_time_s(self) -> float:
        return self.evaluation.iteration_time_s

    @property
    def timeline(self) -> Timeline:
        """Spans of all ranks, on the simulator's clock."""
        return self.evaluation.result.timeline

    def __str__(self) -> str:
        """The text that the command prints: time, memory and a table of the stages."""
        from motet.report.plan_report import choice_text, report_text

        text = report_text(self.report)
        return f"{text}\n{choice_text(self.report['choice'])}" if self.choice else text


def profile(run: RunFile, overrides: Sequence[str] = ()) -> "CostTable":
    """Measures the costs of each layer on this machine, on as many processes as the run file has devices.

    Modules are measured at the tensor-parallel sizes of `parallel.explicit`, and where it gives them context
    parallelism or experts over ranks, with these too. Write `CostTable.to_json` to a file and name it in
    `cluster.costs`.
    """
    set_environment()
    config = _config(run, overrides)
    if config.model.composite is not None:
        raise UserError(
            "model: the layers of a whole model's encoder run together and cannot be profiled one by one; leave "
            "cluster.costs out, and costs are computed"
        )
    from motet.families.configured_graph import read_graph
    from motet.planner.from_run_file import explicit_degrees
    from motet.runtime.profile_worker import profile_in_processes

    return profile_in_processes(
        config,
        read_batch(config),
        explicit_degrees(config, read_graph(config).workloads).items(),
        num_devices=config.cluster.num_devices // config.cluster.num_nodes,
    )


def make_plan(
    run: RunFile,
    overrides: Sequence[str] = (),
    *,
    budget_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Prediction:
    """Lays the model out by the planner that the run file names, and predicts an iteration.

    Args:
        budget_s: with planner `auto`, seconds after which the search ends with the best plan so far, as it does on an
            interrupt (Ctrl-C).
        progress: called with a line of text for every better plan that `auto` finds.
    """
    config = _config(run, overrides)
    from motet.planner.evaluate import evaluate
    from motet.planner.from_run_file import plan_for
    from motet.planner.registry import choose
    from motet.report.plan_report import report_choice, report_evaluation

    problem = read_problem(config)
    started = time.perf_counter()
    choice = None
    if config.parallel.planner == "auto":
        choice = choose(
            problem,
            placement=config.parallel.placement,
            budget_s=budget_s,
            interruptible=True,
            progress=progress or (lambda line: None),
        )
    elif budget_s is not None:
        raise UserError(f"--budget-s: is for parallel.planner auto, not {config.parallel.planner}; leave it out")
    plan = choice.evaluation.plan if choice else plan_for(config, problem)
    planning_time_s = time.perf_counter() - started
    evaluation = choice.evaluation if choice else evaluate(problem, plan)
    report = report_evaluation(evaluation, planning_time_s=planning_time_s, dtype=config.train.dtype)
    if choice:
        report["choice"] = report_choice(choice)
    return Prediction(evaluation, report, choice)


def simulate(
    run: RunFile,
    overrides: Sequence[str] = (),
    *,
    plan: PlanFile | None = None,
    straggler_factors: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    shares_cards: bool = False,
) -> Prediction:
    """Predicts an iteration of a plan. If none is given, the run file's planner makes one.

    Args:
        straggler_factors: by rank, the factor by which its computations take longer.
        jitter: mean share by which computations take longer, at random.
        seed: seed of the jitter.
        shares_cards: whether messages that leave a node share its network cards.
    """
    config = _config(run, overrides)
    from motet.planner.evaluate import evaluate
    from motet.report.plan_report import report_evaluation

    problem = read_problem(config)
    plan = read_or_make_plan(plan, config, problem)
    if plan.num_ranks > problem.num_devices:
        raise UserError(
            f"--plan: has {plan.num_ranks} ranks, but cluster.num_devices is {problem.num_devices}; give as many "
            "devices, or another plan"
        )
    is_disturbed = bool(straggler_factors or jitter or shares_cards)
    evaluation = evaluate(problem, plan, folded=not is_disturbed)
    if is_disturbed:
        evaluation = _disturbed(evaluation, straggler_factors or {}, jitter, seed, shares_cards)
    report = report_evaluation(evaluation, dtype=config.train.dtype, is_disturbed=is_disturbed)
    return Prediction(evaluation, report)


def verify(
    run: RunFile, overrides: Sequence[str] = (), *, plan: PlanFile | None = None, steps: int = 0
) -> dict[str, Any]:
    """Compares loss and every gradient under the plan with the same model in one process of plain transformers.
    `steps`: if it is not 0, also compares the weights after this number of optimizer steps.

    Returns the JSON of `motet verify`; `passed` says whether they are equal. Starts its own processes; under torchrun
    it joins those, and the result is empty on all ranks but the first.
    """
    set_environment()
    config = _config(run, overrides)
    if steps and (config.train.dtype != "float64" or config.model.towers):
        what = "towers" if config.model.towers else f"train.dtype {config.train.dtype}"
        raise UserError(
            f"--steps: compares steps of the optimizer in float64, of models without towers, not {what}; "
            f"{'leave it out' if config.model.towers else 'add --dtype float64'}"
        )
    from motet.planner.evaluate import check_same_model

    problem = read_problem(config)
    plan = read_or_make_plan(plan, config, problem)
    check_same_model(problem, plan)
    config = _as_planned(config, plan)
    from motet.runtime.launch import launch
    from motet.runtime.verification.worker import verify_worker

    return launch(verify_worker, config, plan, steps, **_processes_of(config, plan)) or {}


def train(
    run: RunFile,
    overrides: Sequence[str] = (),
    *,
    plan: PlanFile | None = None,
    listen: "StoreAddress | None" = None,
    store: "EtcdAddress | None" = None,
) -> dict[str, Any]:
    """Trains, writes checkpoints, metrics and timelines into `train.output`, and exports the model for transformers.

    Returns the JSON of `motet train`. Starts its own processes; under torchrun it joins those, and the result is
    empty on all ranks but the first. A plan that does not fit is refused before any process is started.

    Args:
        listen: with `train.failures`: host and port, or a name in etcd, through which nodes of other machines join.
        store: with `train.failures`: the name in etcd through which the nodes of this machine agree; None: they agree
            through a process of this machine.
    """
    set_environment()
    whole = _read(run, overrides)
    if whole.train.phases and whole.train.only_phase is None:
        return _train_phases(whole, plan)
    config = chosen_run(whole)
    from motet.planner.evaluate import evaluate
    from motet.report.plan_report import report_evaluation, report_measured

    problem = read_problem(config)
    plan = read_or_make_plan(plan, config, problem)
    evaluation = evaluate(problem, plan)
    if not evaluation.fits:
        raise UserError(f"cluster.memory_bytes: the plan does not fit: {evaluation.overflows[0]}")
    from motet.runtime.training.output_folder import claimed_output
    from motet.runtime.verification.feature_check import check_features

    _check_export(config)
    check_features(config, plan)
    config = _as_planned(config, plan)
    # Before the folder is claimed: `train.overwrite` deletes checkpoints in it.
    needs = None if config.train.failures is None else _needs_of_nodes(config, evaluation, listen)

    # Under torchrun, the first rank claims the folder for all.
    with claimed_output(config.train) if is_first_process() else nullcontext(Path(config.train.output)) as output:
        if needs is not None:
            result = _train_on_nodes(config, evaluation, needs, listen, store)
        else:
            from motet.runtime.launch import launch
            from motet.runtime.training.worker import train_worker

            processes = _processes_of(config, plan)
            result = launch(train_worker, config, plan, evaluation.result.peak_memory_bytes, **processes)
        if not result:
            return {}
        timeline = Timeline.from_json(result["measured"].pop("timeline"))
        predicted = report_evaluation(evaluation, dtype=config.train.dtype)
        measured = report_measured(result["measured"], timeline, predicted)
        try:
            _save_timelines(output, {"predicted": evaluation.result.timeline, "measured": timeline})
            exported = None
            if config.train.export and result["checkpoint"] is not None:
                exported = str(export_checkpoint(config, result["checkpoint"]))
        except OSError as error:
            raise UserError(
                f"train.output: {error.filename or output} cannot be written ({error.strerror}) after the last step; "
                + f"the training is complete and its checkpoint is {result['checkpoint']}: "
                + "make room, and export it by motet.export_checkpoint"
            ) from error
    return {**result, "measured": measured, "predicted": predicted, "export": exported}


def _train_phases(config: RunConfig, plan: PlanFile | None) -> dict[str, Any]:
    """Trains one phase after the other; with `train.resume: latest` without those that are finished. Returns the result
    of the last one, and of each under `phases`."""
    if plan is not None:
        raise UserError(
            "--plan: holds one plan, but each phase is planned separately; leave it out, or set train.only_phase"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "train.phases: torchrun runs one phase at a time; start it for each with --set train.only_phase=NAME"
        )
    from motet.runtime.checkpoint.folder import find_checkpoints, step_of

    results: dict[str, Any] = {}
    phases = phases_of(config)
    plans: dict[str, Plan] = {}
    for name, phase in phases.items():
        # What is wrong with a later phase is said before the first one is trained.
        problem = read_problem(phase)
        _check_export(phase)
        if phase.parallel.run_ahead:  # Whether an encoder can depends on what the phase trains.
            plans[name] = read_or_make_plan(None, phase, problem)
    for name, phase in phases.items():
        there = find_checkpoints(Path(phase.train.output) / "checkpoints")
        if phase.train.resume == "latest" and there and step_of(there[-1]) >= phase.train.steps:
            print(f"phase {name}: is finished", file=sys.stderr, flush=True)
            continue
        print(f"phase {name}: {phase.train.steps} steps", file=sys.stderr, flush=True)
        results[name] = train(phase, plan=plans.get(name))
    if not results:
        raise UserError("train.resume: every phase is finished; give more steps, or leave it out to begin anew")
    return {**list(results.values())[-1], "phases": results}


def _check_export(config: RunConfig) -> None:
    """Raises `UserError` if the run exports a model whose weights transformers would not load again."""
    if not (config.train.export and config.train.checkpoint_every):
        return
    from motet.models.hub.composite import check_composite_export
    from motet.models.hub.export import check_export, describe_config

    if config.model.composite is not None:
        check_composite_export(config.model.composite)
    else:
        # Which tokens are placeholders does not matter to it.
        check_export(describe_config(config.model, defaultdict(int)))


def export_checkpoint(run: RunFile, checkpoint: str | Path) -> Path:
    """Writes a checkpoint of the run as a folder that plain transformers loads: `export` in `train.output`.

    Raises `UserError` if the checkpoint is damaged, or if transformers would not load all weights again.
    """
    config = _config(run, ())
    from motet.data.run_file import open_preparation
    from motet.models.hub.composite import export_composite
    from motet.models.hub.export import describe_config, export_parts
    from motet.models.hub.weights import CheckpointTensors

    folder = Path(config.train.output) / "export"
    preparation = open_preparation(config)
    if config.model.composite is not None:
        processor = preparation.tools[LANGUAGE_MODEL]
        export_composite(CheckpointTensors(checkpoint), config.model.composite, folder, processor=processor)
        return folder
    description = describe_config(config.model, preparation.placeholder_ids)
    export_parts(CheckpointTensors(checkpoint), description, folder, processors=preparation.tools)
    return folder


def _config(run: RunFile, overrides: Sequence[str]) -> RunConfig:
    return chosen_run(_read(run, overrides))


def _read(run: RunFile, overrides: Sequence[str]) -> RunConfig:
    if not isinstance(run, RunConfig):
        return load_run_config(run, overrides)
    if overrides:
        raise UserError(
            f"overrides: {overrides[0]!r} changes a run file; give its path, or change the RunConfig yourself"
        )
    return run


# Plans: given as an object or a file, or made by the run file's planner.


def read_or_make_plan(plan: PlanFile | None, config: RunConfig, problem: "PlanningProblem") -> Plan:
    """Prints on stderr which keys of the run file a given plan overrides. Raises `UserError` naming the file."""
    if plan is None:
        from motet.planner.from_run_file import plan_for

        return plan_for(config, problem)
    from motet.assignment.next_batch import why_not_ahead
    from motet.planner.older_plans import with_connectors

    path = "" if isinstance(plan, Plan) else f" {plan}"
    if not isinstance(plan, Plan):
        try:
            plan = Plan.from_json(read_text(plan))
        except OSError as error:
            raise UserError(f"--plan{path}: cannot be read ({error.strerror}); motet plan --out writes one") from None
        except UnicodeDecodeError:
            raise UserError(f"--plan{path}: is not a text file; motet plan --out writes one") from None
        except ValueError as error:
            raise UserError(f"--plan{path}: {error}") from None
    plan = with_connectors(plan, problem)
    if plan.zero1 and config.train.failures is not None:
        raise UserError(f"--plan{path}: zero1: is true, which train.failures decides itself; set it to false")
    if config.parallel.zero1 or plan.zero1:
        for name, module in plan.modules.items():
            stages = [stage for replica in module.replicas for stage in replica.stages]
            shares_inside = module.fully_sharded and any(s.cp_size > 1 for s in stages)
            if module.shares_over_replicas or (shares_inside and config.train.failures is None):
                raise UserError(
                    f"--plan{path}: modules.{name}.fully_sharded shards the optimizer's state already; set "
                    f"{'zero1 of the plan' if plan.zero1 else 'parallel.zero1'} to false"
                )
    if plan.run_ahead and config.train.failures is not None:
        raise UserError(f"--plan{path}: run_ahead: is true, which train.failures does not support; set it to false")
    for name, module in plan.modules.items():
        if module.ep > 1 and config.train.failures is not None:
            raise UserError(
                f"--plan{path}: modules.{name}.ep: is {module.ep}, but experts of ranks that fail have no other "
                "holder; set it to 1, or leave train.failures out"
            )
    if plan.run_ahead and (why := why_not_ahead(plan)) is not None:
        raise UserError(f"--plan{path}: run_ahead: {why}")
    keys = ["schedule", "run_ahead"]
    # With a contrastive loss and with unequal replicas, numbers of microbatches are the planner's.
    if plan.loss_module is None and not plan.replica_microbatches:
        keys.append("num_microbatches")
    for key in keys:
        own, given = getattr(plan, key), getattr(config.parallel, key)
        if key in config.parallel.model_fields_set and own != given:
            print(f"--plan{path}: its {key} is {own}; parallel.{key}, {given}, is not read", file=sys.stderr)
    return plan


def _as_planned(config: RunConfig, plan: Plan) -> RunConfig:
    """The run file with what the plan decides instead of it."""
    if not plan.zero1 or config.parallel.zero1:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero1": True})})


# The first global batch of a run, from which it is planned and profiled.


def read_batch(config: RunConfig) -> "LoadedBatch":
    """The batch with its tensors. Raises `UserError` naming the key or file that is wrong."""
    from motet.data.loader import Loader
    from motet.data.run_file import open_data
    from motet.data.service.tickets import InProcess

    train = open_data(config).train
    _check_batch_size(config, len(train))
    return next(Loader(InProcess(train), config.train.global_batch_size, seed=config.order_seed, batches_ahead=0))


def read_samples(config: RunConfig, most: int | None = None) -> "tuple[Sample, ...]":
    """The metadata of the same batch, without torch; or of the first epoch's samples up to `most`.

    They are read from data servers where the run file names some.
    """
    from motet.data.run_file import open_samples

    if getattr(config.data, "servers", ()):
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        # In another process: gRPC must not have begun in one that will fork the ranks.
        with ProcessPoolExecutor(1, get_context("fork")) as process:
            return process.submit(_ask_servers, config, most).result()
    train = open_samples(config)
    if most is None and is_first_process():  # They are told once.
        for note in train.notes:
            print(f"motet: {note}", file=sys.stderr)
    skips = getattr(config.data, "on_corrupt", "stop") == "skip"
    samples = [_sample(train, index, skips) for index in _first_indices(config, len(train), most)]
    return tuple(sample for sample in samples if sample is not None)


def read_problem(config: RunConfig) -> "PlanningProblem":
    """Reads the planning problem: shapes, costs and cluster of the run file, and its first batch as the typical one."""
    from motet.planner.from_run_file import planning_problem

    samples = read_samples(config)
    if len(samples) > MANY_SAMPLES:
        print(
            f"each plan that is tried is simulated with all {len(samples)} samples of a batch, which may take minutes",
            file=sys.stderr,
        )
    return planning_problem(config, samples)


def _first_indices(config: RunConfig, num_samples: int, most: int | None) -> list[int]:
    from motet.data.loader import epoch_order

    _check_batch_size(config, num_samples)
    return epoch_order(num_samples, config.order_seed, epoch=0)[: most or config.train.global_batch_size].tolist()


def _sample(train: "SampleSource", index: int, skips: bool) -> "Sample | None":
    try:
        return train.sample(index)
    except UserError:
        if not skips:
            raise
        return None


def _ask_servers(config: RunConfig, most: int | None) -> "tuple[Sample, ...]":
    from motet.assignment.sample import Sample
    from motet.data.service.opening import open_producers

    producer = open_producers(config).train
    prepared = producer.samples(_first_indices(config, len(producer), most))
    return tuple(sample for sample in prepared if isinstance(sample, Sample))


def _check_batch_size(config: RunConfig, num_samples: int) -> None:
    size = config.train.global_batch_size
    if size > num_samples:
        raise UserError(f"train.global_batch_size: is {size}, but there are {num_samples} training samples; give fewer")


# Simulation with disturbances.


def _disturbed(
    evaluation: "Evaluation", straggler_factors: Mapping[int, float], jitter: float, seed: int, shares_cards: bool
) -> "Evaluation":
    from motet.simulator.costs import Disturbances
    from motet.simulator.event_loop import SharedCards
    from motet.simulator.simulate import simulate

    if not 0 <= jitter <= MAX_JITTER:
        raise UserError(f"--jitter: is {jitter}; give a share of 0 to {MAX_JITTER}, such as 0.05")
    for rank, factor in straggler_factors.items():
        if not 0 <= rank < evaluation.plan.num_ranks or not 0 < factor <= MAX_STRAGGLER_FACTOR:
            raise UserError(
                f"--straggler: '{rank}={factor:g}' needs a rank of 0..{evaluation.plan.num_ranks - 1} and a factor "
                f"above 0, at most {MAX_STRAGGLER_FACTOR}"
            )
    cluster = evaluation.problem.cluster
    result = simulate(
        evaluation.program,
        evaluation.costs,
        num_cores=evaluation.problem.num_cores,
        cards=SharedCards(cluster.node, cluster.num_nics) if shares_cards else None,
        disturbances=Disturbances(straggler_factors=straggler_factors, jitter=jitter, seed=seed),
    )
    return replace(evaluation, result=result)


# Processes.


def _processes_of(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """The keyword arguments of `launch` that start a process for each rank of the plan."""
    from motet.runtime.launch import check_world_size, started_by_torchrun

    check_world_size(plan.num_ranks, config.cluster.num_devices, config.cluster.num_nodes)
    if plan.num_ranks < config.cluster.num_devices and not started_by_torchrun():
        print(f"the plan runs on {plan.num_ranks} of {config.cluster.num_devices} devices", file=sys.stderr)
    return {
        "num_processes": plan.num_ranks,
        "device": config.cluster.device,
        "timeout_s": max(MIN_START_TIMEOUT_S, config.train.step_timeout_s),
    }


def _needs_of_nodes(config: RunConfig, evaluation: "Evaluation", listen: "StoreAddress | None") -> "MemoryNeeds":
    """The memory that a process of a training on nodes needs. Raises `UserError` unless the run can begin, and survive
    failures."""
    from motet.resilience.succession import check_survivable

    cluster, plan = config.cluster, evaluation.plan
    check_survivable(config, plan)
    from motet.runtime.launch import started_by_torchrun

    if started_by_torchrun():
        raise UserError(
            "train.failures: motet starts the processes of such a run itself, and torchrun would end them all with the "
            "first; run it without torchrun, on several machines by --listen and --join (docs/resilience.md)"
        )
    if plan.num_ranks != cluster.num_devices:
        raise UserError(
            f"cluster.num_devices: is {cluster.num_devices}, but the plan has {plan.num_ranks} ranks; give "
            f"cluster.num_devices={plan.num_ranks}, or a layout that fills {cluster.num_devices}"
        )
    from motet.resilience.health.free_memory import MemoryNeeds, check_this_machine, needs_of_ranks

    needs = needs_of_ranks(config, evaluation)
    if listen is None:
        check_this_machine(needs)
    return MemoryNeeds.largest(needs)


def _train_on_nodes(
    config: RunConfig,
    evaluation: "Evaluation",
    needs: "MemoryNeeds",
    listen: "StoreAddress | None",
    store: "EtcdAddress | None",
) -> dict[str, Any]:
    """Trains on nodes that go on when some of them fail: groups of processes of this machine, or nodes that join."""
    from motet.resilience.launch_nodes import train_on_nodes
    from motet.resilience.succession import templates_of

    cluster = config.cluster
    return train_on_nodes(
        config,
        evaluation.plan,
        templates_of(evaluation.problem),
        num_nodes=cluster.num_nodes,
        node_size=cluster.num_devices // cluster.num_nodes,
        listen=listen,
        store=store,
        needs=needs,
    )


def _save_timelines(output: Path, timelines: Mapping[str, Timeline]) -> None:
    from motet.report.pictures import save_timelines
    from motet.report.timelines import save_trace

    save_timelines(timelines, output / "timeline.png")
    save_trace(timelines, output / "trace.json")
    for title, timeline in timelines.items():
        (output / f"{title}.json").write_text(timeline.to_json())
