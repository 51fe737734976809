"""Oobleck's published numbers (thesis chapter 2), as data, and the inputs of the replays that they are the output of.

Tables 2.2 and 2.4 are replays: the authors' artifact (SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator,
MIT licence) gives throughputs for 15 to 30 nodes, batches and the seconds of what happens after a failure, and replays
15 failures. Its batches and seconds are here; its throughputs are not, our templates give theirs. What it does
otherwise than a cluster would is in docs/resilience.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HOURS = {"6h": 6 * 3600.0, "1h": 3600.0, "10m": 600.0}
"""Mean time between failures, by the name that the tables give it."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Tables 2.1 and 2.3; sizes that they leave out are those of the models' own papers. Seconds are the artifact's."""

    name: str
    num_parameters: float
    num_layers: int
    hidden_size: int
    sequence_length: int
    global_batch: int
    """The artifact's. Table 2.1 prints 8192 for the first three models and 1024 for the others."""
    microbatch: int
    save_s: float
    """Varuna's checkpoint, while training waits."""
    restart_s: float
    """Varuna's, from a failure until training goes on: a start of all processes, and loading. BERT-Large: the mean over
    15 to 30 nodes, for which the artifact has 49 to 112 s, less saving as with the others."""
    copy_s: float
    """Oobleck's reconfiguration, with all copies."""
    redundant_microbatch: int = 0
    """Bamboo's; 0: it ran out of memory."""
    take_over_s: float = 0.0
    """Bamboo's reconfiguration; `RENDEZVOUS_S` more if all starts again."""


MODELS = (
    Model(
        name="BERT-Large",
        num_parameters=340e6,
        num_layers=24,
        hidden_size=1024,
        sequence_length=512,
        global_batch=8192,
        microbatch=32,
        save_s=15.8,
        restart_s=68.9,
        copy_s=2.0,
        redundant_microbatch=4,
        take_over_s=76.0,
    ),
    Model(
        name="GPT-2",
        num_parameters=345e6,
        num_layers=24,
        hidden_size=1024,
        sequence_length=1024,
        global_batch=1024,
        microbatch=32,
        save_s=11.5,
        restart_s=71.5,
        copy_s=2.0,
        redundant_microbatch=1,
        take_over_s=80.0,
    ),
    Model(
        name="GPT-3 Medium",
        num_parameters=350e6,
        num_layers=24,
        hidden_size=1024,
        sequence_length=2048,
        global_batch=819,
        microbatch=16,
        save_s=11.2,
        restart_s=67.5,
        copy_s=3.0,
    ),
    Model(
        name="GPT-3 2.7b",
        num_parameters=2.7e9,
        num_layers=32,
        hidden_size=2560,
        sequence_length=2048,
        global_batch=512,
        microbatch=2,
        save_s=50.0,
        restart_s=465.0,
        copy_s=6.0,
    ),
    Model(
        name="GPT-3 6.7b",
        num_parameters=6.7e9,
        num_layers=32,
        hidden_size=4096,
        sequence_length=2048,
        global_batch=1024,
        microbatch=2,
        save_s=120.0,
        restart_s=581.0,
        copy_s=10.0,
    ),
)

RENDEZVOUS_S = 30.0
SAVE_EVERY, FREE_EVERY = 10, 2
"""Iterations between Varuna's checkpoints; such that cost nothing (Table 2.4)."""
FREE = "Varuna (no ckpt)"
"""Varuna at the same speed, with checkpoints that cost nothing."""

NUM_NODES = 30
"""Number of nodes with one A40 each, for which the text says 40 GB."""

THROUGHPUT: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "BERT-Large": {
        "Bamboo": (77.04, 75.60, 69.84),
        "Varuna": (260.11, 246.03, 173.52),
        "Oobleck": (287.10, 286.28, 282.11),
    },
    "GPT-2": {
        "Bamboo": (17.47, 17.13, 16.01),
        "Varuna": (86.51, 85.17, 76.39),
        "Oobleck": (85.59, 85.42, 84.80),
    },
    "GPT-3 Medium": {"Varuna": (29.50, 28.49, 20.19), "Oobleck": (29.30, 29.21, 28.70)},
    "GPT-3 2.7b": {"Varuna": (7.27, 6.53, 1.76), "Oobleck": (7.29, 7.23, 6.89)},
    "GPT-3 6.7b": {"Varuna": (4.14, 2.69, 0.26), "Oobleck": (4.33, 4.22, 3.55)},
}
"""Table 2.2: samples per second by model and system, every 6 h, 1 h, 10 min."""

WITHOUT_CHECKPOINTS: Mapping[str, tuple[float, float, float]] = {
    "BERT-Large": (275.88, 273.85, 264.16),
    "GPT-3 6.7b": (4.61, 4.29, 1.98),
}
"""Table 2.4: Varuna with checkpoints that cost nothing, every 2 iterations."""

PLANNING_S: Mapping[tuple[int, int], tuple[float, float, float, float]] = {
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
"""Table 2.3: seconds to plan one template, by (nodes, devices of each), for `PLANNED_LAYERS` layers."""

PLANNED_LAYERS = (24, 32, 64, 96)

SPOT_PERIODS_S = {"EC2 P3": 7.7 * 60, "GCP a2-highgpu-1g": 10.3 * 60}
"""Mean time between preemptions of the two spot traces."""
