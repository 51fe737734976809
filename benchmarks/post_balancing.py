"""Post-balancing, and encoders whose graphs are there for one microbatch at a time: simulated on three distributions.

Four replicas of Qwen2.5-VL's vision tower, on one A40 each, and of Llama 3.2-1B, on several, everything trained. Each
row is the median over batches of one data set (`uneven_data.py`): the iteration, and the largest peak of an encoder's
rank.

1. Assignments: `random`, `balanced`, `entrain` (deferral) and `post_balanced`, in which each module deals its samples
   to all of its replicas by itself.
2. `recompute_features` of the encoder: its outputs alone wait for their gradients, so its activations do not grow with
   the depth of the language model's pipeline, at the price of a second forward.

Run it by `python -m benchmarks.post_balancing`.
"""

import argparse
from dataclasses import replace
from statistics import median

from benchmarks.reporting import Report
from benchmarks.uneven_data import DATA_SETS, draw
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees, PlanningProblem
from papers.entrain.problems import VISION, problem

NUM_REPLICAS = 4
ASSIGNMENTS = ("random", "balanced", "entrain", "post_balanced")
DEPTHS = (2, 4, 8)


def drawn(data_set: str, batch: int, num_samples: int, depth: int) -> PlanningProblem:
    one = problem("1b", num_devices=(1 + depth) * NUM_REPLICAS)
    samples = draw(data_set, num_samples, batch=batch, vision=VISION)
    return replace(one, samples=samples, num_microbatches=8)


def measured(one: PlanningProblem, assignment: str, depth: int, *, again: bool = False) -> tuple[float, float]:
    """Seconds of an iteration, and GiB of the fullest rank of the encoder."""
    degrees = {"vision": Degrees(dp=NUM_REPLICAS), "language_model": Degrees(dp=NUM_REPLICAS, pp=depth)}
    plan = replace(build_plan(one, degrees), assignment=assignment, recompute_features=("vision",) if again else ())
    found = evaluate(one, plan)
    ranks = [rank for replica in plan.modules["vision"].replicas for rank in replica.stages[0].ranks]
    return found.iteration_time_s, max(found.result.peak_memory_bytes[rank] for rank in ranks) / 2**30


def main(arguments: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-sets", nargs="+", choices=DATA_SETS, default=["SynthChartNet", "ChartQA", "CocoQA"])
    parser.add_argument("--batches", type=int, default=3, help="global batches of each data set")
    parser.add_argument("--samples", type=int, default=128, help="samples of a batch")
    options = parser.parse_args(arguments)
    report = Report("post-balancing", "Post-balancing, and encoders' graphs one at a time")
    assert __doc__ is not None
    report.add(__doc__)
    rows, again = [], []
    for data_set in options.data_sets:
        found = {
            name: [measured(drawn(data_set, batch, options.samples, 2), name, 2) for batch in range(options.batches)]
            for name in ASSIGNMENTS
        }
        times = {name: median(seconds for seconds, _ in values) for name, values in found.items()}
        peaks = {name: median(peak for _, peak in values) for name, values in found.items()}
        rows.append([data_set, *(f"{1e3 * times[n]:.0f} ms, {peaks[n]:.1f} GiB" for n in ASSIGNMENTS)])
        rows[-1].append(f"{min(times['balanced'], times['entrain']) / times['post_balanced']:.3f}")
        for depth in DEPTHS:
            kept, made = (
                [
                    measured(
                        drawn(data_set, batch, options.samples, 2 * depth * NUM_REPLICAS), "balanced", depth, again=a
                    )
                    for batch in range(options.batches)
                ]
                for a in (False, True)
            )
            again.append(
                [
                    data_set,
                    depth,
                    *(f"{1e3 * median(s for s, _ in each):.0f} ms" for each in (kept, made)),
                    *(f"{median(p for _, p in each):.1f} GiB" for each in (kept, made)),
                ]
            )
    report.add("## Assignments")
    report.table(("data", *ASSIGNMENTS, "gain over the better of balanced and entrain"), rows)
    report.add("## Encoders' graphs one at a time, by the depth of the language model's pipeline")
    report.table(("data", "stages", "kept", "made again", "peak, kept", "peak, made again"), again)
    return report


if __name__ == "__main__":
    main().write()
