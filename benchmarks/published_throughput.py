"""How far are predicted steps from published ones? All rows of `papers.throughput`, under the costs of this commit."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Sequence
from itertools import groupby
from statistics import mean, median

from benchmarks.reporting import Report
from motet.errors import UserError
from papers.throughput.prediction import Prediction, predict
from papers.throughput.published import Measurement, measurements


def main() -> None:
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
    report.table(("row", "software", "measured s", "predicted s", "error"), lines)
    report.table(("row without a prediction", "why"), without)
    report.write()


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
