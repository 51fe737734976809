"""Exports a trained model as a folder that plain transformers loads: one sub-folder for each part.

    exported/
      vision/               config.json, model.safetensors, the image processor
      vision_projector/     config.json, model.safetensors
      language_model/       config.json, model.safetensors, generation_config.json, the tokenizer
      motet.json            how they are put together
      README.md             how to load them without motet

A module that was trained by adapters has these in `<module>_adapter/`, as peft reads them, beside its own weights; or
its weights are exported with the adapters added to them (`merged_export`).

A generator is written as `motet.models.hub.generators` says.

A contrastive model has its towers in place of the encoders, `contrastive/` (the loss: logit_scale and logit_bias),
`decoder/` if there is a caption decoder, and `whole/`: the same as one CLIPModel or SiglipModel, if transformers has
such a model. The features of a tower are its encoder's `pooler_output` (Whisper: the mean of its `last_hidden_state`
without padding), times the projector, divided by their length. The decoder's `encoder_hidden_states` are the
`last_hidden_state` of the tower that it reads, times the projector.

The folder is written under another name and renamed when it is complete. A part's sub-folder can be given as `path` in
another run file. `motet.models.hub.llava` writes one model of transformers' own instead, where it has the architecture.

Limits: callbacks are code and are not exported; a projector of the user's own is exported as its weights alone.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from motet.attention.masks.rules import rule_of_family
from motet.config import ModelConfig
from motet.errors import UserError, one_line
from motet.families.classes import Kind, model_class_of
from motet.families.encoders.encoder_families import ENCODER_FAMILIES
from motet.families.encoders.own_encoders import OwnConfig
from motet.families.encoders.token_counts import FeatureSelect
from motet.families.stored_weights import weights_of
from motet.models.contrastive import CaptionDecoder, ContrastiveModule
from motet.models.from_run_file import adapters_of
from motet.models.graph import Merge, ModalityModule, ModuleGraph
from motet.models.hub.adapters import MergedTensors, load_adapters, save_adapters, without_adapters
from motet.models.hub.clip import is_transformers_model, to_transformers
from motet.models.hub.code_generators import CodesDescription
from motet.models.hub.generators import (
    Description,
    check_names,
    describe_generators,
    generator_parts,
    manifest_entry,
    sampling_code,
    save_generator,
)
from motet.models.hub.weights import (
    MAX_SHARD_SIZE,
    check_part,
    check_tensors,
    save_part,
    save_tensors,
    tensors_under,
    write_json,
)
from motet.models.materialize import read_part_config
from motet.models.multimodal import MultimodalModule
from motet.models.stages.contrastive import ContrastiveLoss
from motet.models.stages.projector import PROJECTORS
from motet.parallel.adapters import Adapters
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL

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
    """The README.md of an exported model: how to load it with transformers and torch alone. A test runs its code."""
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
    modules = (*encoders.values(), language_model)
    classes = {(part["imported_from"], part["model_class"]) for part in modules if not part.get("is_own")}
    lines = ["from collections import OrderedDict", ""] if has_projector else []
    lines += ["from safetensors.torch import load_file", "from torch import nn"] if has_projector else []
    lines += ["from peft import PeftModel"] if any(part.get("has_adapter") for part in modules) else []
    lines += ["from transformers import AutoTokenizer"] if has_tokenizer else []
    lines += [f"from {module} import {name}" for module, name in sorted(classes)]
    lines += ["", f'language_model = {language_model["model_class"]}.from_pretrained("language_model")']
    lines += _adapter_code(LANGUAGE_MODEL, language_model)
    lines += ['tokenizer = AutoTokenizer.from_pretrained("language_model")'] if has_tokenizer else []
    for name, encoder in encoders.items():
        if encoder.get("is_own"):
            made = f"{encoder['imported_from']}.{encoder['model_class']}"
            lines.append(f'{name} = ...  # A {made} of your own; its weights: load_file("{name}/model.safetensors")')
        else:
            lines.append(f'{name} = {encoder["model_class"]}.from_pretrained("{name}")')
        lines += _adapter_code(name, encoder)
        if encoder["projector"] in _PROJECTORS:
            in_features, out_features = encoder["projector_sizes"]
            layers = _PROJECTORS[encoder["projector"]].format(in_features=in_features, out_features=out_features)
            lines += [
                f"{name}_projector = nn.Sequential({layers}).to(next({name}.parameters()).dtype)",
                f'{name}_projector.load_state_dict(load_file("{name}_projector/model.safetensors"))',
            ]
    return lines


def _adapter_code(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Returns the lines of code that add the adapters of a module."""
    if not entry.get("has_adapter"):
        return []
    return [f'{name} = PeftModel.from_pretrained({name}, "{name}_adapter").merge_and_unload()']


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


