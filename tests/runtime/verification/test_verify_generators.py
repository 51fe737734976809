"""`motet verify` of models that generate: both losses and every gradient against plain transformers and diffusers."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from generator_run import ONE_EACH, PIXART, SANA, planned
from sampling import in_campaigns

from motet.config import RunConfig
from motet.plan import Plan
from motet.runtime.verification.worker import verify_worker

ALONE = {"vision": {"module": False, "projector": False}, "language_model": {"module": False}}
NOT_TRAINED = {"module": False, "projector": False, "queries": False}
CASES: dict[str, dict[str, Any]] = {
    "apart": {},
    "in 2 stages": {"explicit": {"image": {"pp": 2}}, "num_devices": 4},
    "connector alone on a rank": {"explicit": {"image": {"pp": 2, "layers_per_stage": [1, 5]}}, "num_devices": 4},
    "embed alone and head alone": {
        "explicit": {"image": {"pp": 4, "layers_per_stage": [1, 1, 3, 1]}},
        "num_devices": 6,
    },
    "PixArt in 2 stages": {"generator": PIXART, "explicit": {"image": {"pp": 2}}, "num_devices": 4},
    "PixArt, 4 stages, noise, per place": {
        "generator": PIXART,
        "objective": "epsilon",
        "loss_per": "place",
        "projector": "linear",
        "explicit": {"image": {"pp": 4, "layers_per_stage": [2, 1, 2, 1]}},
        "num_devices": 6,
    },
    "Sana in one stage": {"generator": SANA, "ranks": {2: 1}},
    "Sana in 3 stages, v, recomputed": {
        "generator": SANA,
        "objective": "v",
        "explicit": {"image": {"pp": 3, "layers_per_stage": [1, 3, 2]}},
        "parallel": {"recompute": ["image"]},
        "num_devices": 5,
    },
    "v, per place, weighted": {"objective": "v", "loss_per": "place", "loss_weight": 0.3},
    "two replicas": {"explicit": {"image": {"dp": 2}}, "num_devices": 4},
    "language model in 2 stages, packed": {
        "explicit": {"language_model": {"pp": 2}},
        "num_devices": 4,
        "parallel": {"packing": True},
    },
    "language model with tp 2": {"explicit": {"language_model": {"tp": 2}}, "num_devices": 4},
    "language model with sequence parallelism": {
        "explicit": {"language_model": {"tp": 2, "sequence_parallel": True}},
        "num_devices": 4,
    },
    "language model with cp 2": {
        "explicit": {"language_model": {"cp": 2, "context": {"block_size": 4}}},
        "num_devices": 4,
    },
    "all twice": {
        "explicit": {name: {"dp": 2} for name in ("vision", "language_model", "image")},
        "num_devices": 6,
    },
    "on the language model's rank": {"ranks": {2: 1}},
    "in 2 stages, on the encoder's and the language model's ranks": {
        "explicit": {"image": {"pp": 2}},
        "num_devices": 4,
        "ranks": {2: 0, 3: 1},
    },
    "all on one rank": {"ranks": {1: 0, 2: 0}},
    "recomputed": {"parallel": {"recompute": ["language_model", "image", "vision"]}},
    "microbatches of one sample": {"parallel": {"num_microbatches": 8}},
    "generator alone trained": {"frozen": ALONE},
    "queries and connector alone trained": {
        "frozen": {**ALONE, "image": {"module": False}},
        "explicit": {"language_model": {"pp": 2}},
        "num_devices": 4,
    },
    "queries alone trained": {"frozen": {**ALONE, "image": {"module": False, "projector": False}}},
    "connector alone trained, on a rank": {
        "frozen": {**ALONE, "image": {"module": False, "queries": False}},
        "explicit": {"image": {"pp": 2, "layers_per_stage": [1, 5]}},
        "num_devices": 4,
    },
    "language model alone trained": {
        "frozen": {"vision": ALONE["vision"], "image": NOT_TRAINED},
        "null_condition": 0.9,
        "explicit": {"image": {"pp": 2, "layers_per_stage": [1, 5]}},
        "num_devices": 4,
    },
    "encoder alone trained": {"frozen": {"language_model": {"module": False}, "image": NOT_TRAINED}},
    **{
        schedule: {
            "explicit": {"image": {"pp": 2}},
            "num_devices": 4,
            "parallel": {"schedule": schedule, "num_microbatches": 4},
        }
        for schedule in ("gpipe", "eager_1f1b", "zero_bubble_h1", "zero_bubble_h2", "bubble_filling", "dip")
    },
    **{
        f"{schedule}, {name}": {
            "explicit": {name: {"pp": 2, "virtual_stages": 2} for name in interleaved},
            "num_devices": 1 + len(interleaved) + 2,
            "parallel": {"schedule": schedule, "num_microbatches": 4},
        }
        for schedule in ("interleaved_1f1b", "interleaved_1f1b_adjusted")
        for name, interleaved in (("generator", ["image"]), ("both", ["language_model", "image"]))
    },
    **{
        f"zero_bubble_v, {name}": {
            "explicit": {"language_model": {"pp": 2}, "image": {"pp": 2}},
            "num_devices": 5,
            "ranks": ranks,
            "parallel": {"schedule": "zero_bubble_v", "num_microbatches": 4},
        }
        for name, ranks in (("there and back", {3: 2, 4: 1}), ("apart", {}))
    },
}


def check_together(folder: Path, names: list[str], cases: dict[str, dict[str, Any]] = CASES) -> dict[str, Any]:
    """Those with one number of ranks share a start of processes."""
    by_size: dict[int, list[tuple[str, RunConfig, Plan]]] = defaultdict(list)
    for name in names:
        config, plan = planned(folder, cases[name])
        by_size[plan.num_ranks].append((name, config, plan))
    found = {}
    for num_ranks, group in by_size.items():
        results = run_distributed(_verify, num_ranks, group, timeout=120 + 20 * len(group))[0]
        found.update(zip([name for name, *_ in group], results, strict=True))
    return found


def _verify(rank: int, cases: list[tuple[str, RunConfig, Plan]]) -> list[Any]:
    results = []
    for name, config, plan in cases:
        try:
            results.append(verify_worker(config, plan))
        except BaseException as error:
            error.add_note(name)
            raise
    return results


def assert_equal(results: dict[str, Any]) -> None:
    for name, result in results.items():
        assert result["failures"] == [], (name, result)
        assert result["max_grad_rel_err"] <= 1e-9, (name, result)
        assert result["loss_rel_err"] <= 1e-12, (name, result)


FIRST = ["embed alone and head alone"]


def test_a_generator_in_stages_equals_one_process(tmp_path: Path) -> None:
    assert_equal(check_together(tmp_path, FIRST))


SCHEDULES = [name for name in CASES if "schedule" in CASES[name].get("parallel", {})]
FROZEN = [name for name in CASES if "frozen" in CASES[name]]
LAYOUTS = [name for name in CASES if name not in (*FIRST, *SCHEDULES, *FROZEN)]


@pytest.mark.parametrize("names", in_campaigns([LAYOUTS, FROZEN, SCHEDULES]), ids=["layouts", "frozen", "schedules"])
def test_every_case_equals_one_process(tmp_path: Path, names: list[str]) -> None:
    results = check_together(tmp_path, names)
    assert_equal(results)
    losses = {name: results[name]["loss_distributed"] for name in names if not CASES[name].keys() & MODELS}
    assert len(losses) > 4
    assert max(losses.values()) - min(losses.values()) <= 1e-12 * max(losses.values())


@pytest.mark.parametrize("planner", in_campaigns(["disttrain", "cornstarch", "megatron_balanced", "auto"]))
def test_plans_of_planners_equal_one_process(tmp_path: Path, planner: str) -> None:
    case = {"num_devices": 4, "parallel": {"planner": planner, "explicit": {}}}
    assert_equal(check_together(tmp_path, [planner], {planner: case}))


SEVERAL: dict[str, dict[str, Any]] = {
    "all on two ranks": {"sounds": True, "num_devices": 5, "ranks": {1: 0, 2: 0, 3: 1, 4: 1}},
    "each in stages or replicas": {
        "sounds": True,
        "explicit": {"audio": {"dp": 2}, "language_model": {"tp": 2}, "image": {"pp": 2}, "voice": {"dp": 2}},
        "num_devices": 9,
        "ranks": {1: 0, 2: 1, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 0},
    },
    "packed, frozen in part": {
        "sounds": True,
        "frozen": {"audio": {"module": False}, "language_model": {"module": False}, "voice": {"module": False}},
        "explicit": {"language_model": {"pp": 2}},
        "parallel": {"packing": True},
        "num_devices": 6,
    },
}
"""Two encoders and two generators, of images and sounds."""


@pytest.mark.parametrize(
    "names", [["all on two ranks"], *in_campaigns([[n for n in SEVERAL if n != "all on two ranks"]])]
)
def test_several_encoders_and_generators_equal_one_process(tmp_path: Path, names: list[str]) -> None:
    assert_equal(check_together(tmp_path, names, SEVERAL))


MODELS = {"generator", "objective", "loss_per", "loss_weight", "null_condition"}
"""Keys that change what is computed."""


LATENTS: dict[str, dict[str, Any]] = {
    "latents": {"latents": True, "ranks": {2: 1}},
    "latents, in stages": {
        "latents": True,
        "explicit": {"image": {"pp": 3, "layers_per_stage": [1, 4, 1]}},
        "num_devices": 5,
    },
    "latents, replicas": {"latents": True, "explicit": {"image": {"dp": 2}}, "num_devices": 4},
}


@pytest.mark.parametrize("names", in_campaigns([list(LATENTS)]))
def test_latents_of_an_autoencoder_equal_one_process(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    results = check_together(tmp_path, names, LATENTS)
    assert_equal(results)
    losses = [result["loss_distributed"] for result in results.values()]
    assert max(losses) - min(losses) <= 1e-12 * max(losses)


PROMPTS: dict[str, dict[str, Any]] = {
    "prompt": {"kinds": ONE_EACH, "queries": None},
    "prompt, language model in 2 stages with cp 2": {
        "kinds": ONE_EACH,
        "queries": None,
        "explicit": {"language_model": {"cp": 2, "pp": 2, "context": {"block_size": 4}}, "image": {"pp": 2}},
        "num_devices": 7,
    },
    "prompt, PixArt, frozen language model": {
        "kinds": ONE_EACH,
        "queries": None,
        "generator": PIXART,
        "frozen": {"language_model": {"module": False}},
        "explicit": {"image": {"pp": 2, "layers_per_stage": [1, 5]}},
        "num_devices": 4,
    },
}
"""Conditions of unequal length."""


@pytest.mark.parametrize("names", in_campaigns([list(PROMPTS)]))
def test_conditions_of_unequal_length_equal_one_process(tmp_path: Path, names: list[str]) -> None:
    assert_equal(check_together(tmp_path, names, PROMPTS))


@pytest.mark.parametrize("dtype", in_campaigns(["float32", "bfloat16"]))
def test_in_fewer_bits(tmp_path: Path, dtype: str) -> None:
    case = {"explicit": {"image": {"pp": 2}}, "num_devices": 4, "train": {"dtype": dtype}}
    (result,) = check_together(tmp_path, [dtype], {dtype: case}).values()
    assert result["failures"] == []
