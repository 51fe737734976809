"""What `motet verify` collects from the ranks, and what it refuses to compare."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from one_process import verify
from sampling import in_campaigns
from scenario import PLACEHOLDERS, Scenario, ScenarioBatch

from motet.models.from_run_file import plain_nodes
from motet.runtime.local_model import LocalModel
from motet.runtime.verification.verify import collect_versions, run_references

REPLICAS = Scenario(dp=2, placement="replicated")


def weights_of(scenario: Scenario) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}.{key}": value
        for name, node in plain_nodes(scenario.config(), PLACEHOLDERS).items()
        for part, module in node.parts.items()
        for key, value in module.named_parameters()
    }


def test_a_parameter_without_gradient_on_one_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalModel.finish_gradients

    def forgetful(self: LocalModel) -> None:
        original(self)
        for p in self.parameters:
            if dist.get_rank() == 1 and p.name == "language_model.module.model.norm.weight":
                p.parameter.grad = None

    monkeypatch.setattr(LocalModel, "finish_gradients", forgetful)
    comparison = run_distributed(lambda rank: verify(REPLICAS), REPLICAS.num_ranks)[0]
    assert "language_model.module.model.norm.weight has no gradient in the distributed run" in comparison.failures


def test_a_parameter_that_the_run_froze_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalModel._parameters_of

    def freezing(self: LocalModel, key: Any) -> Any:
        for name, parameter in self.stages[key].named_parameters():
            if name.endswith("layers.2.mlp.up_proj.weight"):
                parameter.requires_grad_(False)
        return original(self, key)

    monkeypatch.setattr(LocalModel, "_parameters_of", freezing)
    comparison = run_distributed(lambda rank: verify(REPLICAS), REPLICAS.num_ranks)[0]
    assert comparison.failures == [
        "language_model.module.model.layers.2.mlp.up_proj.weight has no gradient in the distributed run"
    ]


def test_replicas_with_different_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalModel.zero_gradients

    def drifting(self: LocalModel) -> None:
        original(self)
        with torch.no_grad():
            self.parameters[3].parameter.view(-1)[0] += dist.get_rank()

    monkeypatch.setattr(LocalModel, "zero_gradients", drifting)
    with pytest.raises(AssertionError, match=r"ranks hold different weights of vision\."):
        run_distributed(lambda rank: verify(REPLICAS), REPLICAS.num_ranks)


def test_weights_that_do_not_fit_are_refused() -> None:
    scenario = Scenario()
    config = scenario.config()
    batch = ScenarioBatch(scenario, config)
    weights = weights_of(scenario)
    for name in list(weights):
        if name.endswith("projector.linear_1.bias"):
            weights[name + "_"] = weights.pop(name)
    with pytest.raises(ValueError, match=r"vision: .*missing \['projector.linear_1.bias'\], unexpected"):
        run_references(
            plain_nodes(config, PLACEHOLDERS),
            weights,
            batch,
            dtype="float64",
        )


def test_the_reference_is_made_of_the_given_weights() -> None:
    """Not of what the constructors drew."""
    scenario = Scenario()
    config = scenario.config()
    batch = ScenarioBatch(scenario, config)
    weights = weights_of(scenario)
    losses = [
        run_references(
            plain_nodes(config, PLACEHOLDERS),
            {name: factor * value for name, value in weights.items()},
            batch,
            dtype="float64",
        ).plain.loss
        for factor in (1.0, 1.0, 1.5)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_in_bfloat16_features_are_read_in_their_own_dtype() -> None:
    """Some processors compute when they are asked."""
    scenario = Scenario(dtype="bfloat16")
    config = scenario.config()

    class Asking(ScenarioBatch):
        def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
            assert torch.get_default_dtype() == torch.float32
            return super().features(module, sample)

    references = run_references(
        plain_nodes(config, PLACEHOLDERS),
        weights_of(scenario),
        Asking(scenario, config),
        dtype="bfloat16",
    )
    assert references.plain.loss != references.exact.loss
    assert references.plain.loss == pytest.approx(references.exact.loss, rel=1e-2)


def test_the_order_in_which_a_plan_lists_the_ranks_of_a_group_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scenario._ranks
    monkeypatch.setattr(Scenario, "_ranks", lambda self, *place: original(self, *place)[::-1])
    scenario = Scenario(tp=2, dp=2, placement="replicated")
    assert scenario.plan(scenario.config()).modules["vision"].replicas[1].stages[0].ranks == (3, 2)
    assert run_distributed(lambda rank: verify(scenario), scenario.num_ranks)[0].failures == []


@pytest.mark.parametrize("sequence_parallel", [True, *in_campaigns([False])])
def test_rows_reach_their_place_in_a_group_that_the_plan_lists_in_another_order(
    sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between groups listed forwards and backwards, whose members each get a share of the rows."""
    original = Scenario._ranks

    def ranks(self: Scenario, name: str, replica: int, place: int) -> tuple[int, ...]:
        listed = original(self, name, replica, place)
        return listed[::-1] if name == "language_model" and place == 0 else listed

    monkeypatch.setattr(Scenario, "_ranks", ranks)
    scenario = Scenario(tp=2, llm_pp=2, placement="shared", sequence_parallel=sequence_parallel)
    stages = scenario.plan(scenario.config()).modules["language_model"].replicas[0].stages
    assert [list(stage.ranks) == sorted(stage.ranks) for stage in stages] == [False, True]
    assert run_distributed(lambda rank: verify(scenario), scenario.num_ranks)[0].failures == []


def test_equal_tensors_travel_once() -> None:
    def collect(rank: int) -> Any:
        mine = [("same", torch.ones(3)), ("different", torch.full((3,), rank // 2))]
        return collect_versions(mine, {"missing"} if rank == 3 else set())

    versions, *others = run_distributed(collect, 4)
    assert others == [None, None, None]
    assert {name: [v.tolist() for v in held] for name, held in versions.items()} == {
        "same": [[1.0, 1.0, 1.0]],
        "different": [[0, 0, 0], [1, 1, 1]],
        "missing": [],
    }