MANIFEST = "motet.json"
OWN_PROJECTOR = "own"
"""The name under which a projector of the user's own is described."""
WHOLE = "whole"
"""Sub-folder with a contrastive model as one transformers model."""


@dataclass(frozen=True, kw_only=True)
class PartDescription:
    """Describes a part without its weights: a transformers module or a user's own encoder, and its projector."""

    kind: Kind
    config: Any
    """A transformers configuration or an `OwnConfig`."""
    projector: str | None = None
    """Name of the projector, `OWN_PROJECTOR`, or None if there is none."""
    projector_sizes: tuple[int, int] = (0, 0)
    """(in_features, out_features) of an encoder's projector."""
    feature_select: FeatureSelect = "patch"
    feature_layer: int | None = None
    placeholder_token_id: int | None = None
    adapters: Adapters | None = None
    """Adapters among its tensors."""
    merges_adapters: bool = False
    """Whether they are added to the weights."""
    base: str | None = None
    """Where the weights without adapters came from; None: they were drawn."""

    @property
    def has_adapter_folder(self) -> bool:
        return self.adapters is not None and not self.merges_adapters


@dataclass(frozen=True, kw_only=True)
class LossDescription:
    """A contrastive loss and, if there is one, the caption decoder beside it."""

    kind: str
    anchor: str | None
    loss_weight: float
    decoder: Mapping[str, Any] | None
    """The caption decoder's `reads` (a tower) and `loss_weight`."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Describes a model without its weights."""

    parts: Mapping[str, PartDescription]
    """Parts by module name."""
    merge: Merge = "placeholder"
    media_attention: str = "causal"
    """`model.media_attention` of a run file: what tokens of images and clips see in the language model."""
    loss: LossDescription | None = None
    generators: Mapping[str, Description] = field(default_factory=dict)

    @property
    def encoders(self) -> dict[str, PartDescription]:
        """The encoders, or the towers of a contrastive model, by name."""
        return {name: part for name, part in self.parts.items() if part.kind == "encoder"}

    @property
    def language_model(self) -> PretrainedConfig:
        return self.parts[LANGUAGE_MODEL].config


def describe_config(model: ModelConfig, placeholder_token_ids: Mapping[str, int]) -> ModelDescription:
    """Describes a run file's model. Raises `UserError` if a part's configuration cannot be read."""
    if model.towers:
        return _describe_towers(model)
    language_model = read_part_config(model.causal_lm, "language_model", where=f"model.{LANGUAGE_MODEL}")
    parts = {}
    for name, part in model.encoders.items():
        config = read_part_config(part, "encoder", where=f"model.encoders.{name}")
        parts[name] = PartDescription(
            kind="encoder",
            config=config,
            projector=part.projector,
            projector_sizes=(_output_size(config), language_model.hidden_size),
            feature_select=part.feature_select,
            feature_layer=part.feature_layer,
            placeholder_token_id=placeholder_token_ids.get(name),
            **_adapter_options(part),
        )
    options = _adapter_options(model.causal_lm)
    parts[LANGUAGE_MODEL] = PartDescription(kind="language_model", config=language_model, **options)
    media = model.media_attention
    if media == "family":
        media = rule_of_family(language_model.model_type).media
    generators = describe_generators(model, language_model.get_text_config().hidden_size, placeholder_token_ids)
    return ModelDescription(parts=parts, merge=model.merge, media_attention=media, generators=generators)


