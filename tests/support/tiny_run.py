"""A run file small enough to be planned, profiled and trained in seconds."""

from pathlib import Path
from typing import Any

import yaml

TINY_RUN: dict[str, Any] = {
    "model": {
        "encoders": {
            "vision": {
                "config": "SiglipVisionConfig",
                "values": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 48,
                    "patch_size": 16,
                },
            },
            "audio": {
                "config": "WhisperConfig",
                "values": {
                    "d_model": 32,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 64,
                    "num_mel_bins": 16,
                    "max_source_positions": 25,
                },
            },
        },
        "language_model": {
            "config": "LlamaConfig",
            "values": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 64,
            },
        },
    },
    "data": {"kind": "dial-a-digit", "num_train": 64, "num_held_out": 16},
    "cluster": {"num_devices": 4},
    "parallel": {"num_microbatches": 2},
    "train": {"steps": 4, "global_batch_size": 8},
}


def write_tiny_run(folder: Path) -> Path:
    """The run file; its output goes beside it."""
    path = folder / "run.yaml"
    values = {**TINY_RUN, "train": {**TINY_RUN["train"], "output": str(folder / "output")}}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
