"""A `MultimodalModule` in one process: every module is one stage, the whole batch one microbatch.

Where `media_attention` is not causal, the language model's attention is motet's from then on.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from motet.families.language_models import num_language_model_layers
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import Batch, StageInput

if TYPE_CHECKING:
    from motet.models.multimodal import MultimodalModule


def run_single_process(model: "MultimodalModule", batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Logits [samples, longest sequence, vocabulary], and the mean loss over labelled tokens if there are any."""
    incoming = {}
    for name, encoder in model.modality_modules(encoders_only=True).items():
        members = [i for i, sample in enumerate(batch.samples) if sample.has(name)]
        if members:
            stage = EncoderStage(name, encoder, (0, num_encoder_layers(encoder.module, encoder.projector)))
            samples = [batch.samples[i] for i in members]
            output = stage(StageInput(samples, [batch.features(name, i) for i in members])).hidden
            assert output is not None
            incoming[name] = output
    name = "language_model"
    causal_lm = model.language_model.module
    language_model = LanguageModelStage(
        name,
        causal_lm,
        (0, num_language_model_layers(causal_lm)),
        media_attention=model.media_attention,
        preprocess_callback=model.preprocess_callback,
    )
    features = [batch.features(name, i) for i in range(len(batch.samples))]
    hidden, sequences, context = language_model.hidden_states(StageInput(batch.samples, features, incoming=incoming))
    num_loss_tokens = sum(sample.num_loss_tokens.get(name, 0) for sample in batch.samples)
    loss = language_model.loss_sum(hidden, features, sequences, context) / num_loss_tokens if num_loss_tokens else None
    logits = language_model.logits(hidden)
    if sequences.packed:
        logits = pad_sequence(logits[0].split(sequences.lengths), batch_first=True)
    return logits, loss
