"""Training equals torch's own AdamW, clipping and schedules on the plain modules in one process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from hypothesis import given
from hypothesis import strategies as st
from sampling import in_campaigns
from toy_model import ToyBatch, toy_stage_maker
from training import Layout, run_config, stored_tensors, train

from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.models.from_run_file import build_node
from motet.models.materialize import float64_throughout
from motet.models.reference import plain_loss
from motet.parallel.tensor.tensor_collectives import TensorParallel
from motet.plan import Edge, ModulePlan, Plan, Replica, Stage
from motet.runtime.engine import Engine
from motet.runtime.local_model import LocalParameter
from motet.runtime.training.optimizer import LearningRateSchedule, Optimizer, OptimizerConfig

TP2_DP2: Layout = {"vision": {"dp": 2}, "audio": {"dp": 2}, "language_model": {"tp": 2, "dp": 2}}
PP2_DP2: Layout = {"vision": {"dp": 2}, "audio": {"dp": 2}, "language_model": {"pp": 2, "dp": 2}}

OVERRIDES = {
    "train__dtype": "float64",
    "train__steps": 3,
    "train__warmup_steps": 1,
    "train__lr_schedule": "linear",
    "train__weight_decay": 0.2,
    "train__clip_grad_norm": 0.5,
    "train__checkpoint_every": 3,
    "model__encoders__vision__train": {"module": False},
    "model__encoders__vision__projector_learning_rate": 3e-2,
    "model__encoders__audio__learning_rate": 2e-3,
}
FACTORS = [1.0, 1.0, 0.1]
"""On the learning rates: warm-up, then a straight line from 1 to 0.1 over the last two steps."""
RATES = {"vision.projector": 3e-2, "audio.module": 2e-3, "audio.projector": 1e-2, "language_model.module": 1e-2}


def plain_training(config: RunConfig) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms before clipping, and the parameters after the last step."""
    dtype = torch.float64
    modules = {name: build_node(config, name, None, dtype).module for name in ("vision", "audio", "language_model")}
    parameters = {
        f"{name}.{key}": parameter for name, module in modules.items() for key, parameter in module.named_parameters()
    }
    trainable = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    groups = [
        {
            "params": [parameter],
            "weight_decay": 0.2 if parameter.dim() > 1 else 0.0,
            "peak": RATES[".".join(key.split(".")[:2])],
        }
        for key, parameter in trainable.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.train.betas, eps=config.train.eps, foreach=False)
    data = open_data(config)
    loader = Loader(InProcess(data.train), config.train.global_batch_size, seed=config.train.seed, batches_ahead=0)
    encoders = {name: modules[name] for name in ("vision", "audio")}
    placeholders = data.preparation.placeholder_ids
    losses, norms = [], []
    for factor in FACTORS:
        batch = InFloat64(next(loader))
        loss = plain_loss(
            encoders,
            modules["language_model"].module,
            batch,
            merge="placeholder",
            placeholder_token_ids=placeholders,
        )
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trainable.values(), config.train.clip_grad_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
    return losses, norms, parameters


class InFloat64:
    def __init__(self, batch) -> None:
        self._batch, self.samples = batch, batch.samples

    def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
        values = self._batch.features(module, sample)
        return {key: value.double() if value.is_floating_point() else value for key, value in values.items()}


@pytest.mark.parametrize(
    ("layout", "zero1"), [*in_campaigns([({}, False)]), (TP2_DP2, True), *in_campaigns([(PP2_DP2, True)])]
)
def test_three_steps_equal_plain_torch(tmp_path: Path, layout: Layout, zero1: bool) -> None:
    """Frozen parts, a tied embedding, learning rates by part, no decay of vectors, clipping by the whole norm."""
    config = run_config(tmp_path, layout, parallel__zero1=zero1, **OVERRIDES)
    with float64_throughout():
        losses, norms, parameters = plain_training(config)
        (trained,) = train(config)
    assert trained["losses"] == pytest.approx(losses, rel=1e-9)
    assert all(norm > config.train.clip_grad_norm for norm in norms), "nothing was clipped"
    stored = stored_tensors(Path(trained["checkpoint"]))
    names = {name.removeprefix("model/") for name in stored if name.startswith("model/")}
    assert names == set(parameters)
    for name, parameter in parameters.items():
        torch.testing.assert_close(stored[f"model/{name}"], parameter.detach(), rtol=1e-7, atol=1e-9, msg=name)
    with_state = {name.removeprefix("optimizer/exp_avg/") for name in stored if name.startswith("optimizer/exp_avg/")}
    assert with_state == {name for name, parameter in parameters.items() if parameter.requires_grad}


@pytest.mark.parametrize("dtype", ["bfloat16", *in_campaigns(["float32"])])
def test_zero1_equals_unsharded_to_the_bit(tmp_path: Path, dtype: str) -> None:
    overrides = {**OVERRIDES, "train__dtype": dtype}
    plain, sharded = (
        run_config(tmp_path / str(zero1), TP2_DP2, parallel__zero1=zero1, **overrides) for zero1 in (False, True)
    )
    first, second = train(plain, sharded)
    assert first["losses"] == second["losses"]
    left, right = (stored_tensors(Path(result["checkpoint"])) for result in (first, second))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.84, 0.68, 0.52, 0.36, 0.2]),
        ("cosine", [0.5, 1.0, *(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * i / 5)) for i in range(6))]),
    ],
)
def test_schedules(shape, expected: list[float]) -> None:
    """Warm-up in two steps, then six more; the last one has the smallest rate, and so has whatever follows."""
    schedule = LearningRateSchedule(warmup_steps=2, total_steps=8, shape=shape, min_ratio=0.2)
    assert [schedule.factor(step) for step in range(8)] == pytest.approx(expected)
    assert schedule.factor(20) == pytest.approx(expected[-1])


