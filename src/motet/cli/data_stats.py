"""`motet data-stats`: statistics of the training data: sizes, work, and the effect of each assignment policy."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from motet.cli.run_file import add_plan, add_run_file, add_seed, load_config, picture_file
from motet.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from motet.report.data_stats import DataStats

    Values = NDArray[np.float64]

HELP = "show how sizes and work vary over the training data, and the iteration time of each assignment policy"

QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_plan(parser)
    parser.add_argument("--picture", metavar="stats.png", help="draw distributions, ratios and bubbles (png, svg, pdf)")
    parser.add_argument(
        "--samples", type=int, default=2000, help="number of samples, in the order of training (default: 2000)"
    )
    parser.add_argument(
        "--batches", type=int, default=4, help="number of global batches whose iterations are predicted (default: 4)"
    )
    add_seed(parser, "seed of the batches that are drawn to measure the variation of ratios")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = load_config(arguments)
    for option in ("samples", "batches"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option}: is {getattr(arguments, option)}; give at least 1")
    from motet.api import read_or_make_plan, read_problem, read_samples
    from motet.report.data_stats import data_stats

    picture = picture_file(arguments.picture, "--picture") if arguments.picture else None
    problem = read_problem(config)
    plan = read_or_make_plan(arguments.plan, config, problem)
    samples = read_samples(config, max(arguments.samples, len(problem.samples)))
    stats = data_stats(problem, plan, samples, num_batches=arguments.batches, seed=arguments.seed)
    result = as_json(stats)
    print(as_text(result))
    if picture:
        from motet.report.pictures import save_data_stats

        save_data_stats(stats, picture)
    return result


def as_json(stats: "DataStats") -> dict[str, Any]:
    modules = stats.modules
    all_work_s = sum(float(module.work_s.sum()) for module in modules.values())
    found = stats.profiling_size
    return {
        "num_samples": len(next(iter(modules.values())).tokens),
        "global_batch_size": stats.global_batch_size,
        "modules": {
            name: {
                "kind": stats.plan.modules[name].kind,
                "share_of_samples": module.share_of_samples,
                "tokens": _quantiles(module.tokens[module.tokens > 0]),
                "own_tokens": _quantiles(module.own_tokens[module.tokens > 0]),
                "work_s": _quantiles(module.work_s[module.tokens > 0]),
                "videos": {
                    "number": len(module.video_frames),
                    "frames": _quantiles(module.video_frames),
                    "tokens": _quantiles(module.video_tokens),
                },
                "share_of_work": float(module.work_s.sum()) / all_work_s,
            }
            for name, module in modules.items()
        },
        "ratios": {
            name: {
                "whole": ratio.whole,
                "by_sample": _quantiles(ratio.by_sample),
                "by_batch_size": {str(size): _band(values) for size, values in ratio.by_batch_size.items()},
            }
            for name, ratio in stats.ratios.items()
        },
        "profiling_size": found and {"num_samples": found.num_samples, "devices": _devices(stats)},
        "why_no_profiling_size": stats.why_no_profiling_size,
        "num_batches": stats.num_batches,
        "assignments": {
            name: {
                "iteration_time_s": each.iteration_time_s,
                "bubble_fraction": each.bubble_fraction,
                "is_plans_own": name == stats.plan.assignment,
            }
            for name, each in stats.assignments.items()
        },
    }


def _devices(stats: "DataStats") -> dict[str, int]:
    assert stats.profiling_size is not None
    allocation: Any = stats.profiling_size.allocation
    return dict(zip(stats.modules, allocation, strict=True))


def _quantiles(values: "Values") -> dict[str, float] | None:
    """Mean and quantiles; None without values."""
    import numpy as np

    if not len(values):
        return None
    return {"mean": float(values.mean()), **{name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}}


def _band(values: "Values") -> dict[str, float]:
    import numpy as np

    return {name: float(np.quantile(values, q)) for name, q in (("p5", 0.05), ("median", 0.5), ("p95", 0.95))}


def as_text(values: Mapping[str, Any]) -> str:
    lines = [f"{values['num_samples']} samples; global batches of {values['global_batch_size']}", ""]
    for what, title, scale, form in (
        ("tokens", "tokens", 1.0, ".0f"),
        ("own_tokens", "tokens of its own", 1.0, ".0f"),
        ("work_s", "work, device-ms", 1e3, ".3g"),
    ):
        lines.append(f"{title:<20}{'has it':>9}{'mean':>10}" + "".join(f"{name:>10}" for name in QUANTILES))
        for name, module in values["modules"].items():
            spread = module[what]
            if spread is None or (what == "own_tokens" and spread == module["tokens"]):
                continue
            cells = "".join(f"{spread[column] * scale:>10{form}}" for column in ("mean", *QUANTILES))
            lines.append(f"{name:<20}{module['share_of_samples']:>9.1%}{cells}")
        lines.append("")
    for name, module in values["modules"].items():
        videos = module["videos"]
        if videos["number"]:
            lines.append(
                f"{videos['number']} videos in {name}: {videos['frames']['mean']:.1f} frames and "
                f"{videos['tokens']['mean']:.0f} tokens on average, at most {videos['frames']['max']:.0f} and "
                f"{videos['tokens']['max']:.0f}"
            )
    for name, ratio in values["ratios"].items():
        lines.append(f"work of {name} over the language model's: {ratio['whole']:.3g}; 5% to 95% of batches of")
        bands = [f"{size}: {band['p5']:.3g} to {band['p95']:.3g}" for size, band in ratio["by_batch_size"].items()]
        lines += [f"    {', '.join(bands[first : first + 4])}" for first in range(0, len(bands), 4)]
    lines += [_profiling_text(values), ""]
    lines.append(f"{'assignment':<20}{'iteration':>12}{'bubble':>8}   mean of {values['num_batches']} batches")
    for name, each in values["assignments"].items():
        own = "   the plan's" if each["is_plans_own"] else ""
        lines.append(f"{name:<20}{each['iteration_time_s'] * 1e3:>9.2f} ms{each['bubble_fraction']:>8.1%}{own}")
    return "\n".join(lines)


def _profiling_text(values: Mapping[str, Any]) -> str:
    found = values["profiling_size"]
    if found is None:
        return f"b_min: none ({values['why_no_profiling_size']})"
    devices = ", ".join(f"{name} {number}" for name, number in found["devices"].items())
    verdict = "the global batch is" + ("" if values["global_batch_size"] >= found["num_samples"] else " not")
    return (
        f"b_min: {found['num_samples']} samples suffice for a stable allocation of devices ({devices}); "
        f"{verdict} that large"
    )
