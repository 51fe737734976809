"""`motet verify` for every family: language models with grouped-query attention, and all encoders.

`PIPELINE`: two stages of at least two layers for each module, two replicas, different samples for each replica and
microbatch, with no, one, two or three images and clips. `GROUPS`: every layer is cut over two ranks, and norms see a
share of the sequence.
"""

from dataclasses import replace

import pytest
from one_process import check, check_together
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch
from tiny_encoders import ENCODERS
from tiny_language_models import SIZES, TINY

from motet.assignment.batch_assignment import contiguous_assignment

FAMILIES = (
    ("llama", "siglip", "whisper"),
    ("llama-tied", "clip", "qwen2_audio"),
    ("qwen3", "dinov2", "whisper"),
    ("mistral", "qwen2_5_vl", "qwen2_audio"),
    ("gemma3", "pixtral", "whisper"),
    ("phi3", "siglip", "qwen2_audio"),
    ("mllama", "clip", "whisper"),
)

PIPELINE = Scenario(encoder_pp=2, llm_pp=2, dp=2, num_microbatches=2, placement="colocated")
GROUPS = Scenario(tp=2, sequence_parallel=True, num_microbatches=2, placement="replicated")


def scenarios(layout: Scenario, dtype: str) -> list[Scenario]:
    return [
        replace(
            layout,
            llm=llm,
            vision=vision,
            audio=audio,
            merge="cross_attention" if llm == "mllama" else "placeholder",
            dtype=dtype,
        )
        for llm, vision, audio in FAMILIES
    ]


def test_no_family_is_left_out() -> None:
    language_models, vision, audio = map(set, zip(*FAMILIES, strict=True))
    assert language_models == set(TINY)
    assert vision | audio == set(ENCODERS)
    assert SIZES["num_key_value_heads"] < SIZES["num_attention_heads"]


def test_stages_have_two_layers_and_microbatches_their_own_samples() -> None:
    for scenario in scenarios(PIPELINE, "float64"):
        config = scenario.config()
        plan = scenario.plan(config)
        assert all(stage.layers[1] - stage.layers[0] >= 2 for *_, stage in plan.stages())
        batch = ScenarioBatch(scenario, config)
        cells = [
            cell
            for replica in contiguous_assignment(plan, batch.samples).microbatches["language_model"]
            for cell in replica
        ]
        assert len(cells) == 4
        contents = [[tuple(batch.features("language_model", i)["input_ids"].tolist()) for i in cell] for cell in cells]
        assert all(contents)
        assert len({sample for cell in contents for sample in cell}) == len(batch.samples)
        for module in ("vision", "audio"):
            assert {0, 1, 3} <= {len(sample.layouts.get(module, ())) for sample in batch.samples}


EVERY, EVEN, ODD, LAST = slice(None), slice(0, None, 2), slice(1, None, 2), slice(-1, None)


@pytest.mark.parametrize(
    ("layout", "dtype", "which"),
    [
        # Families take turns; `make campaigns` has all.
        pytest.param(PIPELINE, "float64", EVEN, id="pipeline-float64"),
        pytest.param(GROUPS, "float64", ODD, id="groups-float64"),
        pytest.param(GROUPS, "bfloat16", LAST, id="groups-bfloat16"),
        pytest.param(PIPELINE, "float64", EVERY, id="all-pipeline-float64", marks=pytest.mark.campaign),
        pytest.param(GROUPS, "float64", EVERY, id="all-groups-float64", marks=pytest.mark.campaign),
        pytest.param(PIPELINE, "float32", EVERY, id="all-pipeline-float32", marks=pytest.mark.campaign),
        pytest.param(PIPELINE, "bfloat16", EVERY, id="all-pipeline-bfloat16", marks=pytest.mark.campaign),
        pytest.param(GROUPS, "float32", EVERY, id="all-groups-float32", marks=pytest.mark.campaign),
        pytest.param(GROUPS, "bfloat16", EVERY, id="all-groups-bfloat16", marks=pytest.mark.campaign),
    ],
)
def test_every_family_equals_plain_transformers(layout: Scenario, dtype: str, which: slice) -> None:
    everyone = scenarios(layout, dtype)[which]
    for scenario, comparison in check_together(everyone).items():
        errors = {module: f"{error:.1e}" for module, error in comparison.max_grad_rel_err_of_module.items()}
        print(scenario.llm, scenario.vision, scenario.audio, f"loss {comparison.loss_rel_err:.1e}", errors)
        assert comparison.num_parameters_compared > 100


@pytest.mark.parametrize("feature_layer", [-2, *in_campaigns([1])])
def test_features_from_before_the_last_block_under_sequence_parallelism(feature_layer: int) -> None:
    """The last block that runs has to gather the sequence, not the last one of the stage."""
    check(replace(GROUPS, vision="clip", placement="parallel", encoder_pp=2, feature_layer=feature_layer))
