"""Degrees of parallelism that a module supports and that the user's limits allow."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from motet.attention.masks.distribution import check_ulysses
from motet.errors import UserError
from motet.parallel.tensor.tensor_plans import check_tp
from motet.plan import Plan
from motet.planner.problem import Degrees, PlanningProblem

NO_CONTEXT_PARALLELISM = (
    "clip_text_model",
    "pixtral",
    "qwen2_5_vl_vision",
    "qwen2_audio_encoder",
    "siglip_text_model",
)
"""Encoders without context parallelism: their tokens do not attend to exactly their whole item, or their blocks need
more than the tokens (`motet.families.encoders.encoder_families.EncoderFamily.has_full_attention`)."""


def check_degrees(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    """Raises `UserError` naming what is wrong with a module's degrees."""
    workload = problem.modules[name].workload
    for key in ("tp", "cp", "pp", "dp", "virtual_stages"):
        if getattr(degrees, key) < 1:
            raise UserError(f"parallel: {name}.{key} is {getattr(degrees, key)}; give at least 1")
    stages = f"pp is {degrees.pp}"
    if degrees.virtual_stages > 1:
        stages += f" with virtual_stages {degrees.virtual_stages}"
        if degrees.pp == 1:
            raise UserError(
                f"parallel: {name}.virtual_stages is {degrees.virtual_stages}, but has no effect with pp 1; "
                "give 1, or a larger pp"
            )
    if degrees.num_stages > workload.num_layers:
        raise UserError(
            f"parallel: {name}.{stages}, but it has {workload.num_layers} layers; give at most {workload.num_layers}"
            + (" stages" if degrees.virtual_stages > 1 else "")
        )
    if workload.max_stages is not None and degrees.num_stages > workload.max_stages:
        raise UserError(
            f"parallel: {name}.{stages}, but {workload.family} can be cut into {workload.max_stages} at most"
        )
    try:
        if degrees.tp > 1:
            if workload.must_divide is None:
                raise UserError(f"tp_size: {workload.family} has no rules for tensor parallelism; use 1")
            check_tp(workload.must_divide, degrees.tp)
    except UserError as error:
        raise UserError(f"parallel: {name}.{error}") from None
    if degrees.sequence_parallel and not workload.shares_sequences:
        raise UserError(f"parallel: {name}.sequence_parallel: is not supported for a {workload.kind}; leave it out")
    if degrees.ep > 1:
        _check_experts(problem, name, degrees)
    if degrees.cp > 1:
        _check_context(problem, name, degrees)
    if degrees.fully_sharded and degrees.cp * degrees.sharded_replicas == 1:
        raise UserError(
            f"parallel: {name}.fully_sharded: no ranks share the parameters, because cp and sharded_replicas are 1; "
            "give a larger dp or cp, or leave fully_sharded out"
        )


def expert_sizes(problem: PlanningProblem, name: str, tp: int, num_replicas: int) -> list[int]:
    """Numbers of ranks, above 1, that may share the module's experts, ascending."""
    numbers = problem.modules[name].workload.numbers_of_experts
    if not numbers or problem.modules[name].workload.kind != "language_model":
        return []
    sizes = [tp * k for k in range(1, num_replicas + 1) if num_replicas % k == 0]
    return [ep for ep in sizes if ep > 1 and all(number % ep == 0 for number in numbers)]


def largest_ep(problem: PlanningProblem, name: str, tp: int, num_replicas: int) -> int:
    """The most ranks that may share the module's experts; 1 unless the problem is about plans that share them."""
    if problem.max_ep == 1:
        return 1
    return max((ep for ep in expert_sizes(problem, name, tp, num_replicas) if ep <= problem.max_ep), default=1)


