"""Drawing in batches equals what the export's README does, image by image."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_run import PIXART, SANA, SD3, generator_config

from motet.data.run_file import open_data
from motet.errors import UserError
from motet.families.configured_graph import read_graph
from motet.families.diffusion_models import diffusion_class
from motet.models.from_run_file import build_node
from motet.models.hub.drawing import _sample, draw, load_generator
from motet.models.hub.export import describe_config, export_parts, load_export
from motet.models.hub.generation import Prompt

TEXTS = ("<|user|>draw 1<|end|><|assistant|>", "<|user|>draw 5 and 6<|end|><|assistant|>Here is")


def exported(folder: Path, generator: dict[str, Any], **options: Any) -> Path:
    config = generator_config(folder, generator, **options)
    preparation = open_data(config).preparation
    tensors = {}
    for name, module in read_graph(config).modules.items():
        stage: Any = build_node(config, name, None, torch.float64).make_stage((0, module.workload.num_layers))
        tensors |= {f"{name}.{stage.canonical_name(path)}": own.detach() for path, own in stage.named_parameters()}
    # Connectors begin with a null condition of zeros, and diffusers' heads predict nothing yet.
    random = torch.Generator().manual_seed(1)
    for name, own in tensors.items():
        if name.startswith("image."):
            tensors[name] = own + 0.1 * torch.randn(own.shape, generator=random, dtype=own.dtype)
    export_parts(
        tensors,
        describe_config(config.model, preparation.placeholder_ids),
        folder / "export",
        processors=preparation.tools,
    )
    return folder / "export"


@pytest.mark.parametrize(
    ("generator", "options"),
    [(SD3, {}), (PIXART, {"objective": "v"}), (SANA, {}), (SD3, {"latents": True, "projector": "linear"})],
    ids=["sd3", "pixart", "sana", "latents"],
)
def test_batches_equal_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = exported(tmp_path, generator, **options)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL):
        exec(code, names)
    channels = 2 if options.get("latents") else 1
    noise = torch.randn((2, channels, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one_by_one = []
    for text, own in zip(TEXTS, noise, strict=True):
        monkeypatch.setattr(torch, "randn", lambda *_, own=own, **__: own[None])
        one_by_one.append(names["draw_image"](text, guidance=1.7, steps=3))
        monkeypatch.undo()
        monkeypatch.chdir(folder)
    prompts = [Prompt(names["tokenizer"](text, return_tensors="pt").input_ids[0]) for text in TEXTS]
    together = draw(load_export(folder), load_generator(folder, "image"), prompts, noise, guidance=1.7, num_steps=3)
    torch.testing.assert_close(together, torch.cat(one_by_one), rtol=1e-9, atol=1e-9)
    assert (together[0] - together[1]).abs().max() > 0.1


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_one_half_is_computed_where_the_other_counts_for_nothing(tmp_path: Path, guidance: float) -> None:
    generator = load_generator(exported(tmp_path, SD3), "image")
    random = torch.Generator().manual_seed(2)
    conditions = torch.randn((2, 3, 20), generator=random, dtype=torch.float64)
    noise = torch.randn((2, 1, 8, 8), generator=random, dtype=torch.float64)
    numbers: list[int] = []
    generator.model.register_forward_pre_hook(
        lambda module, args, kwargs: numbers.append(len(args[0])), with_kwargs=True
    )
    with torch.no_grad():
        drawn = _sample(generator, conditions, noise, guidance, 3)
        assert numbers == [2, 2, 2]
        # A guidance next to it takes both.
        nearly = _sample(generator, conditions, noise, guidance + 1e-13, 3)
    assert numbers[3:] == [4, 4, 4]
    torch.testing.assert_close(drawn, nearly, rtol=1e-9, atol=1e-9)


def test_a_generator_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, SD3)
    with pytest.raises(UserError, match="has no generator 'voice'; it has image"):
        load_generator(folder, "voice")
    manifest = (folder / "motet.json").read_text()
    (folder / "motet.json").write_text(manifest.replace("SD3Transformer2DModel", "UNet2DConditionModel"))
    with pytest.raises(UserError, match="image is a UNet2DConditionModel, which draws by the program"):
        load_generator(folder, "image")
    (folder / "motet.json").write_text(manifest)
    (folder / "motet.json").write_text(manifest.replace("FlowMatchEulerDiscreteScheduler", "NoScheduler"))
    with pytest.raises(UserError, match="image cannot be loaded"):
        load_generator(folder, "image")
    (folder / "motet.json").write_text(manifest)
    weights = folder / "image_projector" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="image cannot be loaded"):
        load_generator(folder, "image")
    weights.unlink()
    with pytest.raises(UserError, match="image cannot be loaded"):
        load_generator(folder, "image")


def test_an_older_diffusers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.__version__", "0.30.0")
    with pytest.raises(UserError, match=r"diffusers 0\.30\.0 has no NoTransformer; install a version that has"):
        diffusion_class("NoTransformer")
