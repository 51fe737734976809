"""`motet verify` of Optimus' plans: an interleaved language model whose encoders fill its bubbles on the same ranks.

Layouts are taken by hand from planner `optimus`, so that each has what it is named after; the search is tested with
the planner. Modalities are missing from some samples, as the data draw them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from distributed import run_distributed
from sampling import in_campaigns
from tiny_run import write_tiny_run

from motet.api import read_problem
from motet.config import RunConfig, load_run_config
from motet.plan import Plan
from motet.planner.optimus.layouts import EncoderLayout, LlmLayout, LlmSide
from motet.planner.optimus.planner import plan_of
from motet.runtime.verification.worker import verify_worker

V2 = LlmLayout(dp=1, pp=2, tp=1, num_chunks=2)
LAYOUTS = {
    "V 2, one encoder pipeline over both groups": (V2, EncoderLayout(pp=2, tp=1)),
    "V 2, an encoder pipeline on each group": (V2, EncoderLayout(pp=1, tp=1)),
    "V 2, TP 2 with sequence parallelism, encoders without": (replace(V2, tp=2), EncoderLayout(pp=2, tp=1)),
    "V 2, DP 2": (replace(V2, dp=2), EncoderLayout(pp=1, tp=1)),
}


def run_of(folder: Path, llm: LlmLayout) -> RunConfig:
    path = write_tiny_run(folder)
    values = yaml.safe_load(path.read_text())
    values["model"]["language_model"]["values"]["num_hidden_layers"] = 6
    values["model"]["encoders"]["audio"]["train"] = {"module": False, "projector": True}
    values["cluster"]["num_devices"] = llm.dp * llm.pp * llm.tp
    values["parallel"] = {"planner": "optimus", "num_microbatches": 4, "limits": {"tp": [1, 2], "dp": [1, 2]}}
    values["train"]["dtype"] = "float64"
    path.write_text(yaml.safe_dump(values))
    return load_run_config(path, [])


USUAL = ("V 2, TP 2 with sequence parallelism, encoders without",)


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(name for name in LAYOUTS if name not in USUAL)])
def test_plans_of_optimus_equal_one_process(name: str, tmp_path: Path) -> None:
    llm, encoder = LAYOUTS[name]
    config = run_of(tmp_path, llm)
    problem = read_problem(config)
    side = LlmSide(problem, llm)
    plan = replace(plan_of(side.solve(encoder, side.timeline())), schedule="bubble_filling")
    if llm.tp > 1:
        llm_plan = replace(plan.modules["language_model"], sequence_parallel=True)
        plan = replace(plan, modules={**plan.modules, "language_model": llm_plan})
    assert len(plan.modules["language_model"].replicas[0].stages) == llm.pp * llm.num_chunks
    assert len(plan.modules["vision"].replicas) == llm.dp * (llm.pp // encoder.pp) * (llm.tp // encoder.tp)
    for rank in range(plan.num_ranks):
        held = Counter(module for module, *_ in plan.stages_of_rank(rank))
        assert held["language_model"] == llm.num_chunks
        assert held["vision"]
    written = Plan.from_json(plan.to_json())
    result = run_distributed(lambda rank: verify_worker(config, written), plan.num_ranks, timeout=300)[0]
    assert result["max_grad_rel_err"] <= 1e-9, json.dumps(result)
    assert result["loss_rel_err"] <= 1e-9
    assert result["num_parameters_compared"] > 0
