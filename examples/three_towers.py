"""How many held-out samples three towers find: trains `three_towers.yaml` if asked to, then retrieves 1 of 64.

    python examples/three_towers.py            # trains on 4 processes, some minutes on 2 cores, then retrieves
    python examples/three_towers.py --trained  # retrieves with what was trained before

Among 64 held-out samples, each tower's features have to be nearest to those of the same sample in every other tower,
in both directions. Handwriting and noise of the held-out samples were never trained on.
"""

import argparse
import json
from pathlib import Path

import torch
from motet.assignment.sample import Sample
from motet.config import load_run_config
from motet.data.preparation import Dataset
from motet.data.run_file import open_data
from motet.models.hub.export import load_towers
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

RUN_FILE = Path(__file__).with_suffix(".yaml")
CANDIDATES = 64


class Candidates:
    """A few samples of a dataset, as a batch."""

    def __init__(self, dataset: Dataset, first: int) -> None:
        self._dataset, self._first = dataset, first
        self.samples: tuple[Sample, ...] = tuple(dataset.sample(first + i) for i in range(CANDIDATES))

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return self._dataset.features(self._first + sample, module)


@torch.no_grad()
def retrieval(export: Path, num_rounds: int) -> dict[str, float]:
    """For each direction, the share of samples that are found among `CANDIDATES`."""
    disable_progress_bar()
    model = load_towers(export)
    held_out = open_data(load_run_config(RUN_FILE, [])).held_out
    assert held_out is not None
    found: dict[str, list[Tensor]] = {}
    for first in range(0, num_rounds * CANDIDATES, CANDIDATES):
        batch = Candidates(held_out, first)
        features = {name: nn.functional.normalize(e, dim=-1) for name, e in model.embeddings(batch).items()}
        for a in features:
            for b in features:
                if a != b:
                    nearest = (features[a] @ features[b].T).argmax(dim=1)
                    found.setdefault(f"{a} -> {b}", []).append(nearest == torch.arange(CANDIDATES))
    return {direction: torch.cat(hits).float().mean().item() for direction, hits in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", action="store_true", help="do not train")
    parser.add_argument("--rounds", type=int, default=8, help=f"of {CANDIDATES} held-out samples")
    parser.add_argument("--output", default=None, help="in place of train.output")
    arguments = parser.parse_args()
    output = Path(arguments.output or load_run_config(RUN_FILE, []).train.output)
    if not arguments.trained:
        from motet.cli.main import main

        if main(["train", str(RUN_FILE), "--set", f"train.output={output}"]) != 0:
            raise SystemExit(1)
    print(json.dumps({name: round(share, 3) for name, share in retrieval(output / "export", arguments.rounds).items()}))
