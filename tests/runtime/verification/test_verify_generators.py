"""`motet verify` of models that generate: both losses and every gradient against plain transformers and diffusers."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from generator_run import FLUX, ONE_EACH, PIXART, QWEN_IMAGE, SANA, SD3, UNET, planned
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
    "U-Net": {"generator": UNET},
    "U-Net, two replicas, epsilon, recomputed": {
        "generator": UNET,
        "objective": "epsilon",
        "explicit": {"image": {"dp": 2}},
        "parallel": {"recompute": ["image"]},
        "num_devices": 4,
    },
    "U-Net on the language model's ranks, these in 2 stages": {
        "generator": UNET,
        "explicit": {"language_model": {"pp": 2}},
        "num_devices": 4,
        "ranks": {3: 2},
    },
    "unequal microbatches": {"parallel": {"num_microbatches": 3}},
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
    "encoder runs ahead of its projector": {
        "frozen": {"vision": {"module": False}},
        "parallel": {"run_ahead": True},
    },
    "encoder runs ahead, generator alone trained": {"frozen": ALONE, "parallel": {"run_ahead": True}},
    "encoder alone trained": {"frozen": {"language_model": {"module": False}, "image": NOT_TRAINED}},
    **{
        schedule: {
            "explicit": {"image": {"pp": 2}},
            "num_devices": 4,
            "parallel": {"schedule": schedule, "num_microbatches": 4},
        }
        for schedule in (
            "gpipe",
            "eager_1f1b",
            "zero_bubble_h1",
            "zero_bubble_h2",
            "bubble_filling",
            "critical_path",
            "dip",
        )
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


DISTTRAIN_FROZEN: dict[str, dict[str, Any]] = {
    "projectors": {"vision": {"module": False}, "language_model": {"module": False}, "image": {"module": False}},
    "encoder": {"language_model": {"module": False}, "image": {"module": False}},
    "language model": {"vision": {"module": False}, "image": {"module": False}},
    "generator": {"vision": {"module": False}, "language_model": {"module": False}},
}
"""What DistTrain (section 8.3.1) trains in its settings, projectors always."""
CASES |= {
    f"DistTrain's {trained} trained": {
        "frozen": frozen,
        "explicit": {"language_model": {"pp": 2}, "image": {"pp": 2}},
        "num_devices": 5,
    }
    for trained, frozen in DISTTRAIN_FROZEN.items()
}
FLUX_TP: dict[str, Any] = {"generator": FLUX, "explicit": {"image": {"tp": 2}}, "num_devices": 4}
QWEN_TP: dict[str, Any] = {"generator": QWEN_IMAGE, "explicit": {"image": {"tp": 2}}, "num_devices": 4}
PROMPT: dict[str, Any] = {"kinds": ONE_EACH, "queries": None}
TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "Flux": {"generator": FLUX},
    "Qwen-Image": {"generator": QWEN_IMAGE},
    "Flux in 5 stages": {
        "generator": FLUX,
        "explicit": {"image": {"pp": 5, "layers_per_stage": [1, 2, 2, 1, 1]}},
        "num_devices": 7,
    },
    "Flux with tp 2": FLUX_TP,
    "Flux in 2 stages with tp 2": {"generator": FLUX, "explicit": {"image": {"pp": 2, "tp": 2}}, "num_devices": 6},
    "Flux with tp 2, language model in 2 stages": {
        **FLUX_TP,
        "explicit": {"image": {"tp": 2}, "language_model": {"pp": 2}},
        "num_devices": 5,
    },
    "Flux with tp 2, language model with tp 2": {
        **FLUX_TP,
        "explicit": {"image": {"tp": 2}, "language_model": {"tp": 2, "sequence_parallel": True}},
        "num_devices": 5,
    },
    "Flux with tp 2, language model with cp 2": {
        **FLUX_TP,
        "explicit": {"image": {"tp": 2}, "language_model": {"cp": 2, "context": {"block_size": 4}}},
        "num_devices": 5,
    },
    "Flux with tp 2, two replicas beside one": {
        **FLUX_TP,
        "explicit": {"image": {"tp": 2, "dp": 2}},
        "num_devices": 6,
    },
    "Flux with tp 2 on the language model's ranks, which have tp 2": {
        **FLUX_TP,
        "explicit": {"image": {"tp": 2}, "language_model": {"tp": 2}},
        "num_devices": 5,
        "ranks": {3: 1, 4: 2},
    },
    "Flux with tp 2, recomputed": {**FLUX_TP, "parallel": {"recompute": ["image"]}},
    "Flux with tp 2, attention recomputed": {**FLUX_TP, "parallel": {"recompute": ["image:attention"]}},
    "Flux in 2 stages with tp 2, halved backwards": {
        "generator": FLUX,
        "explicit": {"image": {"pp": 2, "tp": 2}},
        "num_devices": 6,
        "parallel": {"schedule": "zero_bubble_h1", "num_microbatches": 4},
    },
    "Flux with tp 2, told guidance": {
        **FLUX_TP,
        "generator": {**FLUX, "values": {**FLUX["values"], "guidance_embeds": True}, "guidance": 3.5},
    },
    "Qwen-Image with tp 2": QWEN_TP,
    "Qwen-Image in 2 stages with tp 2, halved backwards": {
        "generator": QWEN_IMAGE,
        "explicit": {"image": {"pp": 2, "tp": 2}},
        "num_devices": 6,
        "parallel": {"schedule": "zero_bubble_h1", "num_microbatches": 4},
    },
    "Qwen-Image with tp 2, two replicas beside one": {
        **QWEN_TP,
        "explicit": {"image": {"tp": 2, "dp": 2}},
        "num_devices": 6,
    },
    "SD3 with tp 2": {"explicit": {"image": {"tp": 2}}, "num_devices": 4},
    "SD3 with norms and tp 2": {
        "generator": {**SD3, "values": {**SD3["values"], "qk_norm": "rms_norm"}},
        "explicit": {"image": {"tp": 2}},
        "num_devices": 4,
    },
    "PixArt with tp 2 in 2 stages": {
        "generator": PIXART,
        "explicit": {"image": {"tp": 2, "pp": 2}},
        "num_devices": 6,
    },
    **{
        f"Flux with tp 2, DistTrain's {trained} trained": {**FLUX_TP, "frozen": frozen}
        for trained, frozen in DISTTRAIN_FROZEN.items()
    },
}
"""Flux and Qwen-Image, and generators that are cut."""
CASES |= TENSOR_PARALLEL


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


def assert_alike(results: dict[str, Any], cases: dict[str, dict[str, Any]]) -> list[int]:
    """Checks that the loss is the same number in all cases that compute the same; returns how many each has."""
    losses = defaultdict(list)
    for name, result in results.items():
        computed = {key: value for key, value in sorted(cases[name].items()) if key in MODELS}
        losses[repr(computed)].append(result["loss_distributed"])
    for alike in losses.values():
        assert max(alike) - min(alike) <= 1e-12 * max(alike)
    return [len(alike) for alike in losses.values()]


FIRST = ["embed alone and head alone", "Flux in 2 stages with tp 2"]


def test_an_encoder_runs_ahead_beside_a_generator(tmp_path: Path) -> None:
    results = check_together(tmp_path, [name for name in CASES if "runs ahead" in name])
    assert_equal(results)
    assert len(results) == 2


def test_a_generator_in_stages_equals_one_process(tmp_path: Path) -> None:
    assert_equal(check_together(tmp_path, FIRST))


SCHEDULES = [name for name in CASES if "schedule" in CASES[name].get("parallel", {}) and name not in TENSOR_PARALLEL]
FROZEN = [name for name in CASES if "frozen" in CASES[name] and name not in TENSOR_PARALLEL]
LAYOUTS = [name for name in CASES if name not in (*FIRST, *SCHEDULES, *FROZEN, *TENSOR_PARALLEL)]


@pytest.mark.parametrize(
    "names",
    in_campaigns([LAYOUTS, FROZEN, SCHEDULES, list(TENSOR_PARALLEL)]),
    ids=["layouts", "frozen", "schedules", "tensor parallel"],
)
def test_every_case_equals_one_process(tmp_path: Path, names: list[str]) -> None:
    results = check_together(tmp_path, names)
    assert_equal(results)
    assert max(assert_alike(results, CASES)) > 4


CUT: dict[str, Any] = {"modules": {"image": {"tp": [2]}}}


@pytest.mark.parametrize(
    ("planner", "limits"),
    in_campaigns(
        [
            *((planner, {}) for planner in ("disttrain", "cornstarch", "megatron_balanced", "auto")),
            *((planner, CUT) for planner in ("disttrain", "cornstarch", "auto")),
            ("megatron_balanced", {"tp": [2]}),  # It cuts all modules alike.
        ]
    ),
)
def test_plans_of_planners_equal_one_process(tmp_path: Path, planner: str, limits: dict[str, Any]) -> None:
    case = {"num_devices": 4, "parallel": {"planner": planner, "explicit": {}, "limits": limits}}
    if limits:
        case["generator"] = FLUX
        _, plan = planned(tmp_path, case)
        assert {stage.tp_size for r in plan.modules["image"].replicas for stage in r.stages} == {2}
    assert_equal(check_together(tmp_path, [planner], {planner: case}))


SEVERAL: dict[str, dict[str, Any]] = {
    "all on two ranks": {"generator": UNET, "sounds": True, "num_devices": 5, "ranks": {1: 0, 2: 0, 3: 1, 4: 1}},
    "each in stages or replicas": {
        "sounds": True,
        "explicit": {"audio": {"dp": 2}, "language_model": {"tp": 2}, "image": {"pp": 2}, "voice": {"dp": 2}},
        "num_devices": 9,
        "ranks": {1: 0, 2: 1, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 0},
    },
    "both generators with tp 2": {
        "generator": FLUX,
        "sounds": True,
        "explicit": {"image": {"tp": 2}, "voice": {"tp": 2}},
        "num_devices": 7,
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


MODELS = {"generator", "objective", "loss_per", "loss_weight", "null_condition", "queries", "kinds"}
"""Keys that change what is computed."""


SOUNDS_AS_CODES: dict[str, dict[str, Any]] = {
    "codes beside images": {"sounds": True, "codes": {}, "num_devices": 5, "ranks": {1: 0, 2: 0, 3: 1, 4: 1}},
    "codes, apart": {"sounds": True, "codes": {}, "num_devices": 5},
    "codes, two replicas": {
        "sounds": True,
        "codes": {},
        "explicit": {"voice": {"dp": 2}, "language_model": {"pp": 2}},
        "num_devices": 7,
        "ranks": {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 0},
    },
    "codes of DAC, per place, recomputed": {
        "sounds": True,
        "codes": {"codec": "dac", "loss_per": "place", "projector": "linear"},
        "parallel": {"recompute": ["voice"]},
        "num_devices": 5,
        "ranks": {1: 0, 2: 0, 3: 1, 4: 1},
    },
    "codes, halved backwards": {
        "sounds": True,
        "codes": {},
        "num_devices": 5,
        "ranks": {1: 0, 2: 0, 3: 1, 4: 2},
        "parallel": {"schedule": "zero_bubble_h1", "num_microbatches": 4},
    },
    **{
        f"codes, {trained} trained": {"sounds": True, "codes": {}, "frozen": frozen, "num_devices": 5}
        for trained, frozen in {
            "decoder alone": {
                **ALONE,
                "audio": {"module": False, "projector": False},
                "image": NOT_TRAINED,
                "voice": {"projector": False, "queries": False},
            },
            "queries and connector": {
                **ALONE,
                "audio": {"module": False, "projector": False},
                "image": NOT_TRAINED,
                "voice": {"module": False},
            },
            "language model": {"image": NOT_TRAINED, "voice": NOT_TRAINED},
        }.items()
    },
}
"""The generator of sounds predicts codes; of the samples some have sounds to make, some one, some two, some none."""


@pytest.mark.parametrize(
    "names",
    [
        ["codes beside images", "codes of DAC, per place, recomputed"],
        *in_campaigns([[name for name in SOUNDS_AS_CODES if name != "codes beside images"]]),
    ],
    ids=lambda names: f"{len(names)} cases",
)
def test_sounds_as_codes_equal_one_process(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    results = check_together(tmp_path, names, SOUNDS_AS_CODES)
    assert_equal(results)


LATENTS: dict[str, dict[str, Any]] = {
    "latents": {"latents": True, "ranks": {2: 1}},
    "latents, in stages": {
        "latents": True,
        "explicit": {"image": {"pp": 3, "layers_per_stage": [1, 4, 1]}},
        "num_devices": 5,
    },
    "latents, replicas": {"latents": True, "explicit": {"image": {"dp": 2}}, "num_devices": 4},
    "latents, Flux with tp 2": {**FLUX_TP, "latents": True},
    "latents, U-Net": {"generator": UNET, "latents": True},
}


@pytest.mark.parametrize("names", in_campaigns([list(LATENTS)]))
def test_latents_of_an_autoencoder_equal_one_process(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    results = check_together(tmp_path, names, LATENTS)
    assert_equal(results)
    assert max(assert_alike(results, LATENTS)) > 2


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
    "Qwen-Image with tp 2 reads the prompt": {**QWEN_TP, **PROMPT},
    "Qwen-Image with tp 2 reads the prompt, language model in 2 stages": {
        **QWEN_TP,
        **PROMPT,
        "explicit": {"image": {"tp": 2}, "language_model": {"pp": 2}},
        "num_devices": 5,
    },
    "Qwen-Image with tp 2 reads the prompt, language model with tp 2": {
        **QWEN_TP,
        **PROMPT,
        "explicit": {"image": {"tp": 2}, "language_model": {"tp": 2}},
        "num_devices": 5,
    },
    "Qwen-Image with tp 2 reads the prompt, language model with cp 2": {
        **QWEN_TP,
        **PROMPT,
        "explicit": {"image": {"tp": 2}, "language_model": {"cp": 2, "context": {"block_size": 4}}},
        "num_devices": 5,
    },
}
"""Conditions of unequal length."""


@pytest.mark.parametrize("names", in_campaigns([list(PROMPTS)]))
def test_conditions_of_unequal_length_equal_one_process(tmp_path: Path, names: list[str]) -> None:
    results = check_together(tmp_path, names, PROMPTS)
    assert_equal(results)
    assert_alike(results, PROMPTS)


@pytest.mark.parametrize(
    "case",
    [{"explicit": {"image": {"pp": 2}}, "num_devices": 4}, FLUX_TP, QWEN_TP, {"generator": UNET}],
    ids=["SD3", "Flux", "Qwen-Image", "U-Net"],
)
@pytest.mark.parametrize("dtype", in_campaigns(["float32", "bfloat16"]))
def test_in_fewer_bits(tmp_path: Path, dtype: str, case: dict[str, Any]) -> None:
    (result,) = check_together(tmp_path, [dtype], {dtype: {**case, "train": {"dtype": dtype}}}).values()
    assert result["failures"] == []
