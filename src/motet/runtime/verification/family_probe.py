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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig
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
from motet.models.graph import LanguageModelNode
from motet.models.materialize import float64_throughout, read_part_config
from motet.models.multimodal import MultimodalModule
from motet.plan import DEFAULT_ASSIGNMENT, LANGUAGE_MODEL, ContextOptions, ModulePlan, Plan, Replica, Stage
from motet.runtime.assembly import make_stage
from motet.runtime.engine import Engine
from motet.runtime.launch import WorkerFailedError, launch, started_by_torchrun
from motet.runtime.verification.verify import verify_batch
from motet.schedule.generators import SPLIT_BACKWARDS

LENGTHS = (23, 9, 17, 5)
"""Tokens of the samples. The longest exceeds the tiny model's attention window and the length at which its rotary
positions begin to scale."""
TIMEOUT = datetime.timedelta(seconds=60)

BuildModel = Callable[[], Any]
"""Makes the tiny model, with the same weights each time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a feature runs."""

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
    "sequence_parallel": Trial(stages=((0, 1),), tp_size=2, sequence_parallel=True),
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
            f"{model}: is no model_type of transformers {transformers.__version__}, and its configuration could not be "
            f"had ({_first_line(error)}); give a folder, a hub id or a model_type such as llama"
        ) from None


def capabilities_of(config: PretrainedConfig, *, again: bool = False) -> Capabilities:
    """What the family of a causal language model is capable of: read, or probed now and kept.

    Args:
        config: of the user's model; only its tiny version is built.
        again: probe even if there is a result.

    Raises `UserError` if no tiny model can be built, and under torchrun, whose processes belong to the training, if
    there is no result."""
    tiny = tiny_config(config)
    digest = digest_of(tiny.to_dict())
    known = None if again else read_capabilities(digest)
    if known is None:
        if started_by_torchrun():
            raise UserError(
                f"model.language_model: {config.model_type} has not been probed on this machine; run motet family "
                "check with its folder or hub id here, before torchrun"
            )
        print(f"probing {config.model_type}, which is new here: tiny models on two processes", file=sys.stderr)
        known = probe(tiny)
        write_capabilities(digest, known)
    return known


def check_features(config: RunConfig, plan: Plan) -> None:
    """Raises `UserError` unless every feature that the plan's language model needs was equal in its family's probe."""
    part = config.model.language_model
    if part is None or LANGUAGE_MODEL not in plan.modules:
        return
    key = f"model.{LANGUAGE_MODEL}"
    capabilities = capabilities_of(read_part_config(part, "language_model", where=key))
    capabilities.require(needed_features(config, plan), key)


def needed_features(config: RunConfig, plan: Plan) -> dict[str, str]:
    """The features of the language model's plan, and what to set instead of each."""
    module = plan.modules[LANGUAGE_MODEL]
    stages = [stage for replica in module.replicas for stage in replica.stages]
    num_microbatches = sum(plan.replica_microbatches) or len(module.replicas) * plan.num_microbatches
    is_packed = config.parallel.packing or config.model.media_attention != "causal"
    is_packed |= any(replica.shares_context for replica in module.replicas)
    has_one_sample = plan.assignment == DEFAULT_ASSIGNMENT and config.train.global_batch_size <= num_microbatches
    methods = {module.context.method for stage in stages if stage.cp_size > 1}
    needed = {
        "pipeline": (len(stages) > len(module.replicas), "use one stage"),
        "packing": (is_packed, "set parallel.packing to false"),
        "padding": (not is_packed and not has_one_sample, "use as many microbatches as samples"),
        "recompute": (LANGUAGE_MODEL in plan.recompute, "leave it out of parallel.recompute"),
        "split_backward": (plan.schedule in SPLIT_BACKWARDS, "use parallel.schedule 1f1b"),
        "context_parallel": (bool(methods & {"all_gather", "ring"}), "use cp 1"),
        "ulysses": ("ulysses" in methods, "use cp 1 or parallel.context.method all_gather"),
        "tensor_parallel": (any(stage.tp_size > 1 for stage in stages), "use tp 1"),
        "sequence_parallel": (
            module.sequence_parallel and any(stage.tp_size > 1 for stage in stages),
            "set sequence_parallel to false",
        ),
        "experts": (module.ep > 1 and any(stage.tp_size > 1 for stage in stages), "use ep 1"),
        "expert_parallel": (module.replicas_sharing_experts > 1, "use ep 1, or ep equal to tp"),
    }
    return {feature: instead for feature, (is_needed, instead) in needed.items() if is_needed}


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
        reasons = _run_all(trials, build_model, batch)
    return Capabilities(
        model_type=tiny.model_type,
        model_class=name,
        reasons=reasons,
        versions=probed_versions(),
        date=datetime.date.today().isoformat(),
    )


