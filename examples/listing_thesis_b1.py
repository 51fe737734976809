"""Listing B.1 of the Cornstarch author's thesis, with small models.

torchrun --nproc-per-node=3 examples/listing_thesis_b1.py
"""

import torch
from motet import EncoderModule, MultimodalModule, MultimodalParallelModule, ParallelSpec
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tiny_task import IMAGE_SIZE, MEL_BINS, MEL_FRAMES, VOCABULARY, make_dataloader


def main() -> None:
    torch.manual_seed(0)

    # Unimodal models
    vis = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=IMAGE_SIZE,
            patch_size=8,
            vision_use_head=False,
        )
    )
    aud = WhisperEncoder(
        WhisperConfig(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            num_mel_bins=MEL_BINS,
            max_source_positions=MEL_FRAMES // 2,
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

    # One multimodal model
    mllm = MultimodalModule(
        encoders={
            "vision": EncoderModule(vis, proj="mlp"),
            "audio": EncoderModule(aud, proj="linear"),
        },
        language_model=llm,
    )

    # A layout for each module
    vis_spec = ParallelSpec(pp_size=1)
    aud_spec = ParallelSpec(pp_size=1)
    llm_spec = ParallelSpec(pp_size=1)

    # On many devices
    torch.distributed.init_process_group("gloo")
    dist_mllm = MultimodalParallelModule(
        mllm,
        modality_parallelism="parallel",
        encoder_specs={
            "vision": vis_spec,
            "audio": aud_spec,
        },
        language_model_spec=llm_spec,
        num_microbatches=4,
        microbatch_size=4,
    )

    # Training
    optimizer = torch.optim.AdamW(dist_mllm.parameters(), lr=3e-3)
    dataloader = make_dataloader(num_batches=12, batch_size=16)
    for batch in dataloader:
        output = dist_mllm.execute(batch)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"loss {output.loss:.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
