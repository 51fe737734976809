"""Refuses a training whose plan needs a feature that its model's family has not been verified with, before processes
start."""

from motet.config import RunConfig
from motet.families.discovery.composite import read_composite_config
from motet.models.materialize import read_part_config
from motet.plan import DEFAULT_ASSIGNMENT, LANGUAGE_MODEL, Plan
from motet.recomputation import of_module
from motet.runtime.verification.composite_probe import composite_capabilities
from motet.runtime.verification.family_probe import capabilities_of
from motet.schedule.generators import SPLIT_BACKWARDS


def check_features(config: RunConfig, plan: Plan) -> None:
    """Raises `UserError` unless every feature that the plan's language model needs was equal in its family's probe."""
    if LANGUAGE_MODEL not in plan.modules:
        return
    if config.model.composite is not None:
        needed = needed_of_composite(plan)
        found = composite_capabilities(read_composite_config(config.model.composite), list(needed))
        found.require(needed, "model")
        return
    part = config.model.language_model
    if part is None:
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
        "recompute": (
            of_module(plan.recompute, LANGUAGE_MODEL) not in (None, "offload"),
            "leave it out of parallel.recompute",
        ),
        "split_backward": (plan.schedule in SPLIT_BACKWARDS, "use parallel.schedule 1f1b"),
        "context_parallel": (bool(methods & {"all_gather", "ring", "hybrid"}), "use cp 1"),
        "ulysses": (bool(methods & {"ulysses", "hybrid"}), "use cp 1 or parallel.context.method all_gather"),
        "tensor_parallel": (any(stage.tp_size > 1 for stage in stages), "use tp 1"),
        "sequence_parallel": (
            module.sequence_parallel and any(stage.tp_size > 1 for stage in stages),
            "set sequence_parallel to false",
        ),
        "experts": (module.ep > 1 and any(stage.tp_size > 1 for stage in stages), "use ep 1"),
        "expert_parallel": (module.replicas_sharing_experts > 1, "use ep 1, or ep equal to tp"),
    }
    return {feature: instead for feature, (is_needed, instead) in needed.items() if is_needed}


def needed_of_composite(plan: Plan) -> dict[str, str]:
    """The same of a model of several modalities."""
    stages = [stage for replica in plan.modules[LANGUAGE_MODEL].replicas for stage in replica.stages]
    needed = {"pipeline": "give a model of another family"}
    if any(stage.tp_size > 1 for stage in stages):
        needed["tensor and pipeline"] = "use tp 1"
    return needed
