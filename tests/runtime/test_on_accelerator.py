"""The runtime on a pretend accelerator: equal to one process on a CPU, and no waits of the host within a step."""

import math
from collections import Counter

import pytest
import torch
from one_process import prepare, verify
from pretend_accelerator import counted, on_accelerator
from scenario import Scenario, ScenarioBatch
from training import plan_of, run_config, train

from motet.config import RunConfig
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.engine import Engine, StartedIteration
from motet.runtime.training.optimizer import AVERAGE
from motet.runtime.training.worker import train_worker

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
)


WAITS_OF_EXPERTS = "modeling_mixtral.py"
"""transformers' loop over experts in float64 looks which of them were chosen."""


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
            assert {site: n for site, n in found.items() if WAITS_OF_EXPERTS not in site[1]} == {}, scenario


@pytest.mark.parametrize("scenarios", [ALONE, IN_PAIRS], ids=["alone", "in pairs"])
def test_gradients_are_those_of_one_process_and_the_host_does_not_wait(scenarios):
    _check(*scenarios)


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", OTHERS, ids=str)
def test_gradients_of_other_parts_and_layouts_are_those_of_one_process(scenario):
    _check(scenario)


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


def test_training_and_its_resumption_are_those_on_a_cpu(tmp_path):
    common = {"train__checkpoint_every": 2, "train__clip_grad_norm": 0.5}
    (on_cpu,) = train(run_config(tmp_path / "cpu", **common))
    config = run_config(tmp_path / "gpu", **common)
    resumed = run_config(tmp_path / "gpu", **common, train__resume=str(tmp_path / "gpu/checkpoints/step_00000002"))
    plan = plan_of(config)

    def work(rank: int, device: torch.device) -> list[dict]:
        return [
            train_worker(of.model_copy(update={"cluster": of.cluster.model_copy(update={"device": "gpu"})}), plan)
            for of in (config, resumed)
        ]

    whole, rest = on_accelerator(work, plan.num_ranks)[0]
    assert whole["losses"] == pytest.approx(on_cpu["losses"], rel=1e-4)
    assert rest["losses"] == whole["losses"][2:]
