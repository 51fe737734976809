"""Bytes that are charged for generators: between stages, against the shapes of what these send, and for averages."""

from pathlib import Path

import pytest
import torch
from generator_run import FLUX, PIXART, QWEN_IMAGE, SANA, SD3, generator_config

from motet.costs.cost_model import microbatch_load
from motet.costs.memory import MemoryOptions, boundary_bytes
from motet.data.run_file import open_samples
from motet.families.configured_graph import read_graph
from motet.models.from_run_file import build_node


@pytest.mark.parametrize(
    "generator", [SD3, PIXART, SANA, FLUX, QWEN_IMAGE], ids=["SD3", "PixArt", "Sana", "Flux", "Qwen-Image"]
)
def test_charged_bytes_are_those_of_what_travels(tmp_path: Path, generator: dict) -> None:
    config = generator_config(tmp_path, generator)
    source = open_samples(config)
    samples = [sample for sample in map(source.sample, range(5)) if sample.has("image")]
    workload = read_graph(config).workloads["image"]
    whole = (0, workload.num_layers)
    load = microbatch_load(workload, "image", samples, ("language_model",))
    for border in range(1, workload.num_layers):
        rows, width = build_node(config, "image", whole, torch.float32).make_stage((0, border)).output_shape(samples)
        assert rows > 0
        assert boundary_bytes(workload, border, load, 4) == 4 * rows * width


def test_a_moving_average_is_one_more_state(tmp_path: Path) -> None:
    graph = read_graph(generator_config(tmp_path, ema=0.9))
    states = {name: MemoryOptions().of(workload).state_bytes for name, workload in graph.workloads.items()}
    assert states == {"vision": 8, "image_queries": 12, "language_model": 8, "image": 12}
