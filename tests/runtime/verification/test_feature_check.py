"""A training is refused before its processes start where its model was not shown equal."""

import json

import pytest
from composite_run import composite_run

from motet.api import make_plan
from motet.config import RunConfig
from motet.errors import UserError
from motet.families.capabilities import Capabilities
from motet.runtime.verification import feature_check
from motet.runtime.verification.feature_check import check_features

REASONS = {"pipeline": None, "tensor and pipeline": "gradients differ from one process by 1.0e+00 (a)"}


def known(reasons, asked):
    def find(config, features):
        asked.append(sorted(features))
        return Capabilities(model_type=config.model_type, model_class="", reasons=reasons)

    return find


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_of_several_modalities(tp, tmp_path, monkeypatch):
    config = RunConfig.model_validate_json(json.dumps(composite_run(tmp_path, "gemma3", pp=2, tp=tp)))
    plan = make_plan(config).plan
    asked = []
    monkeypatch.setattr(feature_check, "composite_capabilities", known(REASONS, asked))

    if tp == 1:
        check_features(config, plan)
    else:
        with pytest.raises(
            UserError,
            match=r"tensor parallelism of the language model is not supported for gemma3: .*; use tp 1",
        ):
            check_features(config, plan)
    assert asked == [["pipeline", "tensor and pipeline"][:tp]]


def test_one_that_is_not_equal_at_all(tmp_path, monkeypatch):
    config = RunConfig.model_validate_json(json.dumps(composite_run(tmp_path, "gemma3")))
    monkeypatch.setattr(feature_check, "composite_capabilities", known({"pipeline": "its blocks differ"}, []))

    with pytest.raises(UserError, match="not supported for gemma3: its blocks differ; give a model of another family"):
        check_features(config, make_plan(config).plan)