def _run_all(trials: Mapping[str, Trial], build_model: BuildModel, batch: "_Batch") -> dict[str, str | None]:
    """A feature that ends a process ends the launch: those after it are run in the next one."""
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="motet-probe-") as folder:
        results = Path(folder) / "results"
        results.touch()
        while left := {feature: trial for feature, trial in trials.items() if feature not in found}:
            num_processes = next(iter(left.values())).num_ranks
            alike = {feature: trial for feature, trial in left.items() if trial.num_ranks == num_processes}
            failure = "its process ended"
            try:
                launch(_run_features, alike, build_model, batch, results, num_processes=num_processes)
            except WorkerFailedError as error:
                failure = _first_line(error)
            found |= dict(json.loads(line) for line in results.read_text().splitlines())
            if unfinished := next((feature for feature in alike if feature not in found), None):
                found[unfinished] = failure
    return {feature: found[feature] for feature in trials}


def _run_features(trials: Mapping[str, Trial], build_model: BuildModel, batch: "_Batch", results: Path) -> None:
    """On every rank. Rank 0 writes down a line for each feature."""
    for feature, trial in trials.items():
        with probing():
            reason = _run_feature(trial, build_model, batch)
        if dist.get_rank() == 0:
            with results.open("a") as file:
                file.write(json.dumps((feature, reason)) + "\n")


def _run_feature(trial: Trial, build_model: BuildModel, batch: "_Batch") -> str | None:
    """None if gradients were equal; on rank 0 else why not."""
    model = build_model()
    node = _node_of(model)
    engine, refusal = None, None
    try:
        plan = _plan(trial, node.num_layers, is_tied=is_tied(model))
        engine = Engine(
            plan,
            lambda name, module, stage, tp: make_stage(
                _node_of(build_model()),
                stage.layers,
                tp,
                torch.device("cpu"),
                packing=trial.packing,
                recompute=trial.recompute,
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
    comparison = verify_batch(engine, batch, lambda: {LANGUAGE_MODEL: node}, dtype="float64")
    if comparison is None or comparison.passed:
        return None
    return (
        f"gradients differ from one process by {comparison.max_raw_grad_rel_err:.1e} ({comparison.worst_raw_parameter})"
    )


def _node_of(model: Any) -> LanguageModelNode:
    node = MultimodalModule({}, model).nodes[LANGUAGE_MODEL]
    assert isinstance(node, LanguageModelNode)
    return node


def _plan(trial: Trial, num_layers: int, *, is_tied: bool) -> Plan:
    num_stages = len(trial.stages)
    # The middle stage has neither embedding nor head.
    bounds = [0, *(1 + (num_layers - 2) * s // num_stages for s in range(1, num_stages)), num_layers]
    replica = Replica(
        stages=tuple(
            Stage(layers=(bounds[s], bounds[s + 1]), ranks=ranks, tp_size=trial.tp_size, cp_size=trial.cp_size)
            for s, ranks in enumerate(trial.stages)
        )
    )
    replicas = tuple(
        replace(
            replica,
            stages=tuple(replace(stage, ranks=tuple(rank + r for rank in stage.ranks)) for stage in replica.stages),
        )
        for r in range(trial.num_replicas)
    )
    return Plan(
        modules={
            LANGUAGE_MODEL: ModulePlan(
                kind="language_model",
                num_layers=num_layers,
                replicas=replicas,
                trainable=((0, num_layers),),
                tied=((0, num_layers - 1),) if is_tied else (),
                sequence_parallel=trial.sequence_parallel,
                ep=trial.ep,
                loss_weight=1.0,
                context=ContextOptions(block_size=4, method=trial.method),
            )
        },
        edges=(),
        num_microbatches=trial.num_microbatches,
        schedule=trial.schedule,
        recompute=(LANGUAGE_MODEL,) if trial.recompute else (),
    )


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
