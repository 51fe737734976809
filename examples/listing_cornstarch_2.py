"""Listing 2 of the Cornstarch paper, with small models: callbacks around modules.

Images are cut into four blocks that a vision encoder of half their size sees one by one, and the outputs of all blocks
are put before the text.

    torchrun --nproc-per-node=2 examples/listing_cornstarch_2.py
"""

from typing import Any

import torch
from motet import ModalityModule, MultimodalModule, MultimodalParallelSpec, ParallelSpec
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from tiny_task import IMAGE_SIZE, VOCABULARY, make_dataloader

BLOCK_SIZE = IMAGE_SIZE // 2


def cb_before_encoder(inputs: dict) -> dict[str, Any]:
    # [B, 3, H, W] -> [B x N, 3, Bs, Bs]
    blocks = inputs["pixel_values"].unfold(2, BLOCK_SIZE, BLOCK_SIZE).unfold(3, BLOCK_SIZE, BLOCK_SIZE)
    inputs["pixel_values"] = blocks.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    return inputs


def cb_after_encoder(inputs: dict, output: tuple) -> tuple:
    return output


def cb_after_proj(inputs: dict, output: tuple) -> tuple:
    return output


def cb_before_llm(encoder_outputs: dict, inputs: dict) -> dict:
    # The sequence begins with room for the encoder's tokens.
    tokens = encoder_outputs["vision"]
    inputs["inputs_embeds"] = torch.cat([tokens, inputs["inputs_embeds"][len(tokens) :]])
    return inputs


def main() -> None:
    torch.manual_seed(0)
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=BLOCK_SIZE,
            patch_size=4,
        )
    )
    llm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )

    vision_encoder = ModalityModule(
        model=vision,
        projector="mlp",
        preprocess_callback=cb_before_encoder,
        postprocess_module_callback=cb_after_encoder,
        postprocess_projector_callback=cb_after_proj,
    )
    mllm = MultimodalModule(
        encoders={"vision": vision_encoder},
        language_model=llm,
        preprocess_callback=cb_before_llm,
    )

    torch.distributed.init_process_group("gloo")
    mm_spec = MultimodalParallelSpec(
        encoder_specs={"vision": ParallelSpec()},
        language_model_spec=ParallelSpec(),
        num_microbatches=2,
        microbatch_size=8,
    )
    parallel_mllm = mm_spec.apply(mllm)
    optimizer = torch.optim.AdamW(parallel_mllm.parameters(), lr=3e-3)
    for batch_input in make_dataloader(num_batches=12, batch_size=16, sound=False):
        output = parallel_mllm.execute(batch_input)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"loss {output.loss:.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
