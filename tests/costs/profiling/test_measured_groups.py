"""Groups of ranks that share tokens or experts are measured together, and plans cost what was measured."""

import json
from dataclasses import replace

import pytest
from quick_profile import profile_quickly
from sampling import in_campaigns
from tiny_run import write_tiny_run

from motet import api
from motet.config.run_file import load_run_config
from motet.costs.cost_model import CostTable, Load, Sharing
from motet.plan import ContextOptions
from motet.planner.problem import Degrees
from motet.runtime import profile_worker

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("degrees", "name"),
    [
        ({"cp": 2, "context": {"block_size": 16}}, "tp_size 1, cp_size 2, all_gather"),
        ({"dp": 2, "ep": 2}, "tp_size 1, ep 2"),
        *in_campaigns(
            ({"cp": 2, "context": {"block_size": 16, "method": method}}, f"tp_size 1, cp_size 2, {method}")
            for method in ("ring", "ulysses")
        ),
    ],
)
def test_groups_are_measured_with_what_they_exchange(tmp_path, monkeypatch, degrees, name):
    """By `motet profile`, as the run file says; the plan costs what was measured."""
    profile_quickly(monkeypatch)
    values = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"vocab_size": 64, "num_key_value_heads": 2} | (EXPERTS if "ep" in degrees else {})
    family = "MixtralConfig" if "ep" in degrees else "LlamaConfig"
    model = f"model.language_model={json.dumps({'config': family, 'values': values})}"
    explicit = {"vision": {}, "audio": {}, "language_model": degrees}
    parallel = {"planner": "explicit", "num_microbatches": 2, "explicit": explicit}
    run_file = write_tiny_run(tmp_path)
    overrides = [model, f"parallel={json.dumps(parallel)}", "cluster.num_devices=4"]
    table = api.profile(run_file, overrides)
    ((sharing, costs),) = table.groups["language_model"].items()
    assert sharing.name == name
    assert table.groups.keys() == {"language_model"}
    assert table.modules.keys() == {"vision", "audio", "language_model"}
    assert f"language_model, {name}" in table.notes
    table.save(tmp_path / "costs.json")
    alone = replace(table, groups={})
    alone.save(tmp_path / "alone.json")
    seconds = [
        api.simulate(run_file, [*overrides, f"cluster.costs={tmp_path / file}"]).iteration_time_s
        for file in ("costs.json", "alone.json")
    ]
    assert seconds[0] != seconds[1]
    # On a busy machine the fit of one layer can be 0.
    assert any(layer.forward.seconds(Load(tokens=100, pairs=5000)) > 0 for layer in costs.layers)


def test_each_module_is_measured_under_its_own_context(tmp_path, monkeypatch):
    """Modules that share their tokens alike, but in blocks of other sizes, are not measured together."""
    launched = []

    def launch(worker, config, batch, names, options, context, **processes):
        launched.append((names, options.sharing, context))
        return CostTable(modules={}, source="profiled", hardware="", date="")

    monkeypatch.setattr(profile_worker, "launch", launch)
    monkeypatch.setattr(CostTable, "with_costs_of", lambda table, others: table)
    small, large = (Degrees(cp=2, context=ContextOptions(block_size=size)) for size in (16, 64))
    degrees = [("vision", small), ("language_model", large), ("language_model", small), ("audio", Degrees())]
    config = load_run_config(write_tiny_run(tmp_path))
    profile_worker.profile_in_processes(config, None, degrees, num_devices=2)
    shared = Sharing.of(1, 2, small.context, 1)
    assert launched[0] == (("vision", "audio", "language_model"), Sharing(), ContextOptions())
    assert launched[1:] == [(("vision",), shared, small.context), (("language_model",), shared, large.context)]
