"""Probes a model family: does a tiny model of it, under each feature, equal plain transformers in one process?

The tiny model has the user's own configuration class, with sizes shrunk, one block of each kind at least, and weights,
multipliers and biases that differ from their neutral values (`motet.families.tiny`). Each feature is a plan for two
processes; the engine runs it in float64, and `verify_batch` compares loss and every gradient with the model as
transformers builds it. Combinations of features are not probed: `motet verify` checks those of a run.
"""

import copy
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from motet.assignment.sample import Sample, Segment
from motet.errors import UserError
from motet.families.capabilities import (
    FEATURES,
    Capabilities,
    digest_of,
    probed_versions,
    read_capabilities,
    write_capabilities,
)
from motet.families.family_features import probing
from motet.families.language_models import is_tied
from motet.families.tiny import perturb, tiny_config
from motet.models.composite import CompositeNode
from motet.models.graph import LanguageModelNode, ModuleNode
from motet.models.materialize import float64_throughout
from motet.models.multimodal import MultimodalModule
from motet.models.stages.stage import Batch
from motet.plan import LANGUAGE_MODEL, ContextOptions, Edge, ModulePlan, Plan, Replica, Stage
from motet.recomputation import BLOCKS
from motet.runtime.assembly import make_stage
from motet.runtime.engine import Engine
from motet.runtime.launch import WorkerFailedError, launch, started_by_torchrun
from motet.runtime.verification.verify import verify_batch

LENGTHS = (23, 17, 9, 5)
"""Tokens of the samples. The first two exceed the tiny model's attention window, the length at which its rotary
positions begin to scale, and the number of keys that sparse attention selects: padded beside the first, the second
shows whether the selection depends on the padding."""
TIMEOUT = datetime.timedelta(seconds=60)

BuildNodes = Callable[[], Mapping[str, ModuleNode]]
"""Makes the parts of the tiny model, with the same weights each time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of the probe: a plan and options that exercise one feature."""

    stages: tuple[tuple[int, ...], ...] = ((0,), (1,))
    """The ranks of each stage."""
    num_replicas: int = 1
    tp_size: int = 1
    cp_size: int = 1
    num_microbatches: int = 4
    packing: bool = False
    recompute: bool = False
    sequence_parallel: bool = False
    ep: int = 1
    schedule: str = "1f1b"
    method: Literal["all_gather", "ulysses"] = "all_gather"

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * (1 + max(rank for ranks in self.stages for rank in ranks))


TRIALS: Mapping[str, Trial] = {
    "padding": Trial(stages=((0,),), num_replicas=2, num_microbatches=1),
    "pipeline": Trial(stages=((0,), (1,), (0,))),
    "recompute": Trial(recompute=True),
    "split_backward": Trial(schedule="zero_bubble_h1"),
    "packing": Trial(num_microbatches=2, packing=True),
    "context_parallel": Trial(stages=((0, 1),), cp_size=2, num_microbatches=2),
    "ulysses": Trial(stages=((0, 1),), cp_size=2, num_microbatches=2, method="ulysses"),
    "tensor_parallel": Trial(stages=((0, 1),), tp_size=2),
    # Two samples in each microbatch: blocks that view them as one row of tokens would be given a wrong share of it.
    "sequence_parallel": Trial(stages=((0, 1),), tp_size=2, sequence_parallel=True, num_microbatches=2),
    "experts": Trial(stages=((0, 1),), tp_size=2, ep=2),
    "expert_parallel": Trial(stages=((0,),), num_replicas=2, num_microbatches=2, ep=2),
}
assert TRIALS.keys() == FEATURES.keys()


def config_of(model: str) -> PretrainedConfig:
    """The configuration of a folder, a hub id, or, with transformers' default values, of a `model_type`."""
    if model in CONFIG_MAPPING:
        return CONFIG_MAPPING[model]()
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{model}: is not a model_type of transformers {transformers.__version__}, and its configuration cannot "
            f"be loaded ({_first_line(error)}); give a folder, a hub id or a model_type such as llama"
        ) from None


