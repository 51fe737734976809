"""How far are predicted steps from published ones? All rows of `papers.throughput`, under the costs of this commit.

`--fit` fits the constants anew and prints them; what it finds belongs into `src/motet/cluster/catalogue.yaml` and
`src/motet/costs/software.yaml`. `--held-out` adds cross-validation: by group (source, model, device) and by source.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Sequence
from itertools import groupby
from statistics import mean, median

from benchmarks.reporting import Report
from motet.errors import UserError
from papers.throughput.calibration import CONSTANTS, cross_validate, fit, linearize, released
from papers.throughput.prediction import Prediction, predict
from papers.throughput.published import Measurement, measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--held-out", action="store_true", help="cross-validate")
    arguments = parser.parse_args()
    report = Report("published-throughput", "Predicted steps against 203 published rows")
    predicted: list[Prediction] = []
    lines, without = [], []
    for row in measurements():
        try:
            prediction = _predicted(row)
        except UserError as error:
            without.append((row.id, str(error)))
            continue
        predicted.append(prediction)
        lines.append(
            (row.id, row.software, f"{row.seconds:.4g}", f"{prediction.seconds:.4g}", f"{prediction.error:+.1%}")
        )
    counting = [prediction for prediction in predicted if prediction.row.counts]
    report.add(
        f"{len(predicted)} of {len(measurements())} rows have a model, a layout and a time; {len(counting)} of them "
        "count (text in bfloat16; multimodal without Optimus' Megatron-LM rows). An error is the predicted step's time "
        "over the measured one, less 1."
    )
    report.table(
        ("rows", "number", "median of the size", "90th percentile", "mean"),
        [_summary(*each) for each in _by_kind(counting)],
    )
    report.table(
        ("source and device", "number", "median of the size", "90th percentile", "mean"),
        [_summary(*each) for each in _by_source(predicted)],
    )
    if arguments.fit or arguments.held_out:
        _validate(report, arguments.fit)
    report.table(("row", "software", "measured s", "predicted s", "error"), lines)
    report.table(("row without a prediction", "why"), without)
    report.write()


def _validate(report: Report, fits: bool) -> None:
    rows = [row for row in measurements() if row.counts and (row.kind == "text" or row.unet)]
    before = released()
    constants = fit(rows, before) if fits else before
    report.add(
        "Constants. Fitted to the text rows that count, and that of convolutions to Stable Diffusion's; "
        "cross-validation fits them anew without the rows that it judges."
    )
    report.table(
        ("constant", "prior", "fitted", "released", "rows", "source of the prior"),
        [
            (
                constant.name,
                f"{constant.prior:g}",
                f"{constants[constant.name]:.3f}",
                f"{before[constant.name]:.3f}",
                sum(constant.applies(row) for row in rows),
                constant.prior_source,
            )
            for constant in CONSTANTS
        ],
    )
    linear = linearize(rows, constants)
    for what, key in (("group (source, model, device)", lambda row: row.group), ("source", lambda row: row.source)):
        held_out = [each.prediction for each in cross_validate(linear, key)]
        report.add(f"Held out by {what}:")
        report.table(
            ("rows", "number", "median of the size", "90th percentile", "mean", "within 20%"),
            [
                (*_summary(*each), f"{mean(abs(prediction.error) <= 0.2 for prediction in each[1]):.1%}")
                for each in [*_by_kind(held_out), *_by_source(held_out)]
            ],
        )
        worst = sorted(held_out, key=lambda each: -abs(each.error))[:12]
        report.table(("worst held-out row", "error"), [(each.row.id, f"{each.error:+.1%}") for each in worst])


def _predicted(row: Measurement) -> Prediction:
    if not row.has_shape or row.seconds is None or row.gbs is None:
        raise UserError("the source names no shape" if not row.has_shape else "the source gives no time of a step")
    return predict(row)


def _by_kind(predicted: Sequence[Prediction]) -> list[tuple[str, Sequence[Prediction]]]:
    return [(kind, [each for each in predicted if each.row.kind == kind]) for kind in ("text", "multimodal")]


def _by_source(predicted: Sequence[Prediction]) -> list[tuple[str, Sequence[Prediction]]]:
    def key(each: Prediction) -> str:
        counts = "" if each.row.counts else ", does not count"
        return f"{each.row.source}, {each.row.device}, {each.row.precision}{counts}"

    return [(name, list(group)) for name, group in groupby(sorted(predicted, key=key), key)]


def _summary(name: str, predicted: Sequence[Prediction]) -> tuple[object, ...]:
    sizes = sorted(abs(each.error) for each in predicted)
    at_90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    bias = mean(each.error for each in predicted)
    return name, len(sizes), f"{median(sizes):.1%}", f"{at_90:.1%}", f"{bias:+.1%}"


if __name__ == "__main__":
    main()
