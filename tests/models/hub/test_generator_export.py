"""Exported generators: the code of the README makes an image and a sound with plain transformers and diffusers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_run import generator_config

from motet.data.run_file import open_data
from motet.families.configured_graph import read_graph
from motet.models.from_run_file import build_node
from motet.models.hub.export import describe_config, export_parts


def test_the_readme_makes_images_and_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = generator_config(tmp_path, sounds=True, latents=True, num_devices=5, objective="epsilon")
    preparation = open_data(config).preparation
    tensors = {}
    for name, module in read_graph(config).modules.items():
        stage: Any = build_node(config, name, None, torch.float32).make_stage((0, module.workload.num_layers))
        tensors |= {f"{name}.{stage.canonical_name(path)}": own.detach() for path, own in stage.named_parameters()}
    description = describe_config(config.model, preparation.placeholder_ids)
    export_parts(tensors, description, tmp_path / "export", processors=preparation.tools)
    monkeypatch.chdir(tmp_path / "export")
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL):
        exec(code, names)
    torch.manual_seed(0)
    image = names["draw_image"]("draw 1", steps=2)
    # Latents of 8 x 8, decoded.
    assert image.shape == (1, 3, 16, 16)
    assert image.isfinite().all()
    sound = names["draw_voice"]("say 1", steps=2, width=6)
    assert sound.shape == (1, 1, 8, 6)
    assert sound.std() > 0.1
