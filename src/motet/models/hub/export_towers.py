"""A trained contrastive model as a folder that plain transformers loads: one sub-folder for each part.

    exported/
      image/                config.json, model.safetensors, the image processor
      image_projector/      config.json, model.safetensors
      text/                 config.json, model.safetensors, the tokenizer
      text_projector/       ...
      contrastive/          model.safetensors: logit_scale, logit_bias
      whole/                the same as one CLIPModel or SiglipModel, where transformers has such a model
      decoder/              a caption decoder, where there is one, and its tokenizer
      motet.json            how they are put together

Features are each encoder's `pooler_output` (Whisper: the mean of its `last_hidden_state` over what is no padding),
times the projector, over its length. The decoder's `encoder_hidden_states` are the `last_hidden_state` of the
tower that it reads, times the projector.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from motet.config import ModelConfig
from motet.errors import UserError
from motet.families.classes import model_class_of
from motet.models.contrastive import CaptionDecoder, ContrastiveLoss, ContrastiveModule
from motet.models.hub.clip import is_transformers_model, to_transformers
from motet.models.hub.export import MANIFEST, load_part, write_folder
from motet.models.hub.weights import save_part, save_tensors, tensors_under, write_json
from motet.models.materialize import read_part_config
from motet.models.multimodal import ModalityModule
from motet.models.stages.projector import PROJECTORS
from motet.plan import CONTRASTIVE, DECODER


def export_towers(
    tensors: Mapping[str, Tensor], model: ModelConfig, folder: str | Path, *, processors: Mapping[str, Any]
) -> None:
    """Writes every part of a run file's towers for plain `from_pretrained`.

    `tensors`: by name in the whole model, as checkpoints have it. `processors`: by tower, tokenizer or processor."""
    manifest: dict[str, Any] = {"format": 1, "loss": model.contrastive.loss, "anchor": model.contrastive.anchor}
    manifest["loss_weight"] = model.contrastive.loss_weight
    manifest["towers"] = {name: tower.projector for name, tower in model.towers.items()}

    if model.decoder is not None:
        manifest["decoder"] = {"reads": model.decoder.reads, "loss_weight": model.decoder.loss_weight}

    def write(partial: Path) -> None:
        for name, tower in model.towers.items():
            config = read_part_config(tower, "encoder", where=f"model.towers.{name}")
            part = f"{name}.module"
            save_part(
                partial / name,
                model_class_of(config.model_type, "encoder"),
                config,
                tensors_under(tensors, part),
                where=part,
            )
            processors[name].save_pretrained(partial / name)
            if tower.projector is not None:
                own = dict(tensors_under(tensors, f"{name}.projector"))
                matrices = [own[key] for key in sorted(own) if own[key].dim() == 2]
                (partial / f"{name}_projector").mkdir()
                sizes = {"in_features": matrices[0].shape[1], "out_features": matrices[-1].shape[0]}
                write_json(partial / f"{name}_projector" / "config.json", {"projector": tower.projector, **sizes})
                save_tensors(partial / f"{name}_projector" / "model.safetensors", own)
        if model.decoder is not None:
            config = read_part_config(model.decoder, "decoder", where=f"model.{DECODER}")
            part = f"{DECODER}.module"
            model_class = model_class_of(config.model_type, "decoder")
            save_part(partial / DECODER, model_class, config, tensors_under(tensors, part), where=part)
            processors[DECODER].save_pretrained(partial / DECODER)
        (partial / CONTRASTIVE).mkdir()
        save_tensors(partial / CONTRASTIVE / "model.safetensors", dict(tensors_under(tensors, f"{CONTRASTIVE}.module")))
        write_json(partial / MANIFEST, manifest)
        whole = load_towers(partial)
        if is_transformers_model(whole):
            to_transformers(whole).save_pretrained(partial / "whole")

    write_folder(Path(folder), write, marker=MANIFEST)


def load_towers(folder: str | Path) -> ContrastiveModule:
    """The exported model, in evaluation mode. Raises `UserError` naming the file that is missing or damaged."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        towers = {
            name: ModalityModule(
                load_part(folder / name, "encoder"),
                None if projector is None else _load_projector(folder / f"{name}_projector"),
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
        raise UserError(f"{folder}: is no exported contrastive model ({error}); export it again") from None


def _load_projector(folder: Path) -> nn.Module:
    config = json.loads((folder / "config.json").read_text())
    projector = PROJECTORS[config["projector"]](config["in_features"], config["out_features"])
    projector.load_state_dict(load_file(folder / "model.safetensors"))
    return projector