def _adapter_options(part: Any) -> dict[str, Any]:
    lora = part.train.lora
    if lora is None:
        return {}
    base = part.hub or part.path
    return {"adapters": adapters_of(part), "merges_adapters": lora.merged_export, "base": base}


def _describe_towers(model: ModelConfig) -> ModelDescription:
    configs = {
        name: read_part_config(tower, "encoder", where=f"model.towers.{name}") for name, tower in model.towers.items()
    }
    widths = (_output_size(configs[name]) for name, tower in model.towers.items() if tower.projector is None)
    width = model.contrastive.width or next(widths)
    parts = {
        name: PartDescription(
            kind="encoder",
            config=configs[name],
            projector=tower.projector,
            projector_sizes=(_output_size(configs[name]), width),
        )
        for name, tower in model.towers.items()
    }
    decoder = None
    if model.decoder is not None:
        config = read_part_config(model.decoder, "decoder", where=f"model.{DECODER}")
        parts[DECODER] = PartDescription(kind="decoder", config=config)
        decoder = {"reads": model.decoder.reads, "loss_weight": model.decoder.loss_weight}
    given = model.contrastive
    loss = LossDescription(kind=given.loss, anchor=given.anchor, loss_weight=given.loss_weight, decoder=decoder)
    return ModelDescription(parts=parts, loss=loss)


def describe_module(model: MultimodalModule) -> ModelDescription:
    """Describes a model in memory, as `describe_config` does a run file's."""
    kind_of = {projector_class: kind for kind, projector_class in PROJECTORS.items()}
    language_model = model.language_model.module.config
    parts = {
        name: PartDescription(
            kind="encoder",
            config=encoder.config,
            projector=None if encoder.projector is None else kind_of.get(type(encoder.projector), OWN_PROJECTOR),
            projector_sizes=(encoder.output_size, language_model.hidden_size),
            feature_select=encoder.feature_select,
            feature_layer=encoder.feature_layer,
            placeholder_token_id=model.placeholder_token_ids.get(name),
        )
        for name, encoder in model.modality_modules(encoders_only=True).items()
    }
    parts[LANGUAGE_MODEL] = PartDescription(kind="language_model", config=language_model)
    return ModelDescription(parts=parts, merge=model.merge, media_attention=model.media_attention)


def _output_size(config: PretrainedConfig | OwnConfig) -> int:
    if isinstance(config, OwnConfig):
        return config.output_size
    size: int = getattr(config, ENCODER_FAMILIES[config.model_type].output_size)
    return size


def check_export(description: ModelDescription) -> None:
    """Raises `UserError`, before there are any weights, if `export_parts` could not write all of them."""
    _check_folders(description)
    for name, part in description.parts.items():
        if not isinstance(part.config, OwnConfig):
            model_class = model_class_of(part.config.model_type, part.kind)
            check_part(model_class, part.config, where=f"{name}.module", is_causal=part.kind != "encoder")
    for name, generator in description.generators.items():
        if isinstance(generator, CodesDescription):
            check_part(generator.model_class, generator.config, where=f"{name}.module", is_causal=True)


CAUSAL = (f"{LANGUAGE_MODEL}.module", f"{DECODER}.module")
"""Parts whose stored buffers are in checkpoints."""


def graph_tensors(model: ModuleGraph) -> dict[str, Tensor]:
    """Returns all weights by their names in the whole model, as in checkpoints; tied parameters appear once."""
    return {
        f"{part}.{name}": tensor.detach()
        for part, module in model.parts().items()
        for name, tensor in (weights_of(module) if part in CAUSAL else dict(module.named_parameters())).items()
    }


def export_module(model: MultimodalModule, folder: str | Path, **options: Any) -> None:
    """Exports a model in memory by `export_parts`."""
    export_parts(graph_tensors(model), describe_module(model), folder, **options)


