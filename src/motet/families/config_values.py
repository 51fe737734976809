"""Checks values that a run file gives for a configuration of transformers, which accepts any key and most values.

A key must be one that something reads: the configuration class has it or derives another setting from it, or the
family's code asks for it. Values must be of the kind of the setting's default, and numbers within limits.
"""

import difflib
import inspect
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.activations import ACT2FN

from motet.errors import UserError

MOST_LAYERS, MOST_OF_A_SIZE = 10_000, 10**8
SAME_KEY = 0.85
"""Likeness (`difflib`) of a key to the one that was meant; no key of transformers' own is so like another."""
OF_ALL_CONFIGS = {"attn_implementation", "experts_implementation", "dtype", "torch_dtype", "is_decoder"}
"""Arguments of every configuration that no signature names, and what motet sets for caption decoders of any family."""
REFUSED = {"quantization_config": "quantized weights cannot be trained"}
"""Keys of every configuration that motet does not obey, and why."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
POSITIVE = re.compile(r"(theta|base_freq|(^|_)eps(ilon)?)$")
"""Names of numbers that are divided by, or whose logarithm is taken."""
SHARE = re.compile(r"(drop_?out|_drop|pdrop|layerdrop|drop_path_rate)(_prob|_rate|_p)?$")
"""Names of shares of what is left out."""
PART = "partial_rotary_factor"
"""Name of the share of a head's numbers that is rotated."""
MULTIPLIER = re.compile(r"(^|_)(scale|scaling|multiplier|factor)(_|$)")
"""Names of numbers that need not be whole, though the usual one may be."""
SIDES = re.compile(r"image|patch|kernel|stride|window")
"""Names of numbers of pixels, of which there may be two; of other numbers there may be one for each layer."""
TOKEN = re.compile(r"token_(id|index)$")
"""Names of tokens: one, or a list of several."""


def check_values(config_class: type[PretrainedConfig], values: Mapping[str, Any], where: str = ".values") -> None:
    """Raises `UserError` for a key that nothing reads, and for a value that cannot be meant.

    `where`: what stands before the key in the run file."""
    usual = {name: each.default for name, each in inspect.signature(config_class.__init__).parameters.items()}
    known = {*usual, *config_class.attribute_map, *config_class.attribute_map.values()} - {"self"}
    for key, value in values.items():
        place = f"{where}.{key}"
        if key in REFUSED:
            raise UserError(f"{place}: {REFUSED[key]}; leave it out")
        near = difflib.get_close_matches(key, known, n=1, cutoff=SAME_KEY)
        # `decoder_layers` is none of `encoder_layers`.
        is_misspelt = key not in known and bool(near) and near[0][0] == key[0]
        is_name = key.isidentifier()
        if is_misspelt or not is_name or not (key in known or key in OF_ALL_CONFIGS or _is_read(config_class, key)):
            near = near or difflib.get_close_matches(key, known, n=1)
            told = f"did you mean {near[0]!r}?" if near else f"{config_class.__name__} has none such; leave it out"
            raise UserError(f"{place}: is not a known key; {told}")
        part = _part_class(config_class, key, value)
        if part is not None:
            check_values(part, {name: each for name, each in value.items() if name != "model_type"}, place)
        elif key in ROPE_KEYS:
            _check_rope(value, place)
        elif TOKEN.search(key):
            _check_token(value, usual.get(key), _vocab_size(config_class, values), place)
        else:
            _check_value(key, value, usual.get(config_class.attribute_map.get(key, key)), place)


def _part_class(config_class: type[PretrainedConfig], key: str, value: Any) -> type[PretrainedConfig] | None:
    """The class of a part's configuration; None: the key is not that of a part."""
    if key not in config_class.sub_configs or not isinstance(value, dict):
        return None
    named = value.get("model_type")
    if named is not None:
        if named not in CONFIG_MAPPING:
            raise UserError(f".values.{key}.model_type: {named!r} is not known to the installed transformers")
        return CONFIG_MAPPING[named]
    part = config_class.sub_configs[key]
    return part if part.model_type else type(getattr(config_class(), key))


