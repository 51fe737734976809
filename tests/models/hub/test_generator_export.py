"""Exported generators: the code of the README makes an image and a sound with plain transformers and diffusers."""

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_run import FLUX, PIXART, QWEN_IMAGE, SANA, SD3, UNET, generator_config
from sampling import in_campaigns

from motet.data.run_file import open_data
from motet.families.configured_graph import read_graph
from motet.models.from_run_file import build_node
from motet.models.hub.export import describe_config, export_parts
from motet.models.reference import denoise


def exported(folder: Path, *args: Any, **options: Any) -> dict[str, Any]:
    """The names that the code of the README defines."""
    config = generator_config(folder, *args, **options)
    preparation = open_data(config).preparation
    tensors = {}
    for name, module in read_graph(config).modules.items():
        stage: Any = build_node(config, name, None, torch.float32).make_stage((0, module.workload.num_layers))
        tensors |= {f"{name}.{stage.canonical_name(path)}": own.detach() for path, own in stage.named_parameters()}
    description = describe_config(config.model, preparation.placeholder_ids)
    export_parts(tensors, description, folder / "export", processors=preparation.tools)
    names: dict[str, Any] = {}
    with chdir(folder / "export"):
        for code in re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL):
            exec(code, names)
    return names


def test_the_readme_makes_images_and_sounds(tmp_path: Path) -> None:
    names = exported(tmp_path, sounds=True, latents=True, num_devices=5, objective="epsilon")
    torch.manual_seed(0)
    image = names["draw_image"]("draw 1", steps=2)
    # Latents of 8 x 8, decoded.
    assert image.shape == (1, 3, 16, 16)
    assert image.isfinite().all()
    sound = names["draw_voice"]("say 1", steps=2, width=6)
    assert sound.shape == (1, 1, 8, 6)
    assert sound.std() > 0.1


@pytest.mark.parametrize(("codec", "samples"), [("mimi", 40), ("dac", 16)])
def test_the_readme_makes_sounds_of_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, samples: int
) -> None:
    """Each code is drawn from its own codebook by what the loss of the training trains, and the codec decodes them."""
    names = exported(tmp_path, sounds=True, codes={"codec": codec}, num_devices=5)
    drawn: list[torch.Tensor] = []
    multinomial = torch.multinomial
    monkeypatch.setattr(
        torch, "multinomial", lambda chances, number: drawn.append(chances) or multinomial(chances, number)
    )
    read: list[torch.Tensor] = []
    names["voice"].register_forward_pre_hook(lambda module, args: read.append(args[0]))
    logits: list[torch.Tensor] = []
    names["voice"].register_forward_hook(lambda module, args, output: logits.append(output.logits[0, -1]))
    torch.manual_seed(0)
    waveform = names["say_voice"]("say 1", guidance=1, frames=3, temperature=0.5)
    num_codes = read[-1].shape[1]
    # An end takes the place of the first code of a frame.
    assert len(drawn) == num_codes
    assert waveform.shape[-1] >= samples
    assert waveform.isfinite().all()
    for place, (tokens, own, chances) in enumerate(zip(read, logits, drawn, strict=True)):
        assert tokens[0, 0] == 0
        assert torch.equal((tokens[0, 1:] - 1) // 16, torch.arange(place) % 2)
        first = 1 + place % 2 * 16
        allowed = [0] * (place in (2, 4)) + list(range(first, first + 16))
        torch.testing.assert_close(chances, (own[allowed] / 0.5).softmax(0))


GUIDED_FLUX = {**FLUX, "values": {**FLUX["values"], "guidance_embeds": True}, "guidance": 3.5}


@pytest.mark.parametrize(
    "generator",
    [GUIDED_FLUX, QWEN_IMAGE, *in_campaigns([SD3, PIXART, SANA, FLUX, UNET])],
    ids=lambda part: part["config"],
)
def test_a_step_of_the_readme_is_what_was_trained(tmp_path: Path, generator: dict[str, Any]) -> None:
    """Its prediction from the conditions that it makes, against the reference of the training's loss."""
    names = exported(tmp_path, generator)
    model, scheduler = names["image"], names["image_scheduler"]
    given: dict[str, Any] = {}
    seen: list[tuple[torch.Tensor, ...]] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    step = scheduler.step
    scheduler.step = lambda predicted, time, drawn: (
        seen.append((predicted, time, drawn)) or step(predicted, time, drawn)
    )
    names["draw_image"]("draw 1", guidance=1, steps=2, height=8, width=12)
    assert len(seen) == 2
    pooled = given["pooled_projections"][:1] if "pooled_projections" in given else None
    told = generator.get("guidance")
    for predicted, time, drawn in seen:
        assert drawn.shape == (1, 1, 8, 12)
        with torch.no_grad():
            expected = denoise(model, drawn, time.float()[None], given["encoder_hidden_states"][:1], pooled, told)
        torch.testing.assert_close(predicted, expected)
