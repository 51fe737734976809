"""What of a run file's model a checkpoint keeps, so that one that computes something else does not go on from it.

Shapes and names of parameters do not show everything: a `feature_layer`, the number of heads, the base of rotary
positions. So a checkpoint holds the run file's `model` and the whole transformers configuration of each part, flat, by
key. What another value of a key may do is one of three:

* nothing, or nothing any more: where weights come from, how they were drawn, names and versions; these are left out;
* train otherwise: frozen parts, weights of losses, dropout, the tokens in whose places items stand; this is told;
* compute something else: all others; this is refused.

Limits: keys that only one side has, as other versions of motet and transformers do, are not compared.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from motet.config import PartConfig, RunConfig
from motet.errors import UserError
from motet.models.materialize import read_part_config
from motet.plan import LANGUAGE_MODEL
from motet.runtime.assembly import kind_of, media_attention_of, part_of, where_of

Values = Mapping[str, Any]
"""By key, such as `model.encoders.vision.values.hidden_act`."""

OF_PARTS = frozenset(PartConfig.model_fields) | {"projector_learning_rate", "part"}
"""Of the run file: where a part comes from and how fast it learns."""
NAMES = {"_name_or_path", "architectures", "transformers_version", "problem_type", "id2label", "label2id", "dtype"}
OF_OTHER_USES = {"use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder"}
OF_DRAWING = {"initializer_range", "initializer_factor", "init_std", "init_xavier_std", "logit_scale", "logit_bias"}
SHOWN_BY_PARAMETERS = {"tie_word_embeddings", "max_position_embeddings", "width"}
OF_TOKENS = {"bos_token_id", "eos_token_id"}
LEFT_OUT = frozenset(NAMES | OF_OTHER_USES | OF_DRAWING | SHOWN_BY_PARAMETERS | OF_TOKENS | OF_PARTS)
"""Keys, at any depth."""
TRAINING = frozenset({"train", "loss_weight", "max_logit_scale", "placeholder_tokens"})
"""Words of keys that say how the model is trained."""


def computation_of(config: RunConfig) -> dict[str, Any]:
    """All that is compared, in JSON's types. Raises `UserError` if a part's configuration cannot be read."""
    found = dict(_flat("model", config.model.model_dump(mode="json")))
    for name in config.model.module_names:
        part, where = part_of(config, name), where_of(config, name)
        transformers_config = read_part_config(part, kind_of(part), where=where)
        found.update(_flat(f"{where}.values", transformers_config.to_dict()))
        if name == LANGUAGE_MODEL:
            found["model.media_attention"] = media_attention_of(config, transformers_config.model_type)
    return dict(json.loads(json.dumps(found, default=str)))


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        if name not in LEFT_OUT:
            yield from _flat(f"{key}.{name}", inner)


def check_same_computation(checkpoint: object, saved: Values, now: Values) -> None:
    """Raises `UserError` naming a key by which the model computes something else. `saved`: empty in old checkpoints."""
    for key in _differing(saved, now):
        if not _is_of_training(key):
            raise UserError(
                f"train.resume: {checkpoint} is of another model: {key} is {json.dumps(saved[key])} there and "
                f"{json.dumps(now[key])} here; resume the run file that wrote it"
            )


def changes_of_training(saved: Values, now: Values) -> list[str]:
    """What is trained otherwise than before, in words."""
    return [
        f"{key} was {json.dumps(saved[key])} and is {json.dumps(now[key])}"
        for key in _differing(saved, now)
        if _is_of_training(key)
    ]


def _differing(saved: Values, now: Values) -> list[str]:
    return [key for key, value in now.items() if key in saved and saved[key] != value]


def _is_of_training(key: str) -> bool:
    words = key.split(".")
    return not TRAINING.isdisjoint(words) or "drop" in words[-1]
