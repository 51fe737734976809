"""Listing 1 of the Cornstarch paper, with small models.

torchrun --nproc-per-node=6 examples/listing_cornstarch_1.py
"""

import torch
from motet import (
    ModalityModule,
    MultimodalModule,
    MultimodalParallelModule,
    MultimodalParallelSpec,
    ParallelSpec,
)
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
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=IMAGE_SIZE,
            patch_size=8,
            vision_use_head=False,
        )
    )
    audio = WhisperEncoder(
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
            "vision": ModalityModule(vis, proj="mlp"),
            "audio": ModalityModule(audio, proj="linear"),
        },
        language_model=ModalityModule(llm),
    )

    # The vision encoder is frozen, its projector is trained
    mllm.vision_encoder.module.train(mode=False)
    mllm.vision_encoder.projector.train(mode=True)

    # On many devices
    torch.distributed.init_process_group("gloo")
    vis_spec = ParallelSpec(
        tp_size=2,
        cp_size=1,
        pp_size=2,
    )
    audio_spec = ParallelSpec()
    llm_spec = ParallelSpec()
    mm_spec = MultimodalParallelSpec(
        encoder_specs={"vision": vis_spec, "audio": audio_spec},
        language_model_spec=llm_spec,
        num_microbatches=4,
        microbatch_size=4,
    )
    parallel_mllm: MultimodalParallelModule = mm_spec.apply(mllm)

    # Training
    optimizer = torch.optim.AdamW(parallel_mllm.parameters(), lr=3e-3)
    dataloader = make_dataloader(num_batches=12, batch_size=16)
    for batch_input in dataloader:
        output = parallel_mllm.execute(batch_input)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"loss {output.loss:.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
