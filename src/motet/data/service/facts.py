"""What servers and training have to agree on: all of the run file that decides what a sample becomes. Pure: no torch.

Not in it: where samples are prepared and how far ahead, seed and batch size, layout, learning rates. Paths are, as they
are written; what the files hold, only servers know, and they are compared with one another.
"""

from typing import Any

from motet.config import PartConfig, RunConfig
from motet.plan import DECODER, LANGUAGE_MODEL

HOW_IT_IS_DONE = {
    "workers",
    "batches_ahead",
    "servers",
    "server_timeout_s",
    "token_file",
    "tls_roots",
}
"""Keys of `data` that change no sample."""

OF_TRAINING = {"seed", "learning_rate", "projector_learning_rate", "train", "projector", "loss_weight"}
"""Keys of a part of the model that change no sample."""


def data_facts(config: RunConfig) -> dict[str, Any]:
    """All keys that decide what a sample becomes, as JSON has them."""
    model = config.model
    parts: dict[str, PartConfig] = {**model.encoders, **model.towers}
    if model.language_model is not None:
        parts[LANGUAGE_MODEL] = model.language_model
    if model.decoder is not None:
        parts[DECODER] = model.decoder
    return {
        "data": config.data.model_dump(mode="json", exclude=HOW_IT_IS_DONE),
        "model": {name: part.model_dump(mode="json", exclude=OF_TRAINING) for name, part in parts.items()},
        "merge": model.merge,
        "placeholder_tokens": dict(model.placeholder_tokens),
    }
