"""The runtime on a pretend accelerator: equal to one process on a CPU, and no waits of the host within a step."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive_cases import Case, Tower, plain_gradients
from one_process import prepare, verify
from pretend_accelerator import counted, on_accelerator
from scenario import Scenario, ScenarioBatch
from training import ids_of_step, plan_of, run_config, spoil, train

from motet.config import RunConfig
from motet.runtime import batch_copies
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.engine import Engine, IterationResult, StartedIteration
from motet.runtime.next_batch import NextBatch
from motet.runtime.training.optimizer import AVERAGE
from motet.runtime.training.trainer import NonFiniteError
from motet.runtime.training.worker import train_worker
from motet.runtime.verification.verify import DRAW_KEY, collect_gradients
from motet.timeline import BUSY_KINDS, Timeline

ALONE = (
    Scenario(placement="shared"),
    Scenario(placement="shared", packing=True, items="half"),
    Scenario(placement="shared", packing=True, recompute="offload"),
    Scenario(placement="shared", llm="qwen3", vision="qwen2_5_vl", audio="qwen2_audio", recompute=True),
)
IN_PAIRS = (
    Scenario(placement="shared", cp=2),
    Scenario(placement="shared", llm="gemma3", llm_pp=2, vision="clip", schedule="zero_bubble_h1"),
)
OTHERS = (
    Scenario(placement="shared", items="none"),
    Scenario(placement="shared", media_attention="own_item", packing=True),
    Scenario(placement="shared", llm="mistral", vision="pixtral"),
    Scenario(placement="shared", llm="phi3", vision="dinov2"),
    Scenario(merge="cross_attention", llm="mllama", placement="shared"),
    Scenario(placement="shared", lora=("language_model",)),
    Scenario(placement="shared", cp=2, cp_method="ring"),
    Scenario(placement="shared", cp=2, cp_method="ulysses"),
    Scenario(placement="shared", tp=2),
    Scenario(placement="shared", tp=2, sequence_parallel=True),
    Scenario(placement="shared", dp=2),
    Scenario(placement="parallel", llm_pp=2),
    Scenario(placement="parallel", encoder_cp=2),
    Scenario(placement="shared", llm="mixtral"),
    Scenario(placement="shared", llm="mixtral", tp=2, ep=2),
    Scenario(placement="shared", llm="mixtral", dp=2, ep=2),
)


LOOP_OVER_EXPERTS = "modeling_mixtral.py"
"""transformers' loop over experts in float64 looks which of them were chosen."""
DISTRIBUTED_EXPERTS = "motet/parallel/experts.py"
"""How many rows go to which rank, the host asks once in each layer's forward."""
NUM_LAYERS, NUM_MICROBATCHES = 4, 2


def _start(engine: Engine, batch: ScenarioBatch) -> StartedIteration:
    engine.model.zero_gradients()
    started = engine.start(batch, seed=(0, 0))
    engine.model.clip_gradients(started.gradient_norm, 0.5)
    return started


