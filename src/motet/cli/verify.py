"""`motet verify`: compares every gradient under the run's plan with the same model in one process."""

import argparse
from typing import Any

from motet.cli.run_file import add_plan, add_run_file, load_config

HELP = "check loss and every gradient of the distributed run against one process of plain transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64", "bfloat16"],
        help="dtype instead of train.dtype; float64 distinguishes errors from rounding best",
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="also compare the weights after this number of optimizer steps (float64)"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.dtype:
        arguments.overrides.append(f"train.dtype={arguments.dtype}")
    from motet.api import verify

    result = verify(load_config(arguments), plan=arguments.plan, steps=arguments.steps)
    if not result:
        return {}
    print(_text(result))
    return result


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['num_parameters_compared']} parameters compared on {result['world_size']} processes",
        f"loss {_number(result['loss_distributed'])}, in one process {_number(result['loss_reference'])}: "
        f"relative error {_number(result['loss_rel_err'], 3)}",
        f"largest error of a gradient {_number(result['max_grad_rel_err'], 3)}: {result['worst_parameter']}",
    ]
    if result.get("steps"):
        lines.append(
            f"largest error of {result['num_weights_compared']} weights after {result['steps']} steps of the optimizer "
            f"{_number(result['max_weight_rel_err'], 3)}: {result['worst_weight']}"
        )
    if result["zero_by_mathematics"]:
        names = ", ".join(zero["parameter"] for zero in result["zero_by_mathematics"])
        lines.append(f"mathematically zero, so that the gradient consists of rounding: {names}")
    if result["num_flipped_tokens"]:
        lines.append(
            f"{result['num_flipped_tokens']} of {result['num_routed_tokens']} tokens of mixtures of experts would have "
            "gone to other experts in one process, which adopted the run's choices; their scores were at most "
            f"{_number(result['worst_flip'], 2)} of the spread from a tie"
        )
    if result["unreached_parameters"]:
        lines.append(f"not reached by this batch: {', '.join(result['unreached_parameters'])}")
    lines += [f"failed: {failure}" for failure in result["failures"]]
    verdict = "equal" if result["passed"] else "NOT equal"
    lines.append(f"{verdict} to one process, within {result['tolerance']:.0e}")
    return "\n".join(lines)


def _number(value: float | None, digits: int = 8) -> str:
    return "not a finite number" if value is None else f"{value:.{digits}g}"