def _check_experts(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    numbers = problem.modules[name].workload.numbers_of_experts
    key = f"parallel: {name}.ep is {degrees.ep}"
    if not numbers or problem.modules[name].workload.kind != "language_model":
        raise UserError(f"{key}, but it has no experts; leave ep out")
    if degrees.ep % degrees.tp or degrees.dp % (degrees.ep // degrees.tp):
        raise UserError(f"{key}; give 1, or tp ({degrees.tp}) times a divisor of dp ({degrees.dp})")
    if any(number % degrees.ep for number in numbers):
        raise UserError(f"{key}, which does not divide its {max(numbers)} experts; give a divisor of them")
    if degrees.fully_sharded:
        raise UserError(f"{key}, which fully_sharded does not support; leave one of them out")


def _check_context(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    workload = problem.modules[name].workload
    if workload.family in NO_CONTEXT_PARALLELISM or not workload.shares_tokens:
        raise UserError(
            f"parallel: {name}.cp is {degrees.cp}, but context parallelism is not supported "
            f"for a {workload.family}; give cp 1"
        )
    samples_each = -(-len(problem.samples) // (problem.num_microbatches * degrees.dp))
    longest = samples_each * max(sample.num_tokens(name) for sample in problem.samples)
    block_size = degrees.context.block_size
    if longest <= (degrees.cp - 1) * block_size:
        raise UserError(
            f"parallel: {name}.cp is {degrees.cp}, but microbatches have about {longest} tokens, too few for "
            f"{degrees.cp} blocks of {block_size}; give a smaller cp or context.block_size"
        )
    attention = next((layer.attention for layer in workload.layers if layer.attention is not None), None)
    if attention is not None:
        try:
            traders = degrees.context.num_traders(degrees.cp)
            check_ulysses(attention.num_heads // degrees.tp, attention.num_key_value_heads // degrees.tp, traders)
        except UserError as error:
            raise UserError(f"parallel: {name}.{error}") from None


def _is_possible(problem: PlanningProblem, name: str, degrees: Degrees) -> bool:
    try:
        check_degrees(problem, name, degrees)
    except UserError:
        return False
    return True


def tp_sizes(problem: PlanningProblem, name: str) -> list[int]:
    """Allowed tensor-parallel sizes that divide the module's heads."""
    return [size for size in problem.modules[name].tp_sizes if _is_possible(problem, name, Degrees(tp=size))]


def cp_sizes(problem: PlanningProblem, name: str, dp: int = 1) -> list[int]:
    """Allowed context-parallel sizes for which a replica's microbatches are long enough; 1 for encoders."""
    return template_cp_sizes(problem, name, dp) if problem.modules[name].workload.kind == "language_model" else [1]


def template_cp_sizes(problem: PlanningProblem, name: str, dp: int | None = None) -> list[int]:
    """Returns `cp_sizes` for templates, whose encoders may have context parallelism too. `dp` None: one replica more
    than there may be failures."""
    module = problem.modules[name]
    num_replicas = problem.failures + 1 if dp is None else dp
    return [
        size
        for size in module.cp_sizes
        if _is_possible(problem, name, Degrees(cp=size, dp=num_replicas, context=module.context))
    ]


def dp_sizes(problem: PlanningProblem, num_devices: int | None = None) -> list[int]:
    """Allowed numbers of replicas that divide the devices (None: all of them) and leave no replica without a sample."""
    total = problem.num_devices if num_devices is None else num_devices
    return [dp for dp in problem.dp_sizes if total % dp == 0 and dp <= len(problem.samples)]


def most_stages(problem: PlanningProblem, name: str) -> int:
    num_layers = problem.modules[name].workload.num_layers
    return min(num_layers, problem.modules[name].max_stages or num_layers)


def common_tp_sizes(problem: PlanningProblem, names: Iterable[str]) -> list[int]:
    """Tensor-parallel sizes that all of these modules can have, ascending."""
    return sorted(set.intersection(*(set(tp_sizes(problem, name)) for name in names)))


def uniform_degrees(problem: PlanningProblem, modules: tuple[str, ...] | None = None) -> Iterator[tuple[int, int, int]]:
    """(dp, tp, groups of one replica) with one tensor-parallel size for these modules (None: for all)."""
    for dp, tp in product(problem.dp_sizes, common_tp_sizes(problem, modules or tuple(problem.modules))):
        if problem.num_devices % (dp * tp) == 0 and dp <= len(problem.samples):
            yield dp, tp, problem.num_devices // (dp * tp)


def no_layout(problem: PlanningProblem, planner: str) -> UserError:
    return UserError(
        f"parallel.planner: {planner} finds no layout of {' and '.join(problem.modules)} on {problem.num_devices} "
        "devices within the limits on degrees; allow other tp or dp sizes or more stages, or give another number of "
        "devices"
    )


def check_limits(problem: PlanningProblem) -> None:
    """Raises `UserError` if the limits leave a module no tensor-parallel size at all, or no planner enough devices or
    samples."""
    for name, module in problem.modules.items():
        fitting = tp_sizes(problem, name)
        if not fitting:
            allowed = " or ".join(map(str, module.tp_sizes))
            raise UserError(f"parallel.limits: tp is {allowed}, which {name} does not support; allow 1")
        dp, tp = min(problem.dp_sizes), min(fitting)
        if dp * tp > problem.num_devices:
            raise UserError(
                f"parallel.limits: dp {dp} and tp {tp}, the smallest allowed for {name}, need {dp * tp} devices, but "
                f"cluster.num_devices is {problem.num_devices}; allow smaller sizes, or give more devices"
            )
    if min(problem.dp_sizes) > len(problem.samples):
        raise UserError(
            f"parallel.limits.dp: the smallest size is {min(problem.dp_sizes)}, but train.global_batch_size is "
            f"{len(problem.samples)}, which leaves replicas without a sample; allow fewer"
        )


def check_allows_cp_1(problem: PlanningProblem, planner: str) -> None:
    """Raises `UserError` if the limits leave no plan to a planner that chooses no context parallelism."""
    for name, module in problem.modules.items():
        if 1 not in module.cp_sizes:
            is_last = module.workload.kind == "language_model"
            raise UserError(
                f"parallel.limits.{'cp' if is_last else f'modules.{name}.cp'}: is {list(module.cp_sizes)}, but planner "
                f"{planner} chooses no context parallelism; allow 1 too, or take planner "
                f"{'auto' if is_last else 'oobleck'}"
            )


def check_allows_tp_1(problem: PlanningProblem, planner: str, names: Iterable[str]) -> None:
    """Raises `UserError` if the limits leave no plan to a planner that never cuts these modules by tensor
    parallelism."""
    for name in names:
        if 1 not in problem.modules[name].tp_sizes:
            allowed = " or ".join(map(str, problem.modules[name].tp_sizes))
            raise UserError(
                f"parallel.limits: tp of {name} is {allowed}, but planner {planner} supports only tp 1 for it; "
                "allow 1, or give another planner"
            )


def check_within_limits(
    problem: PlanningProblem, plan: Plan, *, limits_dp: bool = True, limits_dp_of_encoders: bool = True
) -> None:
    """Raises `UserError` if a plan is outside of the user's limits. `limits_dp`, `limits_dp_of_encoders`: whether the
    limit on replicas holds for this planner; it never holds for towers."""
    for name, planned in plan.modules.items():
        if planned.kind == "loss" or name in problem.query_tokens:
            continue
        owner = planned.data_module(name)
        module = problem.modules[owner]
        num_stages = max(len(replica.stages) for replica in planned.replicas)
        _check_limit(plan, owner, "max_pp", num_stages, range(1, (module.max_stages or num_stages) + 1))
        for stage in (stage for replica in planned.replicas for stage in replica.stages):
            _check_limit(plan, owner, "tp", stage.tp_size, module.tp_sizes)
            _check_limit(plan, owner, "cp", stage.cp_size, module.cp_sizes)
        limits_own_dp = limits_dp_of_encoders or module.workload.kind == "language_model"
        if limits_dp and limits_own_dp and plan.loss_module is None:
            _check_limit(plan, owner, "dp", len(planned.replicas), problem.dp_sizes)


def _check_limit(plan: Plan, name: str, limit: str, size: int, allowed: Sequence[int]) -> None:
    if size not in allowed:
        least = f"at most {max(allowed)}" if limit == "max_pp" else " or ".join(map(str, allowed))
        raise UserError(
            f"parallel.limits: {limit} of {name} is {least}, but planner {plan.planner} needs {size}; allow {size}, or "
            "give another planner"
        )
