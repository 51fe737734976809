"""The README.md of an exported model: how to load it with transformers and torch alone. A test runs its code."""

from collections.abc import Mapping
from typing import Any

Manifest = Mapping[str, Any]
"""The content of the export's motet.json."""

_PROJECTORS = {
    "linear": "OrderedDict(linear=nn.Linear({in_features}, {out_features}))",
    "mlp": (
        "OrderedDict(linear_1=nn.Linear({in_features}, {out_features}), act=nn.GELU(), "
        "linear_2=nn.Linear({out_features}, {out_features}))"
    ),
}
_MERGES = {
    "placeholder": "replace the embeddings of the tokens with id {placeholder_token_id}, in order",
    "prepend": "stand before the embeddings of the text",
    "cross_attention": "are the language model's `cross_attention_states`",
}


def export_readme(manifest: Manifest, *, has_tokenizer: bool) -> str:
    """Markdown."""
    code = "\n".join(_loading_code(manifest, has_tokenizer=has_tokenizer))
    use = "\n".join(_how_features_are_used(name, manifest) for name in manifest["encoders"])
    return (
        "# A multimodal model in parts\n\n"
        "Written by motet. Plain transformers loads every part; run this in the folder of this file:\n\n"
        f"```python\n{code}\n```\n\n"
        f"How they are put together (`motet.json` has the same for programs):\n\n{use}\n\n"
        "An answer is then `language_model.generate(inputs_embeds=..., attention_mask=...)`. "
        "With motet: `motet.models.hub.export.load_export` and `motet.models.hub.generation.generate_answers`.\n"
    )


def _loading_code(manifest: Manifest, *, has_tokenizer: bool) -> list[str]:
    encoders, language_model = manifest["encoders"], manifest["language_model"]
    has_projector = any(encoder["projector"] in _PROJECTORS for encoder in encoders.values())
    classes = {(part["imported_from"], part["model_class"]) for part in (*encoders.values(), language_model)}
    lines = ["from collections import OrderedDict", ""] if has_projector else []
    lines += ["from safetensors.torch import load_file", "from torch import nn"] if has_projector else []
    lines += ["from transformers import AutoTokenizer"] if has_tokenizer else []
    lines += [f"from {module} import {name}" for module, name in sorted(classes)]
    lines += ["", f'language_model = {language_model["model_class"]}.from_pretrained("language_model")']
    lines += ['tokenizer = AutoTokenizer.from_pretrained("language_model")'] if has_tokenizer else []
    for name, encoder in encoders.items():
        lines.append(f'{name} = {encoder["model_class"]}.from_pretrained("{name}")')
        if encoder["projector"] in _PROJECTORS:
            in_features, out_features = encoder["projector_sizes"]
            layers = _PROJECTORS[encoder["projector"]].format(in_features=in_features, out_features=out_features)
            lines += [
                f"{name}_projector = nn.Sequential({layers}).to({name}.dtype)",
                f'{name}_projector.load_state_dict(load_file("{name}_projector/model.safetensors"))',
            ]
    return lines


def _how_features_are_used(name: str, manifest: Manifest) -> str:
    encoder = manifest["encoders"][name]
    layer = encoder["feature_layer"]
    features = f"`hidden_states[{layer}]`" if layer is not None else "its output"
    if encoder["feature_select"] == "patch":
        features += " without class token and padding"
    through = {None: "", "own": f", through the user's own projector (`{name}_projector/`)"}
    projected = through.get(encoder["projector"], f", through `{name}_projector`")
    merged = _MERGES[manifest["merge"]].format(placeholder_token_id=encoder["placeholder_token_id"])
    return f"* `{name}`: {features}{projected}: these {merged}."