def _check_value(key: str, value: Any, default: Any, place: str) -> None:
    if isinstance(value, list) and value and POSITIVE.search(key):  # One for each layer.
        for index, each in enumerate(value):
            _check_value(key, each, default, f"{place}.{index}")
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise UserError(f"{place}: is {value}; give a finite number")
        if POSITIVE.search(key) and value <= 0:
            raise UserError(f"{place}: is {value}; give a number above 0")
        if SHARE.search(key) and not 0 <= value < 1:
            raise UserError(f"{place}: is {value}; give at least 0 and less than 1")
        if key == PART and not 0 < value <= 1:
            raise UserError(f"{place}: is {value}; give more than 0 and at most 1")
    elif POSITIVE.search(key) and value is not None:
        raise UserError(f"{place}: is {value!r}; give a number above 0")
    if isinstance(default, str) and default in ACT2FN and not (isinstance(value, str) and value in ACT2FN):
        near = difflib.get_close_matches(str(value), list(ACT2FN), n=1)
        told = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(ACT2FN)}"
        raise UserError(f"{place}: is {value!r}; {told}")
    if isinstance(default, float) and default > 0 and isinstance(value, int | float) and value < 0:
        raise UserError(f"{place}: is {value}; give at least 0")
    if not _is_count(default) or value is None or (MULTIPLIER.search(key) and _is_number(value) and value > 0):
        return
    is_list = isinstance(value, list) and len(value) > 1 and all(map(_is_count, value))
    is_list = is_list and (len(value) == 2 or not SIDES.search(key))
    if not (_is_count(value) or is_list):
        raise UserError(f"{place}: is {value!r}; give a whole number of at least 1")
    most = MOST_LAYERS if "layer" in key or key == "depth" else MOST_OF_A_SIZE
    if isinstance(value, int) and value > most:
        raise UserError(f"{place}: is {value}; give at most {most}")


def _vocab_size(config_class: type[PretrainedConfig], values: Mapping[str, Any]) -> int | None:
    """Number of tokens that the configuration will have; None: it is not known here."""
    name = next((key for key, real in config_class.attribute_map.items() if real == "vocab_size"), "vocab_size")
    defaults = inspect.signature(config_class.__init__).parameters
    candidates = [
        each.get(key)
        for each in (values, values.get("text_config"))
        if isinstance(each, dict)
        for key in ("vocab_size", name)
    ]
    if "vocab_size" in defaults and "text_config" not in config_class.sub_configs:
        candidates.append(defaults["vocab_size"].default)
    return next((size for size in candidates if _is_count(size)), None)


def _check_token(value: Any, default: Any, vocab_size: int | None, place: str) -> None:
    if value is None or value == default:  # Some classes' padding is -1.
        return
    most = MOST_OF_A_SIZE if vocab_size is None else vocab_size - 1
    for token in value if isinstance(value, list) and value else [value]:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= most:
            raise UserError(f"{place}: is {value!r}; give null or a token of the vocabulary, 0 to {most}")


def _check_rope(value: Any, place: str) -> None:
    """Checks the settings of rotary position embeddings, which may be given by kind of layer."""
    if not isinstance(value, dict):
        if value is not None:
            raise UserError(f"{place}: is {value!r}; give a mapping such as {{rope_type: default, rope_theta: 1.0e4}}")
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for key, inner in value.items():
        if isinstance(inner, dict):
            _check_rope(inner, f"{place}.{key}")
        elif key in ("rope_type", "type"):
            kinds = ["default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind != "default"), "mrope"]
            if inner not in kinds:
                raise UserError(f"{place}.{key}: is {inner!r}; give one of {', '.join(kinds)}")
        elif key in ("rope_theta", "factor", "original_max_position_embeddings") and not (
            _is_number(inner) and 0 < inner < math.inf
        ):
            raise UserError(f"{place}.{key}: is {inner!r}; give a number above 0")
        elif key == PART and not (_is_number(inner) and 0 < inner <= 1):
            raise UserError(f"{place}.{key}: is {inner!r}; give more than 0 and at most 1")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_read(config_class: type[PretrainedConfig], key: str) -> bool:
    """Whether a key that is no argument of the class changes another setting, or the family's code asks for it."""
    name, source = re.escape(key), _source(Path(inspect.getfile(config_class)).parent)
    if re.search(rf"\bconfig\.{name}\b|\b(get|pop|getattr|hasattr)\([^()]*[\"']{name}[\"']", source):
        return True
    try:
        usual, given = config_class().to_dict(), config_class(**{key: 0.5}).to_dict()
    except Exception:  # The class has an opinion of the key: it says so when the configuration is made.
        return True
    return key in usual or usual != {name: value for name, value in given.items() if name != key}


@cache
def _source(folder: Path) -> str:
    """The code of a family: its configuration and its models."""
    files = [path for name in ("configuration", "modeling") for path in sorted(folder.glob(f"{name}_*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)
