"""Profiling real stages: every layer gets costs, they survive the file and predict runs that were not measured."""

import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from distributed import run_distributed
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from motet.costs.cost_model import CostTable
from motet.costs.load import microbatch_load
from motet.costs.profiler import ProfiledModule, ProfileOptions, profile, runs_to_measure
from motet.costs.profiler_links import measure_links, measure_optimizer
from motet.data.sample import Sample, Segment
from motet.models.encoder_stage import EncoderStage
from motet.models.language_model_stage import LanguageModelStage
from motet.models.projector import build_projector
from motet.workload import module_workload, with_projector

TEXT = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = SiglipVisionConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
    vision_use_head=False,
)
CPU = torch.device("cpu")
MODULES = {
    "vision": ProfiledModule(workload=with_projector(module_workload(VISION), "mlp", 64)),
    "text": ProfiledModule(workload=module_workload(TEXT), sources={"vision": 64}),
}
OPTIONS = ProfileOptions(microbatch_sizes=(1, 3), num_microbatches=4, repetitions=3, max_seconds=0.2)


class SmallBatch:
    """Samples of one image and 20 to 60 words; the last has no image."""

    samples = tuple(
        Sample(
            str(i),
            {"text": (Segment(16, source="vision"), Segment(20 + 10 * i)), "vision": (Segment(16, grid=(4, 4)),)}
            if i < 4
            else {"text": (Segment(30),)},
            {"text": 5},
        )
        for i in range(5)
    )

    def features(self, module, sample):
        if module == "vision":
            return {"pixel_values": torch.zeros(1, 3, 32, 32)}
        num_tokens = self.samples[sample].num_tokens("text")
        labels = torch.full((num_tokens,), -100)
        labels[-5:] = 1
        return {"input_ids": torch.ones(num_tokens, dtype=torch.long), "labels": labels}


def make_stage(name, layers, tp_size):
    torch.manual_seed(0)
    if name == "text":
        return LanguageModelStage("text", LlamaForCausalLM(TEXT), layers)
    callbacks = dict.fromkeys(("preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback"))
    module = SimpleNamespace(module=SiglipVisionModel(VISION), projector=build_projector("mlp", 32, 64), **callbacks)
    return EncoderStage("vision", module, layers)


def run_profile(rank=0):
    torch.set_num_threads(1)
    return profile(MODULES, make_stage, SmallBatch(), options=OPTIONS, device=CPU)


@pytest.fixture(scope="module")
def table():
    return run_profile()


def test_every_layer_has_costs(table):
    load = microbatch_load(MODULES["text"].workload, "text", SmallBatch.samples[:2], ("vision",))
    for name, module in MODULES.items():
        costs = table.of(name, 1)
        assert len(costs.layers) == module.workload.num_layers
        for layer, shape in zip(costs.layers, module.workload.layers, strict=True):
            if shape.part == "block":
                assert layer.forward.seconds(load) > 0
                assert layer.input_gradient.seconds(load) > 0
                assert layer.weight_gradient.seconds(load) > 0
    # Blocks of equal shape were measured once.
    assert table.of("text", 1).layers[1] == table.of("text", 1).layers[3]
    assert table.optimizer_s_per_parameter > 0
    assert table.source == "profiled"


def test_the_file_brings_the_same_costs_back(table, tmp_path):
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table


def test_it_predicts_a_run_that_was_not_measured(table):
    """Two of three blocks on samples drawn otherwise. The tolerance is wide: other tests run on the same cores."""
    samples = [SmallBatch.samples[i] for i in (0, 3, 4)]
    stage = make_stage("text", (1, 3), 1)
    hidden = torch.randn(stage.input_shape(samples), requires_grad=True)
    times = []
    for _ in range(15):
        started = time.thread_time()
        stage(hidden, {}, [{} for _ in samples], samples).sum().backward()
        times.append(time.thread_time() - started)
    load = microbatch_load(MODULES["text"].workload, "text", samples, ("vision",))
    costs = table.of("text", 1)
    predicted = (
        costs.stage_forward.plus(costs.blocks_forward).plus(costs.stage_backward).plus(costs.blocks_backward)
    ).seconds(load) + sum(
        (layer.forward.seconds(load) + layer.input_gradient.seconds(load) + layer.weight_gradient.seconds(load))
        for layer in costs.layers[1:3]
    )
    assert predicted == pytest.approx(statistics.median(times), rel=0.5)


def test_runs_to_measure():
    assert runs_to_measure(MODULES["vision"].workload) == [(0, 1), (1, 2), (3, 4), (4, 5), (1, 3), (0, 5)]


def test_ranks_measure_together_and_agree():
    """Two processes; links are measured between them."""
    tables = run_distributed(run_profile, 2)
    assert tables[0] == tables[1]
    assert 0 < tables[0].message.latency_s < 0.1
    assert tables[0].all_reduce.bytes_per_s > 1e6
    assert tables[0].notes["ranks"] == 2


def test_links_with_a_rank_that_only_waits():
    message, all_reduce = run_distributed(lambda rank: measure_links(CPU, repetitions=3), 3)[2]
    assert message.latency_s >= 0
    assert all_reduce.seconds(4e6) > 0


def test_larger_models_have_longer_optimizer_steps():
    constant_s, per_parameter_s = measure_optimizer(CPU, repetitions=3)
    assert constant_s >= 0
    assert 1e-12 < per_parameter_s < 1e-5