def capabilities_of(config: PretrainedConfig, *, again: bool = False) -> Capabilities:
    """Returns the capabilities of a causal language model's family: stored ones, or those probed now and stored.

    Args:
        config: of the user's model; only its tiny version is built.
        again: probe even if there is a result.

    Raises `UserError` if no tiny model can be built, and under torchrun, whose processes belong to the training, if
    there is no result."""
    tiny = tiny_config(config)
    digest = digest_of(tiny.to_dict())
    known = None if again else read_capabilities(digest)
    if known is None:
        announce_probe(config.model_type)
        known = probe(tiny)
        write_capabilities(digest, known)
    return known


def announce_probe(model_type: str) -> None:
    """Raises `UserError` under torchrun, whose processes are the training's."""
    if started_by_torchrun():
        raise UserError(
            f"model: {model_type} has not been probed on this machine; run motet family check with its folder or hub "
            "id here, before torchrun"
        )
    print(f"probing {model_type}, which is new here: tiny models on a few processes", file=sys.stderr)


def probe(tiny: PretrainedConfig, trials: Mapping[str, Trial] = TRIALS) -> Capabilities:
    """Runs every feature. Raises `UserError` if the model cannot be built."""

    def build_model() -> Any:
        torch.manual_seed(0)
        # A stage writes into its model's configuration.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(tiny))
        perturb(model)
        return model.double().train()

    with float64_throughout():
        try:
            name = type(build_model()).__name__
        except Exception as error:  # Whatever a model raises that cannot be built so.
            raise UserError(
                f"{tiny.model_type}: no tiny model of it can be built to probe it ({_first_line(error)}); it is not "
                "supported"
            ) from None
        batch = _Batch(int(tiny.get_text_config().vocab_size))
        reasons = run_trials(trials, lambda: {LANGUAGE_MODEL: _node_of(build_model())}, batch)
    return found_out(tiny.model_type, name, reasons)


def found_out(model_type: str, model_class: str, reasons: dict[str, str | None]) -> Capabilities:
    """Today, with these versions."""
    return Capabilities(
        model_type=model_type,
        model_class=model_class,
        reasons=reasons,
        versions=probed_versions(),
        date=datetime.date.today().isoformat(),
    )


def run_trials(
    trials: Mapping[str, Trial], build_nodes: BuildNodes, batch: Batch, edges: tuple[Edge, ...] = ()
) -> dict[str, str | None]:
    """By trial: None if gradients were equal, else why not. Trials are of the language model; encoders are one stage
    each on the first rank. `edges`: from encoders to the language model.

    A feature that ends a process ends the launch: those after it are run in the next one."""
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="motet-probe-") as folder:
        results = Path(folder) / "results"
        results.touch()
        while left := {feature: trial for feature, trial in trials.items() if feature not in found}:
            num_processes = next(iter(left.values())).num_ranks
            alike = {feature: trial for feature, trial in left.items() if trial.num_ranks == num_processes}
            failure = "its process ended"
            try:
                launch(_run_features, alike, build_nodes, batch, edges, results, num_processes=num_processes)
            except WorkerFailedError as error:
                failure = _first_line(error)
            found |= dict(json.loads(line) for line in results.read_text().splitlines())
            if unfinished := next((feature for feature in alike if feature not in found), None):
                found[unfinished] = failure
    return {feature: found[feature] for feature in trials}


def _run_features(
    trials: Mapping[str, Trial], build_nodes: BuildNodes, batch: Batch, edges: tuple[Edge, ...], results: Path
) -> None:
    """On every rank. Rank 0 writes down a line for each feature."""
    for feature, trial in trials.items():
        with probing():
            reason = _run_feature(trial, build_nodes, batch, edges)
        if dist.get_rank() == 0:
            with results.open("a") as file:
                file.write(json.dumps((feature, reason)) + "\n")


