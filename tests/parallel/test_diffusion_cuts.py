"""How diffusers' transformers are cut for tensor parallelism, against the plans that diffusers has itself."""

import re
from typing import Any

import pytest
from generator_run import FLUX, PIXART, QWEN_IMAGE, SANA, SD3
from torch import nn

from motet.families.diffusion_models import DIFFUSION_FAMILIES, DiffusionFamily, diffusion_class
from motet.parallel.tensor.diffusion_cuts import diffusion_cuts
from motet.parallel.tensor.tensor_cuts import TensorCuts

PLAN = "_tp_plan"
"""A private name of diffusers: nothing but this test reads it."""


def cuts_of(part: dict[str, Any]) -> tuple[nn.Module, TensorCuts]:
    model = diffusion_class(part["config"]).from_config({**part["values"], "_class_name": part["config"]})
    family = DIFFUSION_FAMILIES[part["config"]]
    assert isinstance(family, DiffusionFamily)
    lists = [(path, model.get_submodule(path)) for path in family.blocks]
    return model, diffusion_cuts({f"{path}.{i}": block for path, own in lists for i, block in enumerate(own)})


@pytest.mark.parametrize("part", [FLUX, QWEN_IMAGE], ids=["Flux", "Qwen-Image"])
def test_cuts_are_those_of_the_plan_of_diffusers(part: dict[str, Any]) -> None:
    model, cuts = cuts_of(part)
    planned = {}
    for pattern, style in getattr(type(model), PLAN).items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        kind = {"colwise": "column", "rowwise": "row"}.get(style, type(style).__name__)
        planned |= {path: kind for path, _ in model.named_modules() if matches(path)}
    for path, cut in cuts.linears.items():
        if planned[path] == "PackedRowwiseParallel":
            sizes = model.get_submodule(path)._tp_packed_row_blocks
            assert (cut.kind, list(cut.sections)) == ("row", sizes)
            planned[path] = "row"
    assert {path: cut.kind for path, cut in cuts.linears.items()} == planned
    assert cuts.must_divide == {"num_attention_heads": 2}


@pytest.mark.parametrize("part", [SD3, PIXART], ids=["SD3", "PixArt"])
def test_all_of_attention_and_mlp_is_cut(part: dict[str, Any]) -> None:
    """Modulations by the time step are all that stays whole."""
    model, cuts = cuts_of(part)
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    whole = {path for path in linears - cuts.linears.keys() if path.startswith("transformer_blocks.")}
    assert all(re.fullmatch(r".*\.norm1(_context)?\.linear", path) for path in whole), whole
    rows = {path for path, cut in cuts.linears.items() if cut.kind == "row"}
    assert rows == {row for region in cuts.regions for row in region.rows}


def test_a_head_keeps_its_width() -> None:
    """What attentions read: the width of a head is `inner_dim` over `heads`, so both are divided."""
    model, cuts = cuts_of(QWEN_IMAGE)
    counted = {name for path, name in cuts.counts if path == "transformer_blocks.0.attn"}
    assert counted == {"heads", "inner_dim"}
    attention = model.get_submodule("transformer_blocks.0.attn")
    assert attention.inner_dim // attention.heads == 8


def test_an_attention_of_another_kind_is_not_cut() -> None:
    """Sana's linear attention sums keys times values over places: the shape of Sana allows no tensor parallelism."""
    from motet.shapes.diffusion_transformers import Connection, transformer_workload

    shape = transformer_workload(
        {"_class_name": SANA["config"], **SANA["values"]}, Connection(incoming_size=24, projector="mlp")
    )
    assert shape.must_divide is None
