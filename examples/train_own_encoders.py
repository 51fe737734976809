"""Two encoders written here and a language model, in a hand-written training loop.

    torchrun --nproc_per_node=4 examples/train_own_encoders.py

The question is along which axis the points lie, and how high the tone is. The language model is cut into two stages;
each encoder has a process of its own. On the way a checkpoint is written, and the model answers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from motet import ModalityModule, MultimodalModule, MultimodalParallelSpec, ParallelSpec
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from own_encoders import PointNet, SoundNet

POINTS, SOUND, QUESTION, AXIS, TONE = 30, 31, [1, 2, 3], 10, 20
"""Token ids."""


def make_batch(size: int, seed: int) -> dict[str, Tensor]:
    """The same in every process."""
    draw = torch.Generator().manual_seed(seed)
    axes, tones = (torch.randint(3, (size,), generator=draw) for _ in range(2))
    points = 0.1 * torch.randn(size, 64, 3, generator=draw)
    points[torch.arange(size), :, axes] *= 20
    waves = torch.sin(2 * torch.pi * 250 * 2.0 ** tones[:, None] * torch.arange(4000) / 8000)
    media = torch.tensor([POINTS] * 4 + [SOUND] * 25 + QUESTION).expand(size, -1)
    answers = torch.stack([AXIS + axes, TONE + tones], dim=1)
    ids = torch.cat([media, answers], dim=1)
    labels = torch.cat([torch.full_like(media, -100), answers], dim=1)
    return {"input_ids": ids, "labels": labels, "points": points, "waveform": waves}


def make_model() -> MultimodalModule:
    torch.manual_seed(0)
    llm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    return MultimodalModule(
        encoders={"points": ModalityModule(PointNet(), proj="mlp"), "sound": ModalityModule(SoundNet(), proj="mlp")},
        language_model=llm,
        placeholder_token_ids={"points": POINTS, "sound": SOUND},
    )


def main(output: Path, steps: int = 40) -> None:
    dist.init_process_group("gloo")
    spec = MultimodalParallelSpec(
        encoder_specs={"points": ParallelSpec(), "sound": ParallelSpec()},
        language_model_spec=ParallelSpec(pp_size=2),
        num_microbatches=2,
        microbatch_size=8,
    )
    model = spec.apply(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        loss = model(**make_batch(16, seed=step)).loss
        loss.backward()
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            checkpoint = model.save_checkpoint(output / "checkpoints", optimizer, step=step)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f} -> {checkpoint.name}")

    held_out = make_batch(8, seed=0)
    prompts = {**held_out, "input_ids": held_out["input_ids"][:, :-2], "labels": None}
    answers = torch.tensor(model.generate(prompts, max_new_tokens=2))
    model.save_pretrained(output / "exported")
    if dist.get_rank() == 0:
        print(f"right answers {(answers == held_out['input_ids'][:, -2:]).float().mean():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_encoders"))
