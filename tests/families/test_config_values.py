"""Values of configurations that run files give."""

import pytest
from transformers import Gemma3nTextConfig, GraniteSWAConfig, KimiLinearConfig, MiniCPM3Config

from motet.errors import UserError
from motet.families.config_values import check_values


def test_a_setting_by_layer_is_checked_layer_by_layer() -> None:
    check_values(GraniteSWAConfig, {"layer_rope_theta": [10_000.0, 500.0]})

    with pytest.raises(UserError, match=r"^\.values\.layer_rope_theta\.1: is 0\.0; give a number above 0$"):
        check_values(GraniteSWAConfig, {"layer_rope_theta": [10_000.0, 0.0]})
    check_values(Gemma3nTextConfig, {"intermediate_size": [96, 96, 48, 96]})
    with pytest.raises(UserError, match=r"intermediate_size: is \[96, 0\]; give a whole number of at least 1"):
        check_values(Gemma3nTextConfig, {"intermediate_size": [96, 0]})


def test_a_multiplier_need_not_be_whole() -> None:
    assert isinstance(MiniCPM3Config().scale_emb, int)
    check_values(MiniCPM3Config, {"scale_emb": 1.7})
    with pytest.raises(UserError, match="scale_emb"):
        check_values(MiniCPM3Config, {"scale_emb": 0.0})


def test_a_setting_has_the_names_of_both_sides_of_an_attribute_map() -> None:
    assert KimiLinearConfig.attribute_map["n_shared_experts"] == "num_shared_experts"
    for name in KimiLinearConfig.attribute_map.items():
        for key in name:
            check_values(KimiLinearConfig, {key: 1})
