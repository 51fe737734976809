"""The reference takes over the routing of a run, and says where it would have chosen otherwise."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from distributed import run_distributed
from one_process import verify
from sampling import in_campaigns
from scenario import Scenario
from torch import Tensor

from motet.families.capabilities import FEATURES, SHOWN_EQUAL
from motet.runtime.engine import Engine
from motet.runtime.verification.comparison import Comparison
from motet.runtime.verification.routing import Flips

MIXTURE = Scenario(llm="qwen3_moe", placement="shared", frozen="audio")
LAYOUTS = {
    "group, two stages, packed": replace(MIXTURE, tp=2, ep=2, llm_pp=2, packing=True, placement="replicated"),
    "replicas, recomputed": replace(MIXTURE, llm="gpt_oss", dp=2, ep=2, num_samples=3, recompute=True),
    "shared tokens": replace(MIXTURE, llm="mixtral", cp=2),
    "groups of experts": replace(MIXTURE, llm="deepseek_v3", tp=2, sequence_parallel=True),
    "scaled tokens": replace(MIXTURE, llm="llama4", tp=2),
}
USUAL = "replicas, recomputed"


@pytest.mark.parametrize("dtype", ["float64", *in_campaigns(["float32", "bfloat16"])])
@pytest.mark.parametrize("name", [USUAL, *in_campaigns(name for name in LAYOUTS if name != USUAL)])
def test_every_token_is_replayed(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(LAYOUTS[name], dtype=dtype)
    monkeypatch.setitem(SHOWN_EQUAL, scenario.llm, frozenset(FEATURES))  # Their own tests ask for probes.
    found: Comparison = run_distributed(lambda rank: verify(scenario), scenario.num_ranks)[0]
    assert found.failures == []
    assert found.num_routed_tokens > 0
    if dtype == "float64":
        assert found.num_flipped_tokens == 0
    print(f"{name}, {dtype}: {found.num_flipped_tokens} of {found.num_routed_tokens}, worst {found.worst_flip:.1e}")


def tied(offset: float) -> Comparison:
    """The run's routers prefer the second expert by a little, which the reference's do not."""
    scenario = replace(MIXTURE, llm="mixtral", placement="shared", num_microbatches=1)
    engine_run = Engine.run

    def run(self: Engine, *args: object, **options: object) -> object:
        plain = torch.topk

        def nudged(scores: Tensor, *rest: object, **kwargs: object) -> object:
            return plain(scores + offset * torch.arange(scores.shape[-1]).flip(0), *rest, **kwargs)

        with patch.object(torch, "topk", nudged):
            return engine_run(self, *args, **options)

    with patch.object(Engine, "run", run):
        return run_distributed(lambda rank: verify(scenario), scenario.num_ranks)[0]


def test_a_flip_that_rounding_does_not_explain_fails() -> None:
    found = tied(0.3)
    assert found.num_flipped_tokens > 0
    assert found.worst_flip > 1e-3
    assert "tokens of mixtures were sent to other experts than in the reference" in found.failures[-1]


def test_flips_are_told_by_their_distance_from_a_tie() -> None:
    flips = Flips()
    scores = torch.tensor([[0.0, 1.0, 0.9, 2.0], [0.0, 1.0, 0.5, 2.0]])
    flips.add(scores, torch.tensor([[3, 1], [3, 1]]), torch.tensor([[2, 3], [1, 3]]))
    assert (flips.num_routed, flips.num_flipped) == (2, 1)
    assert flips.worst == pytest.approx(0.05)
    flips = Flips()
    whole = torch.tensor([[1.0, 1.1, 1.2, 0.8]])
    masked = torch.tensor([[1.0, 1.1, -torch.inf, -torch.inf]])
    flips.add(masked, torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), of_groups=whole)
    assert (flips.num_routed, flips.num_flipped) == (1, 1)
    assert flips.worst == pytest.approx(0.05 / 1.1)