def _run_feature(trial: Trial, build_nodes: BuildNodes, batch: Batch, edges: tuple[Edge, ...]) -> str | None:
    """None if gradients were equal; on rank 0 else why not."""
    nodes = build_nodes()
    engine, refusal = None, None
    try:
        plan = _plan(trial, nodes, edges)
        engine = Engine(
            plan,
            lambda name, module, stage, tp: make_stage(
                build_nodes()[name],
                stage.layers,
                tp,
                torch.device("cpu"),
                packing=trial.packing,
                recompute=BLOCKS if trial.recompute else None,
            ),
            device=torch.device("cpu"),
            boundary_dtype=torch.float64,
            timeout=TIMEOUT,
        )
    except UserError as error:
        refusal = _first_line(error)
    if refusal := _on_any_rank(refusal):
        return refusal
    assert engine is not None
    comparison = verify_batch(engine, batch, lambda: nodes, dtype="float64")
    if comparison is None or comparison.passed:
        return None
    if comparison.max_raw_grad_rel_err < comparison.tolerance:
        return comparison.failures[0][:200]
    return (
        f"gradients differ from one process by {comparison.max_raw_grad_rel_err:.1e} ({comparison.worst_raw_parameter})"
    )


def _node_of(model: Any) -> LanguageModelNode:
    node = MultimodalModule({}, model).nodes[LANGUAGE_MODEL]
    assert isinstance(node, LanguageModelNode)
    return node


def _plan(trial: Trial, nodes: Mapping[str, ModuleNode], edges: tuple[Edge, ...]) -> Plan:
    return Plan(
        modules={name: _module_plan(trial, node) for name, node in nodes.items()},
        edges=edges,
        num_microbatches=trial.num_microbatches,
        schedule=trial.schedule,
        recompute=tuple(nodes) if trial.recompute else (),
    )


def _module_plan(trial: Trial, node: ModuleNode) -> ModulePlan:
    num_layers = node.num_layers
    if node.name != LANGUAGE_MODEL:
        replica = Replica(stages=(Stage(layers=(0, num_layers), ranks=(0,)),))
        with_parameters = [layer.num_parameters > 0 for layer in node.workload().layers]
        return ModulePlan(kind="encoder", num_layers=num_layers, replicas=(replica,), trainable=_runs(with_parameters))
    if isinstance(node, CompositeNode):
        tied = node.composite.is_tied
    else:
        assert isinstance(node, LanguageModelNode)
        tied = is_tied(node.module.module)
    num_stages = len(trial.stages)
    # The middle stage has neither embedding nor head.
    bounds = [0, *(1 + (num_layers - 2) * s // num_stages for s in range(1, num_stages)), num_layers]
    replicas = tuple(
        Replica(
            stages=tuple(
                Stage(
                    layers=(bounds[s], bounds[s + 1]),
                    ranks=tuple(rank + r for rank in ranks),
                    tp_size=trial.tp_size,
                    cp_size=trial.cp_size,
                )
                for s, ranks in enumerate(trial.stages)
            )
        )
        for r in range(trial.num_replicas)
    )
    return ModulePlan(
        kind="language_model",
        num_layers=num_layers,
        replicas=replicas,
        trainable=((0, num_layers),),
        tied=((0, num_layers - 1),) if tied else (),
        sequence_parallel=trial.sequence_parallel,
        ep=trial.ep,
        loss_weight=1.0,
        context=ContextOptions(block_size=4, method=trial.method),
    )


def _runs(wanted: list[bool]) -> tuple[tuple[int, int], ...]:
    """Half-open runs of true entries."""
    found = [list(run) for is_wanted, run in groupby(range(len(wanted)), key=wanted.__getitem__) if is_wanted]
    return tuple((run[0], run[-1] + 1) for run in found)


class _Batch:
    """Texts of random tokens."""

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._ids = [torch.randint(3, vocabulary, (length,), generator=generator) for length in LENGTHS]
        self.samples = tuple(
            Sample(str(i), {LANGUAGE_MODEL: (Segment(length),)}, {LANGUAGE_MODEL: length - 1})
            for i, length in enumerate(LENGTHS)
        )

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[sample], "labels": self._ids[sample]}


def _on_any_rank(reason: str | None) -> str | None:
    """Collective: the reason of the first rank that has one."""
    text = torch.zeros(dist.get_world_size(), 400, dtype=torch.uint8)
    if reason is not None:
        own = torch.tensor(list(reason.encode()[:400]), dtype=torch.uint8)
        text[dist.get_rank(), : len(own)] = own
    dist.all_reduce(text)
    found = [bytes(row[row > 0].tolist()).decode(errors="replace") for row in text]
    return next((each for each in found if each), None)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