def test_a_schedule_without_room_to_fall() -> None:
    schedule = LearningRateSchedule(warmup_steps=4, total_steps=4, shape="cosine", min_ratio=0.1)
    assert [schedule.factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_groups_that_ranks_hold_in_different_orders() -> None:
    """Rank 0 holds the encoder, then the language model; rank 1 the language model, then a copy of the encoder.

    Rank 1 holds a second copy too, which must neither count twice nor be updated twice."""

    def on_rank(*ranks: int) -> tuple[Replica, ...]:
        return tuple(Replica(stages=(Stage(layers=(0, 2), ranks=(rank,), tp_size=1),)) for rank in ranks)

    encoder = ModulePlan(kind="encoder", num_layers=2, replicas=on_rank(0), trainable=((0, 2),))
    copy = replace(encoder, replicas=on_rank(1), copy_of="vision")
    plan = Plan(
        modules={
            "vision": encoder,
            "llm": ModulePlan(
                kind="language_model",
                num_layers=2,
                replicas=on_rank(0, 1),
                trainable=((0, 2),),
                loss_weight=1.0,
            ),
            "vision@1": copy,
            "vision@2": copy,
        },
        edges=tuple(
            Edge(source=source, target="llm", layers=(layer,))
            for source, layer in (("vision", 0), ("vision@1", 0), ("vision@2", 1))
        ),
        num_microbatches=2,
    )
    batch = ToyBatch([Sample(str(i), {"vision": (Segment(2),), "llm": (Segment(3),)}, {"llm": 3}) for i in range(4)])

    def work(rank: int, zero1: bool) -> tuple[float, dict[str, torch.Tensor]]:
        engine = Engine(plan, toy_stage_maker(plan), device=torch.device("cpu"), boundary_dtype=torch.float64)
        config = OptimizerConfig(
            learning_rate=0.1, part_learning_rates={}, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, zero1=zero1
        )
        schedule = LearningRateSchedule(warmup_steps=0, total_steps=2, shape="constant", min_ratio=1.0)
        optimizer = Optimizer(engine.model.parameters, config, schedule)
        for step in range(2):
            engine.model.zero_gradients()
            norm = engine.run(batch).gradient_norm
            optimizer.step(step)
        gradients = {p.name: p.parameter.grad for p in engine.model.parameters}
        assert norm**2 == pytest.approx(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        for p in engine.model.parameters:
            mine = [other.parameter for other in engine.model.parameters if other.name == p.name]
            assert all(torch.equal(mine[0], other) for other in mine)
        return norm, {p.name: p.parameter.detach() for p in engine.model.parameters}

    plain, sharded = (run_distributed(work, 2, zero1) for zero1 in (False, True))
    for (norm, parameters), (other_norm, others) in zip(plain, sharded, strict=True):
        assert norm == pytest.approx(other_norm, rel=1e-12)
        for name, parameter in parameters.items():
            assert torch.equal(parameter, others[name]), name
            assert torch.equal(parameter, plain[0][1][name]), name


@pytest.mark.campaign
@given(st.integers(1, 120), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**31))
def test_shards_get_the_bits_of_the_whole(rows: int, columns: int, share: float, seed: int) -> None:
    """In float32, where nodes may fail: replicas of unlike tensor parallelism stay alike."""
    draw = torch.Generator().manual_seed(seed)
    values, *gradients = (torch.randn(rows, columns, generator=draw) for _ in range(4))
    whole, cut = updated(values, gradients), round(share * rows)
    shards = [updated(values[own], [each[own] for each in gradients]) for own in (slice(cut), slice(cut, None))]
    for name in whole:
        assert torch.equal(torch.cat([shard[name] for shard in shards]), whole[name]), name


def test_the_average_follows_the_parameter_from_the_start() -> None:
    values, *gradients = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    average = values
    for step in range(3):  # Decays of the first steps: 1/10, 2/11, and 0.15, which is less than 3/12.
        now = updated(values, gradients[: step + 1])["values"]
        average = average.lerp(now, 1 - min(0.15, (1 + step) / (10 + step)))
    found = updated(values, gradients, {"x.module": 0.15})
    torch.testing.assert_close(found["average"], average)
    assert torch.equal(found["values"], updated(values, gradients)["values"])


def updated(
    values: torch.Tensor, gradients: Sequence[torch.Tensor], averages: Mapping[str, float] | None = None
) -> dict[str, torch.Tensor]:
    """A parameter and its states, after a step with each of the gradients."""
    parameter = torch.nn.Parameter(values.clone())
    local = LocalParameter(
        name="x", stage=("x", 0, 0), part="x.module", parameter=parameter, shard=None, rows=None,
        tp=TensorParallel(None, 0, 1), reduce=None, reduce_group=None, is_shared_expert=False, is_partial=False,
        is_first=True, is_kept=True,
    )  # fmt: skip
    config = OptimizerConfig(
        learning_rate=0.1,
        part_learning_rates={},
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        zero1=False,
        averages=averages or {},
        is_exact=True,
    )
    schedule = LearningRateSchedule(warmup_steps=0, total_steps=9, shape="constant", min_ratio=1.0)
    optimizer = Optimizer([local], config, schedule)
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient.clone()
        optimizer.step(step)
    state = optimizer.states()[parameter]
    return {"values": parameter.detach(), **{key: value for key, value in state.items() if key != "step"}}
