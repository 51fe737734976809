"""A task for the listings: say how bright the image and how loud the sound is."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY, NUM_LEVELS = 32, 4
IMAGE_SIZE, MEL_BINS, MEL_FRAMES = 16, 8, 16


class Levels(Dataset[dict[str, Tensor]]):
    """Each example: a question of three tokens, and one answer token for each modality."""

    def __init__(self, num_examples: int, *, sound: bool) -> None:
        self.num_examples, self.sound = num_examples, sound

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        bright, loud = torch.randint(NUM_LEVELS, (2,), generator=generator).tolist()
        answer = [10 + bright, 20 + loud] if self.sound else [10 + bright]
        example = {
            "input_ids": torch.tensor([1, 2, 3, *answer]),
            "labels": torch.tensor([-100, -100, -100, *answer]),
            "pixel_values": bright + 0.1 * torch.randn(3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        }
        if self.sound:
            example["input_features"] = loud + 0.1 * torch.randn(MEL_BINS, MEL_FRAMES, generator=generator)
        return example


def make_dataloader(num_batches: int, batch_size: int, *, sound: bool = True) -> DataLoader[dict[str, Tensor]]:
    """The same global batches in every process."""
    return DataLoader(Levels(num_batches * batch_size, sound=sound), batch_size=batch_size)
