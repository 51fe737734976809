"""Profiling real stages: every layer gets costs, they survive the file and predict runs that were not measured.

Operations and messages take what they are told here, by a clock that nothing else moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from motet.assignment.sample import Sample, Segment
from motet.costs.cost_model import CostTable, microbatch_load
from motet.costs.profiling import links as profiler_links
from motet.costs.profiling import profiler
from motet.costs.profiling.links import (
    NUM_PARAMETER_TENSORS,
    NUM_SUMMED,
    measure_end_of_step,
    measure_links,
    measure_optimizer,
)
from motet.costs.profiling.profiler import ProfiledModule, ProfileOptions, profile, runs_to_measure
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.projector import build_projector
from motet.models.stages.stage import StageInput
from motet.shapes.module_shape import with_projector

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
OPTIONS = ProfileOptions(microbatch_sizes=(1, 3), num_microbatches=4, repetitions=1)
OPERATION_S, S_PER_ELEMENT, S_PER_FLOP = 1e-6, 1e-9, 1e-10
MESSAGE_S, SUM_S, LINK_BYTES_PER_S = 1e-5, 3e-5, 2e9


class CountedTime(TorchDispatchMode):
    """Every operation takes a time, for each element that it makes, and for each product of a matrix one.

    One that returns nothing makes what it was given."""

    now_s = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        written = tree_leaves(args if made is None else made)
        num_elements = sum(tensor.numel() for tensor in written if isinstance(tensor, torch.Tensor))
        self.now_s += OPERATION_S + num_elements * S_PER_ELEMENT
        if func.__name__.partition(".")[0] in ("mm", "addmm", "bmm"):
            self.now_s += 2 * num_elements * args[-1].shape[-2] * S_PER_FLOP
        return made

    def read(self) -> float:
        return self.now_s


@contextmanager
def counted_time() -> Iterator[CountedTime]:
    """What the profiler reads on its clocks."""
    time = CountedTime()
    clocks = SimpleNamespace(thread_time=time.read, perf_counter=time.read)
    with mock.patch.object(profiler, "time", clocks), mock.patch.object(profiler_links, "time", clocks):
        yield time


@contextmanager
def messages_that_take(time: CountedTime) -> Iterator[None]:
    """By their bytes; as one waits for the other, whoever sends and whoever receives is busy for half of it."""

    def taking(function, seconds, size_of=0):
        def call(*args, **kwargs):
            function(*args, **kwargs)
            time.now_s += seconds + args[size_of].nbytes / LINK_BYTES_PER_S

        return call

    with (
        mock.patch.object(dist, "send", taking(dist.send, MESSAGE_S)),
        mock.patch.object(dist, "recv", taking(dist.recv, MESSAGE_S)),
        mock.patch.object(dist, "all_reduce", taking(dist.all_reduce, SUM_S)),
        mock.patch.object(dist, "all_gather_into_tensor", taking(dist.all_gather_into_tensor, 2 * SUM_S)),
        mock.patch.object(dist, "reduce_scatter_tensor", taking(dist.reduce_scatter_tensor, 3 * SUM_S, size_of=1)),
        mock.patch.object(dist, "all_to_all_single", taking(dist.all_to_all_single, 4 * SUM_S)),
    ):
        yield


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


@pytest.fixture(autouse=True)
def _small_messages(monkeypatch):
    monkeypatch.setattr(profiler_links, "LINK_ELEMENTS", (1, 2**10, 2**12, 2**14))


@pytest.fixture(scope="module")
def table():
    with counted_time() as time, time:
        return profile(MODULES, make_stage, SmallBatch(), options=OPTIONS, device=CPU)


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
    """Two of three blocks on samples drawn otherwise."""
    samples = [SmallBatch.samples[i] for i in (0, 3, 4)]
    stage = make_stage("text", (1, 3), 1)
    hidden = torch.randn(stage.input_shape(samples), requires_grad=True)
    output_gradient = torch.ones(hidden.shape)
    inputs = StageInput(samples, hidden=hidden)
    stage(inputs).hidden.backward(output_gradient)  # Others add to its gradients.
    with CountedTime() as time:
        stage(inputs).hidden.backward(output_gradient)
    load = microbatch_load(MODULES["text"].workload, "text", samples, ("vision",))
    costs = table.of("text", 1)
    predicted = (
        costs.stage_forward.plus(costs.blocks_forward).plus(costs.stage_backward).plus(costs.blocks_backward)
    ).seconds(load) + sum(
        (layer.forward.seconds(load) + layer.input_gradient.seconds(load) + layer.weight_gradient.seconds(load))
        for layer in costs.layers[1:3]
    )
    assert predicted == pytest.approx(time.now_s, rel=0.05)


def test_where_each_microbatch_is_one_sequence_a_quadratic_time_is_that_of_its_pairs():
    """A context-parallel rank has a share of the pairs; of the square of its tokens, the square of that share."""
    workload = MODULES["text"].workload
    runs = [
        profiler.Measurement(
            layers=layers,
            load=microbatch_load(workload, "text", [Sample("s", {"text": (Segment(tokens),)}, {"text": tokens})]),
            weight_gradient=False,
            input_gradient=False,
            forward_s=1e-6 + sum(1e-8 * tokens**2 for i in range(*layers) if workload.layers[i].part == "block"),
        )
        for tokens in (64, 512, 2048)
        for layers in runs_to_measure(workload)
    ]
    block = profiler.fit_module(workload, runs).costs.layers[1].forward_without_graph
    assert block.per_token_squared == 0
    assert block.per_pair == pytest.approx(1e-8, rel=0.05)


def test_runs_to_measure():
    assert runs_to_measure(MODULES["vision"].workload) == [(0, 1), (1, 2), (3, 4), (4, 5), (1, 3), (0, 5)]


def test_ranks_measure_together_and_agree():
    """Two processes; links are measured between them."""

    def work(rank):
        with counted_time() as time, messages_that_take(time), time:
            return profile({"vision": MODULES["vision"]}, make_stage, SmallBatch(), options=OPTIONS, device=CPU)

    tables = run_distributed(work, 2)
    assert tables[0] == tables[1]
    assert tables[0].message is not None
    assert tables[0].all_reduce is not None
    assert tables[0].notes["ranks"] == 2


def test_links_with_a_rank_that_only_waits():
    def work(rank):
        with counted_time() as time, messages_that_take(time):
            return measure_links(CPU, repetitions=1)

    links = run_distributed(work, 3)[2]
    expected = {"all_gather": 2 * SUM_S, "reduce_scatter": 3 * SUM_S, "all_to_all": 4 * SUM_S}
    assert links.collectives.keys() == expected.keys()
    for link, latency_s in (
        (links.message, MESSAGE_S),
        (links.all_reduce, SUM_S),
        *((links.collectives[name], latency_s) for name, latency_s in expected.items()),
    ):
        assert (link.latency_s, link.bytes_per_s) == pytest.approx((latency_s, LINK_BYTES_PER_S))


def test_a_module_that_is_one_stage_is_measured_whole():
    """Its layers cannot be run alone (a U-Net)."""
    module = MODULES["vision"]
    whole = replace(module, workload=replace(module.workload, max_stages=1))
    layers = (0, module.workload.num_layers)
    assert runs_to_measure(whole.workload) == [layers]

    def only_whole(name, asked, tp_size):
        assert asked == layers
        return make_stage(name, asked, tp_size)

    with counted_time() as time, time:
        costs = profile({"vision": whole}, only_whole, SmallBatch(), options=OPTIONS, device=CPU).of("vision", 1)
    samples = [SmallBatch.samples[i] for i in (0, 3)]
    stage, features = make_stage("vision", layers, 1), [SmallBatch().features("vision", 0)] * 2
    with CountedTime() as time, torch.no_grad():
        stage(StageInput(samples, features))
    load = microbatch_load(module.workload, "vision", samples)
    forward = costs.stage_forward.plus(costs.blocks_forward).seconds(load)
    forward += sum(layer.forward_without_graph.seconds(load) for layer in costs.layers)
    assert forward == pytest.approx(time.now_s, rel=0.1)


def test_the_end_of_a_step_is_two_sums_of_all_ranks():
    def work(rank):
        with counted_time() as time, messages_that_take(time):
            return measure_end_of_step(CPU, repetitions=1)

    ends = run_distributed(work, 3)
    assert ends == [pytest.approx(2 * (SUM_S + 8 * NUM_SUMMED / LINK_BYTES_PER_S))] * 3


def test_larger_models_have_longer_optimizer_steps():
    with counted_time() as time, time:
        constant_s, per_parameter_s = measure_optimizer(CPU, repetitions=3)
    # Each of these touches every parameter, and there are more operations than that.
    assert constant_s > NUM_PARAMETER_TENSORS * OPERATION_S
    assert 2 * S_PER_ELEMENT < per_parameter_s < 20 * S_PER_ELEMENT


def test_clocks_of_the_machine_go_on():
    """All else here is measured by another one."""
    options = ProfileOptions(microbatch_sizes=(1,), num_microbatches=2, repetitions=1)
    table = profile({"text": MODULES["text"]}, make_stage, SmallBatch(), options=options, device=CPU)
    assert table.optimizer_s_per_parameter > 0
    costs = table.of("text", 1)
    load = microbatch_load(MODULES["text"].workload, "text", SmallBatch.samples[:2], ("vision",))
    assert sum(layer.forward.seconds(load) for layer in costs.layers) + costs.stage_forward.seconds(load) > 0
