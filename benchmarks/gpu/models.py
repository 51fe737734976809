"""Run files of what is measured: a stage as wide as a 7B model's with a ViT-L, or tiny ones for rehearsals."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from motet.config import RunConfig
from motet.recomputation import with_kind

WIDE = {
    "vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
               "image_size": 336, "patch_size": 14, "vision_use_head": False},
    "language_model": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4,
                       "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 8192},
}  # fmt: skip
TINY = {
    "vision": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "image_size": 48, "patch_size": 16, "vision_use_head": False},
    "language_model": {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}  # fmt: skip


def write_weights(folder: Path, device: str, *, tiny: bool) -> None:
    """Random weights in bfloat16 as folders of transformers, drawn on the device: on CPUs that takes half a minute."""
    sizes = TINY if tiny else WIDE
    with torch.device(device):
        torch.manual_seed(0)
        for name, model in {
            "vision": SiglipVisionModel._from_config(SiglipVisionConfig(**sizes["vision"]), dtype=torch.bfloat16),
            "language_model": LlamaForCausalLM._from_config(
                LlamaConfig(**sizes["language_model"]), dtype=torch.bfloat16
            ),
        }.items():
            model.save_pretrained(folder / name)


def run_config(
    output: Path,
    device: str,
    *,
    weights: Path | None = None,
    tiny: bool,
    packing: bool = False,
    packed_attention: str = "auto",
    recompute: str | None = None,
    compiles: bool = False,
    dp: int = 1,
    steps: int = 6,
    costs: Path | None = None,
) -> RunConfig:
    """Everything on each rank.

    Args:
        weights: what `write_weights` has written; None: drawn by each rank.
        packed_attention: as in run files.
        recompute: the kind of activation checkpointing of both modules.
        compiles: whether blocks are compiled; in a rehearsal without kernels of their own.
        costs: a file of measured costs.
    """
    sizes = TINY if tiny else WIDE
    cluster: dict[str, Any] = {"device": device, "num_devices": dp}
    if costs is not None:
        cluster["costs"] = str(costs)
    part = {"dp": dp}
    vision: dict[str, Any] = {"config": "SiglipVisionConfig", "values": sizes["vision"]}
    language_model: dict[str, Any] = {"config": "LlamaConfig", "values": sizes["language_model"]}
    if weights is not None:
        vision, language_model = ({"path": str(weights / name)} for name in ("vision", "language_model"))
    return RunConfig.model_validate(
        {
            "model": {
                "encoders": {"vision": {**vision, "projector": "mlp"}},
                "language_model": language_model,
            },
            "data": {"kind": "dial-a-digit", "num_train": 256, "no_image": 0.0, "no_sound": 1.0},
            "cluster": cluster,
            "parallel": {
                "planner": "explicit",
                "placement": "replicated",
                "explicit": {"vision": part, "language_model": part},
                "num_microbatches": 2,
                "packing": packing,
                "packed_attention": packed_attention,
                "recompute": tuple(with_kind(name, recompute) for name in ("vision", "language_model"))
                if recompute
                else (),
            },
            "train": {
                "steps": steps,
                "global_batch_size": (8 if tiny else 16) * dp,
                # At 0.001 and without warm-up losses rise in the first steps of a model that is 4096 wide.
                "learning_rate": 1e-3 if tiny else 1e-4,
                "dtype": "bfloat16",
                "compile": "blocks" if compiles else "nothing",
                "compile_backend": "aot_eager" if tiny else "inductor",
                "output": str(output),
            },
        }
    )
