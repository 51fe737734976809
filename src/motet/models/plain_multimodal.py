"""The plain forward of a whole multimodal model, as its user would write it with transformers: what `motet verify`
compares with. Sample by sample, without padding or packing.

It reads token ids and labels, not the layouts of the language model: encoder outputs go where placeholder ids stand.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from motet.data.batch import Batch
from motet.models.plain import plain_encoder_output

IGNORED_LABEL = -100


def plain_loss(
    encoders: Mapping[str, Any],
    language_model: Any,
    batch: Batch,
    *,
    merge: str,
    placeholder_token_ids: Mapping[str, int],
    language_model_name: str = "language_model",
) -> Tensor:
    """Mean loss over all tokens of the batch that have a label and a token before them, with its graph.

    Args:
        encoders: by name: has `module`, `projector` and the callbacks (or None).
        language_model: a plain `...ForCausalLM`.
        merge: "placeholder", "prepend" or "cross_attention".
        placeholder_token_ids: by encoder, for "placeholder".
    """
    total: Any = 0.0
    num_tokens = 0
    for i, sample in enumerate(batch.samples):
        features = batch.features(language_model_name, i)
        ids, labels = features["input_ids"], features["labels"]
        tokens = {
            name: plain_encoder_output(encoder, batch.features(name, i), sample.layouts[name])
            for name, encoder in encoders.items()
            if sample.layouts.get(name)
        }
        embeddings = language_model.get_input_embeddings()(ids)
        extra: dict[str, Any] = {}
        if merge == "cross_attention" and tokens:
            states = torch.cat(list(tokens.values()))[None]
            # Without a mask, transformers' attention would take the keys for a causal sequence.
            everything = states.new_zeros(1, 1, len(ids), states.shape[1])
            extra = {"cross_attention_states": states, "cross_attention_mask": everything}
        elif merge == "prepend" and tokens:
            front = torch.cat(list(tokens.values()))
            embeddings = torch.cat([front.to(embeddings.dtype), embeddings[len(front) :]])
        elif merge == "placeholder":
            for name, outputs in tokens.items():
                here = (ids == placeholder_token_ids[name]).nonzero().squeeze(-1)
                embeddings = embeddings.index_put((here,), outputs.to(embeddings.dtype))
        logits = language_model(inputs_embeds=embeddings[None], use_cache=False, **extra).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + cross_entropy(wide[:-1], labels[1:], ignore_index=IGNORED_LABEL, reduction="sum")
        num_tokens += int((labels[1:] != IGNORED_LABEL).sum())
    return total / num_tokens
