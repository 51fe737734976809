"""Models of several modalities over processes, against the model's own forward in one."""

import json

import pytest
from composite_run import composite_config, composite_run
from tiny_composites import COMPOSITES

from motet.api import make_plan, profile, verify
from motet.cli.main import main
from motet.config import RunConfig
from motet.errors import UserError

FROZEN = {"vision": {"train": {"module": False}}}
CASES = {
    # Further outputs enter between the first blocks, on both stages; the tower is frozen, its projector is not.
    "qwen3_vl": {"pp": 2, "parts": FROZEN},
    # Embedding and head are tied and cut over ranks.
    "gemma3": {"pp": 2, "tp": 2},
}


def check(name, folder, **options):
    found = verify(composite_config(folder, name, **options))

    assert found["max_grad_rel_err"] < 1e-9
    assert found["loss_rel_err"] < 1e-9
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name, tmp_path):
    found = check(name, tmp_path, **CASES[name])

    assert found["num_parameters_compared"] > 40


def test_a_frozen_encoder_runs_ahead(tmp_path):
    """Its further outputs are kept with the others, and enter both stages of the language model."""
    values = composite_run(
        tmp_path, "qwen3_vl", pp=2, parts={"vision": {"train": {"module": False, "projector": False}}}
    )
    values["parallel"]["run_ahead"] = True
    found = verify(RunConfig.model_validate_json(json.dumps(values)))

    assert found["passed"], found["failures"]
    assert found["max_grad_rel_err"] < 1e-9


def test_an_encoder_that_cannot_be_cut_does_not_run_ahead_of_its_projector(tmp_path):
    values = composite_run(tmp_path, "qwen3_vl", parts=FROZEN)
    values["parallel"]["run_ahead"] = True

    with pytest.raises(UserError, match=r"^parallel\.run_ahead: "):
        make_plan(RunConfig.model_validate_json(json.dumps(values)))


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMPOSITES)
def test_all_of_them_over_stages_and_tensor_parallel_ranks(name, tmp_path):
    check(name, tmp_path, pp=2, tp=2)


@pytest.mark.campaign
@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16(name, tmp_path):
    assert verify(composite_config(tmp_path, name, **CASES[name], dtype="bfloat16"))["failures"] == []


REFUSED = {
    "parallel.packing": ({"parallel": {"packing": True}}, r"parallel\.packing: packing is not supported"),
    "an encoder in stages": (
        {"parallel": {"explicit": {"vision": {"pp": 2}, "language_model": {}}}, "cluster": {"num_devices": 3}},
        r"vision\.pp is 2, but gemma3\.vision can be cut into 1",
    ),
    "context parallelism": (
        {"parallel": {"explicit": {"vision": {}, "language_model": {"cp": 2}}}, "cluster": {"num_devices": 3}},
        "context parallelism is not supported",
    ),
    "an encoder over tensor-parallel ranks": (
        {"parallel": {"explicit": {"vision": {"tp": 2}, "language_model": {}}}, "cluster": {"num_devices": 3}},
        r"gemma3\.vision has no rules for tensor parallelism",
    ),
    "a part that is not there": ({"model": {"parts": {"audio": {}}}}, r"model\.parts\.audio: the model has no such"),
    "encoders beside it": ({"model": {"merge": "prepend"}}, "merge: cannot be combined with path"),
    "nothing to train": (
        {
            "model": {
                "parts": {
                    "vision": {"train": {"module": False, "projector": False}},
                    "language_model": {"train": {"module": False}},
                }
            }
        },
        r"model\.parts: nothing is trainable",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(case, tmp_path):
    changes, message = REFUSED[case]
    values = composite_run(tmp_path, "gemma3")
    for section, keys in changes.items():
        values[section] |= keys

    with pytest.raises(ValueError, match=message):
        make_plan(RunConfig.model_validate_json(json.dumps(values)))


def test_its_data_are_described_and_its_plan_simulated_but_it_is_not_profiled(tmp_path, capsys):
    values = composite_run(tmp_path, "gemma3", pp=2)
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(values))

    assert main(["data-stats", str(run)]) == 0
    assert "vision                  75.0%" in capsys.readouterr().out
    assert main(["simulate", str(run)]) == 0
    assert "language_model" in capsys.readouterr().out
    with pytest.raises(UserError, match="a whole model's encoder run together and cannot be profiled one by one"):
        profile(run)


def test_a_model_of_text_alone_is_no_whole_model(tmp_path):
    values = composite_run(tmp_path, "gemma3")
    values["model"] = {"config": "LlamaConfig", "values": {"hidden_size": 16, "num_attention_heads": 2}}

    with pytest.raises(UserError, match="llama is not a multimodal model"):
        make_plan(RunConfig.model_validate_json(json.dumps(values)))
