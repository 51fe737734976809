"""What servers and training have to agree on: all of the run file that decides what a sample becomes. Pure: no torch.

Not in it: where samples are prepared and how far ahead, seed and batch size, layout, learning rates. Paths are, as they
are written; what the files hold, only servers know, and they are compared with one another.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from motet.config import PartConfig, RunConfig

HOW_IT_IS_DONE = {
    "workers",
    "batches_ahead",
    "servers",
    "server_timeout_s",
    "token_file",
    "tls_roots",
    "seed",
}
"""Keys of `data` that change no sample."""

OF_TRAINING = {"seed", "learning_rate", "projector_learning_rate", "train", "projector"}
"""Keys of a part of the model that change no sample."""


def data_facts(config: "RunConfig") -> dict[str, Any]:
    keep_seed = config.data.kind in ("dial-a-digit", "same-digits")  # It makes the samples there.
    model = config.model
    parts: dict[str, Mapping[str, PartConfig]] = {"encoders": model.encoders, "towers": model.towers}
    if model.language_model is not None:
        parts["language_model"] = {"language_model": model.language_model}
    return {
        "data": config.data.model_dump(mode="json", exclude=HOW_IT_IS_DONE - ({"seed"} if keep_seed else set())),
        **{
            kind: {name: part.model_dump(mode="json", exclude=OF_TRAINING) for name, part in sorted(named.items())}
            for kind, named in parts.items()
        },
        "merge": model.merge,
        "placeholder_tokens": dict(model.placeholder_tokens),
    }