def _check(*scenarios: Scenario) -> None:
    """All in the same processes: gradients, and that the host waits for nothing in the second iteration."""
    for scenario in scenarios:
        prepare(scenario)

    def work(rank: int, device: torch.device) -> list[Counter[tuple[str, str]]]:
        waits: list[Counter[tuple[str, str]]] = []

        def count(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
            with counted() as found:
                started = _start(engine, batch)
            waits.append(found)
            assert math.isfinite(started.read().loss)

        for scenario in scenarios:
            comparison = verify(scenario, device=device, after=count)
            if comparison is not None:
                assert comparison.failures == [], scenario
                assert comparison.max_grad_rel_err <= 1e-9
        return waits

    for of_rank in on_accelerator(work, scenarios[0].num_ranks):
        for scenario, found in zip(scenarios, of_rank, strict=True):
            of_experts = {site: n for site, n in found.items() if DISTRIBUTED_EXPERTS in site[1]}
            known = of_experts | {site: n for site, n in found.items() if LOOP_OVER_EXPERTS in site[1]}
            assert {site: n for site, n in found.items() if site not in known} == {}, scenario
            of_own = {site: n for site, n in of_experts.items() if LOOP_OVER_EXPERTS not in site[1]}
            assert sum(of_own.values()) == (scenario.ep > 1) * NUM_LAYERS * NUM_MICROBATCHES, of_own


@pytest.mark.parametrize("scenarios", [ALONE, IN_PAIRS], ids=["alone", "in pairs"])
def test_gradients_are_those_of_one_process_and_the_host_does_not_wait(scenarios):
    _check(*scenarios)


def test_encoders_run_ahead_without_a_wait_of_the_host() -> None:
    """The batch's encoder outputs come from the iteration before, and an evaluation lies between. Each batch is packed
    for the device once."""
    scenario = Scenario(placement="shared", frozen="all but language model", items="half", run_ahead=True)
    prepare(scenario)

    def work(rank: int, device: torch.device) -> Counter[tuple[str, str]]:
        waits: list[Counter[tuple[str, str]]] = []
        packed: list[int] = []
        pack = batch_copies._packed

        def counting(batch: Any, *args: Any) -> batch_copies.PackedBatch:
            packed.append(id(batch.samples))
            return pack(batch, *args)

        batch_copies._packed = counting

        def run_before(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
            first, second, third = (batch.with_other_contents(number) for number in (50, 100, 150))
            engine.run(first, seed=(0, 1), following=NextBatch(second, (0, 2)))
            engine.run(second, seed=(0, 2), following=NextBatch(third, (0, 3)))  # Ranks compare its program.
            with counted() as found:
                engine.model.zero_gradients()
                started = engine.start(third, seed=(0, 3), following=NextBatch(batch, DRAW_KEY))
            waits.append(found)
            assert math.isfinite(started.read().loss)
            assert packed == [id(each.samples) for each in (first, second, third, batch)]
            engine.run(first, forward_only=True)

        comparison = verify(scenario, run_before, device=device)
        assert comparison is not None
        assert comparison.failures == []
        return waits[0]

    assert on_accelerator(work, scenario.num_ranks) == [Counter()]


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", OTHERS, ids=str)
def test_gradients_of_other_parts_and_layouts_are_those_of_one_process(scenario):
    _check(scenario)


def test_experts_in_grouped_products_make_the_host_wait_for_nothing():
    """The products do not compute in float64, where a loop over experts takes their place."""
    scenario = Scenario(placement="shared", llm="mixtral-kernels", items="none", num_samples=2, dtype="float32")
    prepare(scenario)

    def work(rank: int, device: torch.device) -> None:
        config = scenario.config()
        engine = build_engine(config, scenario.plan(config), device)
        batch = ScenarioBatch(scenario, config)
        for _ in range(2):
            with counted() as found:
                started = _start(engine, batch)
            assert math.isfinite(started.read().loss)
        assert not found, found

    on_accelerator(work)


TOWERS = (
    Case({"image": Tower("siglip", num_microbatches=2), "text": Tower("siglip_text")}, "sigmoid", 4, colocated=True),
    Case(
        {"image": Tower("clip", lacking=(0,)), "text": Tower("clip_text"), "sound": Tower("whisper")},
        num_samples=4,
        num_batches=2,
    ),
)


@pytest.mark.parametrize("case", TOWERS, ids=["one process", "a rank for each tower"])
def test_contrastive_gradients_are_those_of_one_process_and_the_host_does_not_wait(case):
    def work(rank: int, device: torch.device) -> None:
        model = case.build()
        engine = case.engine(model, case.plan(model), device)
        for number in range(2):
            engine.model.zero_gradients()
            with counted() as found:
                started = engine.start(case.batch(model))
                engine.model.clip_gradients(started.gradient_norm, math.inf)
            loss = started.read().loss
            assert not found or not number, found
        expected_loss, expected = plain_gradients(case)
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        gradients = collect_gradients(engine.model)
        for name, versions in ({} if gradients is None else gradients).items():
            for version in versions:
                torch.testing.assert_close(version.cpu(), expected[name], rtol=1e-9, atol=1e-12)

    on_accelerator(work, case.num_ranks)


def test_the_optimizer_leaves_out_a_step_that_is_not_finite_and_the_host_does_not_wait(monkeypatch):
    monkeypatch.setattr("motet.runtime.assembly._averages", lambda config: {"language_model.module": 0.9})
    scenario = Scenario(placement="shared", dtype="float32", items="half")
    prepare(scenario)

    def work(rank: int, device: torch.device) -> None:
        config = scenario.config()
        engine = build_engine(config, scenario.plan(config), device)
        optimizer = build_optimizer(config, engine.model)
        batch = ScenarioBatch(scenario, config)
        values = []
        for number in range(3):
            started = _start(engine, batch)
            if number == 1:
                engine.model.trainable()[0].grad.fill_(float("nan"))
            with counted() as found:
                started = _start(engine, batch) if number == 2 else started
                is_finite = started.is_finite & (torch.zeros((), device=device) == number % 2)
                optimizer.step(number, is_finite)
            assert not found
            averages = [state[AVERAGE] for state in optimizer.states().values() if AVERAGE in state]
            assert averages
            kept = [*engine.model.trainable(), *averages]
            values.append(torch.cat([tensor.detach().cpu().flatten() for tensor in kept]))
        assert values[0].isfinite().all()
        assert torch.equal(values[0], values[1])
        assert not torch.equal(values[1], values[2])
        # 0: of parameters that no sample of the batch reaches.
        assert {int(state["step"].item()) for state in optimizer.states().values()} == {0, 2}

    on_accelerator(work)


def _follow_steps() -> tuple[list[str], dict[int, float]]:
    """What the trainer of this process does from now on: starts iterations and reads their results; and for how long
    the device computed in each of them."""
    done: list[str] = []
    seconds: dict[int, float] = {}
    start, read = Engine.start, StartedIteration.read

    def telling_start(self: Engine, *args: Any, seed: tuple[int, int], **options: Any) -> StartedIteration:
        done.append(f"start {seed[1] + 1}")
        started = start(self, *args, seed=seed, **options)
        started.number = seed[1] + 1
        return started

    def telling_read(self: StartedIteration) -> IterationResult:
        done.append(f"read {self.number}")
        seconds[self.number] = self.recorder.duration_s
        return read(self)

    Engine.start, StartedIteration.read = telling_start, telling_read
    return done, seconds


def test_training_and_its_resumption_are_those_on_a_cpu(tmp_path, monkeypatch):
    """The loss of step 2 is not finite, which is seen when step 3 has been given to the device."""
    common = {
        "train__checkpoint_every": 4,
        "train__clip_grad_norm": 0.5,
        "train__steps": 6,
        "data__num_train": 28,
        "train__dtype": "bfloat16",
    }
    cpu, gpu = (run_config(tmp_path / name, **common, train__on_nonfinite="skip") for name in ("cpu", "gpu"))
    spoil(monkeypatch, ids_of_step(cpu, 1))
    (on_cpu,) = train(cpu)
    checkpoint = str(tmp_path / "gpu/checkpoints/step_00000004")
    resumed = gpu.model_copy(update={"train": gpu.train.model_copy(update={"resume": checkpoint})})
    stopping = run_config(tmp_path / "stopping", **common)
    plan = plan_of(cpu)

    def run_here(config: RunConfig) -> dict:
        cluster = config.cluster.model_copy(update={"device": "gpu"})
        return train_worker(config.model_copy(update={"cluster": cluster}), plan)

    def work(rank: int, device: torch.device) -> list[dict]:
        done, seconds = _follow_steps()
        results = [run_here(gpu)]
        before = ["start 1", "start 2", "read 1", "start 3", "read 2", "start 4", "read 3", "read 4"]
        assert done == [*before, "start 5", "start 6", "read 5", "read 6"], done
        if rank == 0:
            _check_seconds(tmp_path / "gpu/metrics.jsonl", seconds)
        results.append(run_here(resumed))
        with pytest.raises(NonFiniteError, match="step 2: loss"):
            run_here(stopping)
        assert done[-3:] == before[2:5], done
        return results

    whole, rest = on_accelerator(work, plan.num_ranks)[0]
    assert whole["skipped_steps"] == on_cpu["skipped_steps"] == [2]
    numbers, expected = ([loss for loss in run["losses"] if loss is not None] for run in (whole, on_cpu))
    assert numbers == pytest.approx(expected, rel=1e-3), (numbers, expected)  # Both round to bfloat16.
    assert rest["losses"] == whole["losses"][4:]
    lines = [json.loads(line) for line in (tmp_path / "gpu/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(whole["losses"], 1))
    assert all(0 < line["mfu"] < 1 and line["peak_memory_bytes"] == [1, 1] for line in lines)
    assert 0 < whole["measured"]["mfu"] < 1
    _check_timeline(*(Timeline.from_json(run["measured"]["timeline"]) for run in (whole, on_cpu)))


def _check_seconds(metrics: Path, seconds: dict[int, float]) -> None:
    """Steps take as long as the device computes, though results of one are read when the next has been issued. Steps 1
    and 5, after a checkpoint, begin with their data; others where the device has ended the one before."""
    lines = {line["step"]: line for line in map(json.loads, metrics.read_text().splitlines())}
    for number in (1, 5):
        assert lines[number]["step_s"] == lines[number]["data_s"] + seconds[number]
    assert all(lines[number]["step_s"] > seconds[number] for number in (2, 3, 4, 6))


def _check_timeline(measured: Timeline, on_cpu: Timeline) -> None:
    """Measured by events, and aligned across ranks."""
    assert {(span.rank, span.name) for span in measured.spans} == {(span.rank, span.name) for span in on_cpu.spans}
    ends = {span.name: span.end for span in measured.spans if span.kind in "FB"}
    for name, end in ends.items():
        if name.startswith("vision") and "F" in name:
            assert end <= ends[name.replace("vision", "language_model")]
    for rank in range(measured.num_ranks):
        spans = [span for span in measured.of_rank(rank) if span.kind in BUSY_KINDS]
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(spans))
        assert spans[-1].name == "optimizer"
