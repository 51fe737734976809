"""CLIP on four processes: torchrun --nproc-per-node=4 examples/clip_distributed.py"""

import torch
from motet import ContrastiveParallelModule, TowerSpec
from torch.utils.data import DataLoader
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

torch.manual_seed(0)
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
vision = CLIPVisionConfig(**small, image_size=32, patch_size=8)
text = CLIPTextConfig(
    **small, vocab_size=64, max_position_embeddings=8, bos_token_id=0, pad_token_id=1, eos_token_id=63
)
config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
# Colours and their names: 6 words, then the end of the text.
examples = []
for _ in range(96):
    colour = torch.rand(3)
    words = [10 + int(7 * share) for share in colour] * 2
    image = colour[:, None, None].expand(3, 32, 32) + 0.1 * torch.randn(3, 32, 32)
    examples.append({"pixel_values": image, "input_ids": torch.tensor([0, *words, 63])})
loader = DataLoader(examples, batch_size=24, shuffle=True, generator=torch.Generator().manual_seed(0))

torch.distributed.init_process_group("gloo")
model = ContrastiveParallelModule(CLIPModel(config), {"image": TowerSpec(dp_size=3), "text": TowerSpec()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    for batch in loader:
        loss = model.execute(batch).loss
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