def export_parts(
    tensors: Mapping[str, Tensor],
    description: ModelDescription,
    folder: str | Path,
    *,
    processors: Mapping[str, Any] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Writes every part for plain `from_pretrained`, and how they are put together.

    Args:
        tensors: by name in the whole model, such as `vision.projector.linear_1.weight`; read one file's worth at a
            time (`motet.models.hub.weights.CheckpointTensors`).
        folder: replaced if it is an earlier export.
        processors: by module: its tokenizer, image processor or feature extractor. A language model's tokenizer
            determines the token that ends its answers.

    Raises `UserError` if the tensors are not those of the model, or if the folder is in use for something else.
    """
    processors = processors or {}
    _check_folders(description)
    _check_parts(description, tensors, processors)

    def write(partial: Path) -> None:
        for name, part in description.parts.items():
            where = f"{name}.module"
            own: Mapping[str, Tensor] = tensors_under(tensors, where)
            if isinstance(part.config, OwnConfig):
                _save_own_module(partial / name, part.config, own, where)
            else:
                model_class = model_class_of(part.config.model_type, part.kind)
                if part.has_adapter_folder:
                    save_adapters(partial / f"{name}_adapter", model_class, part, own)
                if part.adapters is not None:
                    own = MergedTensors(own, model_class, part) if part.merges_adapters else without_adapters(own)
                save_part(partial / name, model_class, part.config, own, where=where, max_shard_size=max_shard_size)
            if part.projector is not None:
                _save_projector(partial / f"{name}_projector", name, part, tensors)
            if name in processors:
                processors[name].save_pretrained(partial / name)
            if name in processors and part.kind == "language_model":
                generation_config(processors[name]).save_pretrained(partial / name)
        for name, generator in description.generators.items():
            save_generator(partial, name, generator, tensors)
        manifest = _manifest(description)
        write_json(partial / MANIFEST, manifest)
        if description.loss is None:
            readme = export_readme(manifest, has_tokenizer=LANGUAGE_MODEL in processors)
            for name, generator in description.generators.items():
                what = "A sound is made" if isinstance(generator, CodesDescription) else "An image is drawn"
                readme += f"\n{what} by `{name}`:\n\n```python\n{sampling_code(name, generator)}```\n"
            (partial / "README.md").write_text(readme)
            return
        (partial / CONTRASTIVE).mkdir()
        save_tensors(partial / CONTRASTIVE / "model.safetensors", tensors_under(tensors, f"{CONTRASTIVE}.module"))
        whole = load_towers(partial)
        if is_transformers_model(whole):
            to_transformers(whole).save_pretrained(partial / WHOLE)

    write_folder(Path(folder), write, marker=MANIFEST)


def write_folder(folder: Path, write: Callable[[Path], None], *, marker: str) -> None:
    """Calls `write` with a new folder, which replaces `folder` when it is complete. If the process is killed, the old
    or the new folder is complete at `folder`, or, between two renames, the old one beside it; the next call moves that
    back.

    Raises `UserError` if the folder exists and is neither empty nor of the same kind (has a file `marker`)."""
    partial, replaced = (folder.with_name(f"{folder.name}.{end}") for end in ("tmp", "replaced.tmp"))
    if (replaced / marker).is_file() and not folder.exists():
        replaced.rename(folder)
    if folder.exists() and not (folder / marker).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"export: {folder} exists and is not an earlier export; give another folder")
    for left in (partial, replaced):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
    except BaseException:
        shutil.rmtree(partial)
        raise
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def generation_config(tokenizer: Any) -> GenerationConfig:
    """Makes a generation configuration from a tokenizer: the token that ends an answer."""
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad")}
    return GenerationConfig(**ids)


def load_export(
    folder: str | Path,
    *,
    projectors: Mapping[str, nn.Module] | None = None,
    encoders: Mapping[str, nn.Module] | None = None,
) -> MultimodalModule:
    """Loads an exported model in evaluation mode, each part by its own `from_pretrained`.

    `projectors`, `encoders`: the user's own modules by encoder name, whose weights are then filled in.

    Raises `UserError` naming the file that is missing, damaged or of another model.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest["media_attention"] != "causal":
        raise UserError(
            f"{folder}: was trained with media_attention {manifest['media_attention']}, which transformers' own "
            "attention does not have; its parts load one by one, and motet train and verify take its run file"
        )
    language_model = load_part(folder / LANGUAGE_MODEL, "language_model", manifest[LANGUAGE_MODEL])
    made, placeholders = {}, {}
    for name, entry in manifest["encoders"].items():
        projector = (
            _load_projector(folder / f"{name}_projector", name, projectors or {}) if entry["projector"] else None
        )
        made[name] = ModalityModule(
            _load_own_module(folder / name, name, encoders or {})
            if entry.get("is_own")
            else load_part(folder / name, "encoder", entry),
            projector,
            feature_layer=entry["feature_layer"],
            feature_select=entry["feature_select"],
        )
        if entry["placeholder_token_id"] is not None:
            placeholders[name] = entry["placeholder_token_id"]
    model = MultimodalModule(made, language_model, merge=manifest["merge"], placeholder_token_ids=placeholders)
    return model.eval()


def _load_own_module(folder: Path, name: str, given: Mapping[str, nn.Module]) -> nn.Module:
    if name not in given:
        raise UserError(f"{folder}: is an encoder of your own; make it and give it as encoders={{{name!r}: ...}}")
    try:
        given[name].load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder}: cannot be loaded ({one_line(error)})") from None
    return given[name]


