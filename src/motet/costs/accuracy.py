"""The error bar of computed costs: how far predicted steps were from published ones (docs/accuracy.md).

`accuracy.json` holds what `python -m benchmarks.published_throughput` prints for the rows that count.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ACCURACY: Mapping[str, Any] = json.loads(Path(__file__).with_name("accuracy.json").read_text())


def accuracy_text(source: str, hardware: str) -> str:
    """The error bar in words. `source`: that of a cost table."""
    if source != "analytic":
        return f"costs were measured on {hardware}; `motet train` prints how far its own step is from the prediction"
    kinds = [
        f"{kind} (of {ACCURACY[kind]['rows']} rows that count): median {ACCURACY[kind]['median']:.1%}, 90% within "
        f"{ACCURACY[kind]['percentile_90']:.1%}"
        for kind in ("text", "multimodal")
    ]
    return (
        f"error of the step's time over {ACCURACY['rows']} published rows: {'; '.join(kinds)}. Rows were judged under "
        "the software that they ran; of this package's own software on such devices nothing is published"
    )
