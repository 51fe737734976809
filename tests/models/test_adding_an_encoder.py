"""docs/adding-an-encoder.md is true: with the lines that it gives, and nothing else, ViT runs from a run file, in
stages and under tensor parallelism, as plain transformers computes it."""

import re
from pathlib import Path

import pytest
import tiny_encoders
from checkout import ROOT
from one_process import check
from sampling import in_campaigns
from scenario import Scenario
from tiny_encoders import VIT
from transformers import ViTConfig, ViTModel

from motet.config import load_run_config
from motet.data import encoder_layout as processor_sizes
from motet.families import classes as families
from motet.families.configured_graph import read_graph
from motet.families.encoders import encoder_families, token_counts
from motet.families.shape_reading.module_shapes import module_workload

GUIDE = (ROOT / "docs" / "adding-an-encoder.md").read_text()
TABLES = {
    "ENCODER_FAMILIES": (encoder_families, encoder_families.ENCODER_FAMILIES),
    "_COUNTERS": (token_counts, token_counts._COUNTERS),
    "TYPE_OF_FAMILY": (processor_sizes, processor_sizes.TYPE_OF_FAMILY),
}
RUN = """
model:
  encoders: {vision: {config: ViTConfig, values: {hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 2}}}
  language_model: {config: LlamaConfig, values: {hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 2}}
data: {kind: dial-a-digit}
"""


@pytest.fixture(autouse=True)
def _with_the_guides_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry goes into the table that the guide names before it."""
    entry = r"`([A-Z_]+)`(?:(?!`[A-Z_]+`).)*?\n\n +\"(vit)\": (.*?),\n\n"
    found = re.findall(entry, GUIDE, re.DOTALL)
    assert {table for table, _, _ in found} == set(TABLES)
    for table, key, value in found:
        module, entries = TABLES[table]
        monkeypatch.setitem(entries, key, eval(value, vars(module)))
    monkeypatch.setitem(families.MODEL_CLASSES["encoder"], "vit", encoder_families.ENCODER_FAMILIES["vit"].model_class)
    monkeypatch.setitem(tiny_encoders.ENCODERS, "vit", (ViTModel, ViTConfig, VIT))
    monkeypatch.setitem(tiny_encoders.GRIDS, "vit", tiny_encoders.GRIDS["siglip"])


@pytest.mark.parametrize("select", ["full", *in_campaigns(["patch"])])
def test_in_stages_under_tensor_parallelism(select: str) -> None:
    check(Scenario(vision="vit", encoder_pp=2, tp=2, sequence_parallel=True, feature_select=select))


def test_its_shape() -> None:
    config = ViTConfig(**VIT)
    assert module_workload(config.to_dict()).num_parameters == sum(p.numel() for p in ViTModel(config).parameters())


def test_from_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    assert read_graph(load_run_config(path, [])).workloads["vision"].num_blocks == 2