def load_part(folder: Path, kind: Kind, entry: Mapping[str, Any] | None = None) -> Any:
    """Loads a part by its own `from_pretrained`, with its adapters added to its weights. `entry`: of the manifest.

    Raises `UserError` if the folder is not that of such a model."""
    model = load_model(folder, lambda model_type: model_class_of(model_type, kind))
    if entry is not None and entry.get("has_adapter"):
        return load_adapters(model, folder.with_name(f"{folder.name}_adapter"))
    return model


def load_model(folder: Path, class_of: Callable[[str], Any]) -> Any:
    """`from_pretrained` of a folder, which must have every tensor of the model.

    `class_of`: from the stored `model_type` to the model's class; raises `ValueError` for one that is not meant, since
    transformers would make a model of the class's default size of it. Raises `UserError` naming the folder or file."""
    try:
        model_class = class_of(json.loads((folder / "config.json").read_text())["model_type"])
        model, info = model_class.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: is missing; export the model again") from None
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: cannot be loaded ({one_line(error)}); export it again") from None
    if info["missing_keys"]:
        raise UserError(f"{folder}: has no tensor {sorted(info['missing_keys'])[0]}; export the model again")
    return model


def _check_folders(description: ModelDescription) -> None:
    check_names(description.parts, description.generators)
    for name in description.parts:
        for folder in (f"{name}_projector", f"{name}_adapter"):
            if folder in description.parts:
                raise UserError(f"export: {folder} is a folder of {name}'s; rename that encoder")


def _check_parts(description: ModelDescription, tensors: Mapping[str, Tensor], processors: Mapping[str, Any]) -> None:
    parts = set() if description.loss is None else {f"{CONTRASTIVE}.module"}
    parts |= generator_parts(description.generators)
    for name, part in description.parts.items():
        parts |= {f"{name}.module"} | ({f"{name}.projector"} if part.projector else set())
    for name in tensors:
        if ".".join(name.split(".")[:2]) not in parts:
            raise UserError(f"export: the tensor {name} belongs to no part; the parts are {', '.join(sorted(parts))}")
    for name in processors:
        if name not in description.parts:
            raise UserError(f"export: processors has {name!r}, but the modules are {', '.join(description.parts)}")


