"""Whether a module can be laid out as the user or a planner asks."""

from motet.attention.masks.distribution import check_ulysses
from motet.errors import UserError
from motet.parallel.tensor_plans import check_tp
from motet.planner.problem import Degrees, PlanningProblem


def check_degrees(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    """Raises `UserError` naming what is wrong with a module's degrees."""
    workload = problem.modules[name].workload
    for key in ("tp", "cp", "pp", "dp"):
        if getattr(degrees, key) < 1:
            raise UserError(f"parallel: {name}.{key} is {getattr(degrees, key)}; give at least 1")
    if degrees.pp > workload.num_layers:
        raise UserError(
            f"parallel: {name}.pp is {degrees.pp}, but it has {workload.num_layers} layers; "
            f"give at most {workload.num_layers}"
        )
    try:
        check_tp(workload.family, workload.config, degrees.tp)
    except UserError as error:
        raise UserError(f"parallel: {name}.{error}") from None
    if degrees.cp > 1:
        _check_context(problem, name, degrees)
    elif degrees.fully_sharded:
        raise UserError(
            f"parallel: {name}.fully_sharded: context-parallel ranks share the parameters, but cp is 1; "
            "give a larger cp, or leave fully_sharded out"
        )


SHARED_BY_NONE = ("clip_text_model", "pixtral", "qwen2_5_vl_vision", "qwen2_audio_encoder", "siglip_text_model")
"""Encoders whose tokens do not see their whole item and nothing else, or whose blocks know more than the tokens
(`motet.families.encoders.EncoderFamily.has_full_attention`)."""


def _check_context(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    workload = problem.modules[name].workload
    if workload.family in SHARED_BY_NONE:
        raise UserError(
            f"parallel: {name}.cp is {degrees.cp}, but ranks cannot share the tokens of a {workload.family}; give cp 1"
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
    if degrees.context.method == "ulysses" and attention is not None:
        try:
            check_ulysses(attention.num_heads // degrees.tp, attention.num_key_value_heads // degrees.tp, degrees.cp)
        except UserError as error:
            raise UserError(f"parallel: {name}.{error}") from None
