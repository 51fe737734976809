"""The fit of constants to published rows: what is judged was not fitted to, and a known constant is found again."""

from collections import Counter
from dataclasses import replace

import pytest

from motet.cluster import DEVICES
from motet.costs.software import SOFTWARE
from papers.throughput.calibration import (
    CONSTANTS,
    cross_validate,
    fit,
    linearize,
    predict_with,
    released,
)
from papers.throughput.published import Measurement, measurements

NAMES = (
    *("foundry-13b-s2048-8xa100-80-bf16", "foundry-13b-s8192-8xa100-80-bf16", "foundry-1b-s2048-8xh100-bf16"),
    *("foundry-1b-s16384-8xh100-bf16", "titan-a100-l2-13B-no", "titan-a100-l2-13B-selL", "korthikanti-22B-full"),
)


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    by_id = {row.id: row for row in measurements()}
    return [by_id[name] for name in NAMES]


@pytest.mark.parametrize("key", ["group", "source"])
def test_no_row_is_both_fitted_to_and_held_out(rows: list[Measurement], key: str) -> None:
    found = cross_validate(linearize(rows, released()), lambda row: getattr(row, key))
    assert Counter(each.prediction.row.id for each in found) == Counter(NAMES)
    of_id = {row.id: row for row in rows}
    for each in found:
        assert each.prediction.row.id in each.fold.held_out
        assert not set(each.fold.held_out) & set(each.fold.fitted_on)
        assert sorted((*each.fold.held_out, *each.fold.fitted_on)) == sorted(NAMES)
        keys = {getattr(of_id[name], key) for name in each.fold.held_out}
        assert keys == {getattr(each.prediction.row, key)}
        assert not keys & {getattr(of_id[name], key) for name in each.fold.fitted_on}


def test_the_fit_finds_the_constants_that_made_the_times(rows: list[Measurement]) -> None:
    true = {**released(), "a100.gemm": 0.7, "h100.flash1": 0.15}
    made = [replace(row, measured_step_s=predict_with(row, true).seconds) for row in rows]
    start = {**released(), "a100.gemm": 0.85, "h100.flash1": 0.2}
    found = fit(made, start, rounds=2)
    # Seven rows do not outweigh the priors.
    assert found["a100.gemm"] == pytest.approx(0.7, rel=0.1)
    assert found["h100.flash1"] == pytest.approx(0.15, rel=0.1)
    before, after = (max(abs(predict_with(row, c).error) for row in made) for c in (start, found))
    assert after < 0.08 < before


def test_a_constant_enters_the_rows_that_it_applies_to_and_no_other(rows: list[Measurement]) -> None:
    at = released()
    for constant in CONSTANTS:
        other = {**at, constant.name: 0.8 * at[constant.name]}
        for row in rows:
            changed = predict_with(row, other).seconds != predict_with(row, at).seconds
            assert changed <= constant.applies(row), (constant.name, row.id)
            if constant.name.endswith((".gemm", ".memory_traffic", "score_bytes")):
                assert changed == constant.applies(row), (constant.name, row.id)


def test_devices_of_a_generation_share_their_efficiencies() -> None:
    for names in (("a100-40", "a100-80", "a800"), ("h100", "h800", "h200")):
        shared = {
            (DEVICES[n].efficiency, DEVICES[n].convolution_efficiency, tuple(DEVICES[n].attention_efficiency.items()))
            for n in names
        }
        assert len(shared) == 1
        assert all(DEVICES[n].efficiency_source != "assumed" for n in names)


def test_every_profile_has_a_source_and_the_default_is_ours() -> None:
    assert all(profile.source for profile in SOFTWARE.values())
    assert {row.software for row in measurements()} | {"motet", "unfused_attention"} == set(SOFTWARE)