def _save_own_module(folder: Path, config: OwnConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    check_tensors(dict(config.shape_of.named_parameters()), tensors, where=where)
    folder.mkdir()
    write_json(folder / "config.json", config.to_dict())
    save_tensors(folder / "model.safetensors", tensors)


def _save_projector(folder: Path, name: str, part: PartDescription, tensors: Mapping[str, Tensor]) -> None:
    own = tensors_under(tensors, f"{name}.projector")
    config: dict[str, Any] = {"projector": part.projector}
    if part.projector in PROJECTORS:
        in_features, out_features = part.projector_sizes
        with torch.device("meta"):
            expected = dict(PROJECTORS[part.projector](in_features, out_features).named_parameters())
        check_tensors(expected, own, where=f"{name}.projector")
        config |= {"in_features": in_features, "out_features": out_features}
        config |= {"activation": "gelu"} if part.projector == "mlp" else {}
    folder.mkdir()
    write_json(folder / "config.json", config)
    save_tensors(folder / "model.safetensors", own)


def _load_projector(folder: Path, encoder: str, projectors: Mapping[str, nn.Module]) -> nn.Module:
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        if config["projector"] in PROJECTORS:
            projector = PROJECTORS[config["projector"]](config["in_features"], config["out_features"])
        elif encoder in projectors:
            projector = projectors[encoder]
        else:
            raise UserError(f"{folder}: is a projector of the user's own; give projectors={{{encoder!r}: module}}")
        projector.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    except FileNotFoundError:
        raise UserError(f"{folder}: config.json or model.safetensors is missing; export the model again") from None
    except (SafetensorError, RuntimeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be loaded ({one_line(error)}); export it again") from None
    return projector


def _manifest(description: ModelDescription) -> dict[str, Any]:
    loss = description.loss
    if loss is not None:
        manifest = {"format": 1, "loss": loss.kind, "anchor": loss.anchor, "loss_weight": loss.loss_weight}
        manifest["towers"] = {name: tower.projector for name, tower in description.encoders.items()}
        return manifest if loss.decoder is None else {**manifest, DECODER: loss.decoder}
    return {
        "format": 1,
        "merge": description.merge,
        "media_attention": description.media_attention,
        "encoders": {
            name: {
                **_class_entry(encoder, "encoder"),
                "projector": encoder.projector,
                "projector_sizes": encoder.projector_sizes,
                "feature_select": encoder.feature_select,
                "feature_layer": encoder.feature_layer,
                "placeholder_token_id": encoder.placeholder_token_id,
            }
            for name, encoder in description.encoders.items()
        },
        LANGUAGE_MODEL: _class_entry(description.parts[LANGUAGE_MODEL], "language_model"),
        **(
            {"generators": {n: manifest_entry(own) for n, own in description.generators.items()}}
            if description.generators
            else {}
        ),
    }


def _class_entry(part: PartDescription, kind: Kind) -> dict[str, Any]:
    config = part.config
    if isinstance(config, OwnConfig):
        module, _, name = config.model_type.rpartition(".")
        return {"model_class": name, "imported_from": module, "is_own": True}
    model_class = model_class_of(config.model_type, kind)
    entry = {"model_class": model_class.__name__, "imported_from": model_class.__module__}
    return {**entry, "has_adapter": True} if part.has_adapter_folder else entry


def read_manifest(folder: Path) -> dict[str, Any]:
    """How the parts of an exported model are put together. Raises `UserError` naming the file that is wrong."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        is_known = (
            manifest["format"] == 1
            and "media_attention" in manifest
            and all(
                {"projector", "feature_layer", "feature_select", "placeholder_token_id"} <= entry.keys()
                for entry in manifest["encoders"].values()
            )
        )
    except FileNotFoundError:
        raise UserError(f"{folder}: is not an exported model ({MANIFEST} is missing)") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is damaged ({error}); export the model again") from None
    if not is_known:
        raise UserError(f"{path}: has another format; export the model again")
    return manifest


def load_towers(folder: str | Path) -> ContrastiveModule:
    """The exported model, in evaluation mode. Raises `UserError` naming the file that is missing or damaged."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        towers = {
            name: ModalityModule(
                load_part(folder / name, "encoder"),
                None if projector is None else _load_projector(folder / f"{name}_projector", name, {}),
            )
            for name, projector in manifest["towers"].items()
        }
        stored = load_file(folder / CONTRASTIVE / "model.safetensors")
        loss = ContrastiveLoss(manifest["loss"])
        loss.load_state_dict(stored)
        decoder, given = None, manifest.get("decoder")
        if given is not None:
            decoder = CaptionDecoder(load_part(folder / DECODER, "decoder"), given["reads"], given["loss_weight"])
        weight = manifest.get("loss_weight", 1.0)
        return ContrastiveModule(towers, loss, anchor=manifest["anchor"], decoder=decoder, loss_weight=weight).eval()
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{folder}: is not an exported contrastive model ({error}); export it again") from None
