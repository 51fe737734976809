"""A tower of images and one of texts, and a batch for them."""

import torch
from contrastive_cases import Case, Tower

CASE = Case({"image": Tower("clip"), "text": Tower("siglip_text")}, dtype="float32")


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"pixel_values": torch.randn(6, 3, 16, 16), "input_ids": torch.randint(1, 49, (6, 9))}
