"""What counts as an error, on made-up gradients: two modules of a weight and a key bias each."""

import json
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from motet.runtime.verification.comparison import (
    FLOOR,
    ROUNDING_MULTIPLE,
    TOLERANCES,
    Comparison,
    LossAndGradients,
    References,
    compare,
)
from motet.runtime.verification.verify import take_gradients

Gradients = dict[str, Tensor]


def draw(seed: int, size: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(size, generator=generator, dtype=torch.float64)


def exact_gradients() -> Gradients:
    """The bias of vision is zero by mathematics, that of the language model is not."""
    return {
        "vision.module.weight": draw(0, 1000),
        "vision.module.k_proj.bias": draw(1, 10, 1e-17),
        "language_model.module.weight": draw(2, 1000, 1e-2),
        "language_model.module.bias": draw(3, 10, 1e-2),
    }


def with_rounding(gradients: Mapping[str, Tensor], relative: float, seed: int, zero: float) -> Gradients:
    """`relative`: of each gradient; `zero`: norm of the rounding where the gradient is zero by mathematics."""
    rounded = {}
    for i, (name, gradient) in enumerate(gradients.items()):
        noise = draw(seed + i, gradient.numel())
        norm = zero if name.endswith("k_proj.bias") else relative * gradient.norm()
        rounded[name] = gradient + noise / noise.norm() * norm
    return rounded


FLOOR_OF_ZERO = FLOOR * math.sqrt(1000 / 1010 * 10)
"""Of the bias that is zero by mathematics, nearly: the weight beside it has unit RMS."""

ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}
ZERO_NORM = {"float32": 1e-4 * FLOOR_OF_ZERO, "bfloat16": 2 * FLOOR_OF_ZERO}


def compared(ours: Mapping[str, Tensor], dtype: str = "float64", loss: float = 2.0) -> Comparison:
    exact = LossAndGradients(2.0, exact_gradients())
    if dtype == "float64":
        references = References(exact, exact)
    else:
        rounded = with_rounding(exact.gradients, ROUNDING[dtype], seed=10, zero=ZERO_NORM[dtype])
        references = References(LossAndGradients(2.0, rounded), exact)
    return compare(loss, {name: [g] for name, g in ours.items()}, references, dtype=dtype, world_size=4)


def rounded_like_plain(dtype: str) -> Gradients:
    if dtype == "float64":
        return exact_gradients()
    return with_rounding(exact_gradients(), ROUNDING[dtype], seed=50, zero=ZERO_NORM[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rounding_as_plain_transformers_rounds_passes(dtype: str) -> None:
    comparison = compared(rounded_like_plain(dtype), dtype)
    assert comparison.passed
    assert comparison.failures == []
    assert comparison.num_parameters_compared == 4
    assert comparison.max_grad_rel_err <= comparison.tolerance == TOLERANCES[dtype]


def test_what_is_zero_by_mathematics_is_reported_with_its_figures() -> None:
    comparison = compared(rounded_like_plain("float32"), "float32")
    assert comparison.floored_parameters == ["vision.module.k_proj.bias"]
    (zero,) = comparison.zero_by_mathematics
    assert zero.parameter == "vision.module.k_proj.bias"
    assert zero.distributed_norm == pytest.approx(ZERO_NORM["float32"], rel=1e-9)
    assert zero.plain_norm == pytest.approx(ZERO_NORM["float32"], rel=1e-9)
    assert zero.exact_norm < 1e-15
    assert zero.floor == pytest.approx(FLOOR_OF_ZERO, rel=0.05)
    assert comparison.worst_raw_parameter == zero.parameter
    assert comparison.max_raw_grad_rel_err > 1e-5 > comparison.max_grad_rel_err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_what_is_zero_by_mathematics_only_rounding_is_forgiven(dtype: str) -> None:
    ours = rounded_like_plain(dtype)
    ours["vision.module.k_proj.bias"] *= 2 * ROUNDING_MULTIPLE
    comparison = compared(ours, dtype)
    assert not comparison.passed
    assert comparison.worst_parameter == "vision.module.k_proj.bias"
    beyond = ROUNDING_MULTIPLE * ZERO_NORM[dtype] / comparison.zero_by_mathematics[0].floor
    assert comparison.max_grad_rel_err == pytest.approx(beyond, rel=1e-6)


def test_in_float32_nothing_is_forgiven_elsewhere() -> None:
    """Twice the tolerance on one parameter, however much plain float32 itself rounds there."""
    ours = rounded_like_plain("float32")
    ours["language_model.module.bias"] *= 1 + 2e-5
    comparison = compared(ours, "float32")
    assert not comparison.passed
    assert comparison.max_grad_rel_err == pytest.approx(2e-5, rel=0.2)
    assert comparison.max_grad_rel_err_of_module["vision"] <= 1e-5


@pytest.mark.parametrize(("factor", "may_be_rounding"), [(1 + 2e-5, True), (1 + 1e-4, False)])
def test_what_plain_float32_rounds_as_much_fails_with_a_hint(factor: float, may_be_rounding: bool) -> None:
    exact = LossAndGradients(2.0, exact_gradients())
    plain = LossAndGradients(2.0, with_rounding(exact.gradients, 1e-5, seed=10, zero=ZERO_NORM["float32"]))
    ours = {name: [g] for name, g in plain.gradients.items()}
    ours["language_model.module.bias"] = [plain.gradients["language_model.module.bias"] * factor]
    comparison = compare(2.0, ours, References(plain, exact), dtype="float32", world_size=4)
    assert not comparison.passed
    assert any("--dtype float64 tells" in failure for failure in comparison.failures) == may_be_rounding
    assert "language_model.module.bias has a relative error of" in comparison.failures[0]


def test_in_bfloat16_a_few_times_the_rounding_is_an_error() -> None:
    for factor, passes in ((1 + 2 * ROUNDING["bfloat16"], True), (1 + 8 * ROUNDING["bfloat16"], False)):
        ours = rounded_like_plain("bfloat16")
        ours["language_model.module.weight"] *= factor
        assert compared(ours, "bfloat16").passed is passes, factor


def test_a_tiny_gradient_that_is_not_zero_by_mathematics_is_measured_in_full() -> None:
    """The language model's gradients are a hundred times smaller than vision's: each module has its own floor."""
    ours = exact_gradients()
    ours["language_model.module.bias"] *= 1 + 1e-6
    comparison = compared(ours)
    assert comparison.max_grad_rel_err == pytest.approx(1e-6, rel=1e-3)
    assert comparison.worst_parameter == "language_model.module.bias"


def test_every_version_that_a_rank_holds_counts() -> None:
    exact = LossAndGradients(2.0, exact_gradients())
    versions = {name: [gradient] for name, gradient in exact_gradients().items()}
    versions["vision.module.weight"].append(1.5 * exact.gradients["vision.module.weight"])
    comparison = compare(2.0, versions, References(exact, exact), dtype="float64", world_size=2)
    assert comparison.max_grad_rel_err == pytest.approx(0.5)
    versions["vision.module.weight"][1] = torch.zeros(1000, dtype=torch.float64)
    comparison = compare(2.0, versions, References(exact, exact), dtype="float64", world_size=2)
    assert "vision.module.weight has a gradient of zeros, the reference has not" in comparison.failures


def test_missing_gradients_fail_on_either_side() -> None:
    ours = exact_gradients()
    del ours["vision.module.weight"]
    ours["vision.module.other"] = draw(5, 3)
    comparison = compared(ours)
    assert not comparison.passed
    assert "vision.module.weight has no gradient in the distributed run" in comparison.failures
    assert "vision.module.other has no gradient in the reference" in comparison.failures
    assert comparison.num_parameters_compared == 3


def test_zeros_fail_even_below_the_floor() -> None:
    ours = rounded_like_plain("float32")
    ours["vision.module.k_proj.bias"] = torch.zeros(10)
    comparison = compared(ours, "float32")
    assert comparison.failures == ["vision.module.k_proj.bias has a gradient of zeros, the reference has not"]


def test_nothing_compared_fails() -> None:
    nothing = LossAndGradients(2.0, {})
    comparison = compare(2.0, {}, References(nothing, nothing), dtype="float64", world_size=1)
    assert not comparison.passed
    assert comparison.num_parameters_compared == 0
    assert json.loads(json.dumps(comparison.to_json()))["max_grad_rel_err"] is None


def test_gradients_of_zeros_on_both_sides_show_nothing() -> None:
    zeros = LossAndGradients(2.0, {"vision.module.weight": torch.zeros(3)})
    comparison = compare(
        2.0, {"vision.module.weight": [torch.zeros(3)]}, References(zeros, zeros), dtype="float32", world_size=1
    )
    assert not comparison.passed
    assert comparison.unreached_parameters == ["vision.module.weight"]


def test_a_gradient_where_the_reference_has_exactly_none_is_an_error() -> None:
    exact = LossAndGradients(
        2.0, {"vision.module.weight": torch.zeros(3), "language_model.module.weight": torch.ones(3)}
    )
    ours = {"vision.module.weight": [torch.tensor([0.0, 1e-30, 0.0])], "language_model.module.weight": [torch.ones(3)]}
    comparison = compare(2.0, ours, References(exact, exact), dtype="float32", world_size=1)
    assert not comparison.passed
    assert comparison.worst_parameter == "vision.module.weight"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_fails(dtype: str, value: float) -> None:
    ours = rounded_like_plain(dtype)
    ours["language_model.module.bias"][3] = value
    comparison = compared(ours, dtype)
    assert not comparison.passed
    assert comparison.worst_parameter == "language_model.module.bias"
    assert not compared(rounded_like_plain(dtype), dtype, loss=value).passed


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_loss_counts(dtype: str) -> None:
    assert compared(rounded_like_plain(dtype), dtype, loss=2.0 * (1 + 0.9 * TOLERANCES[dtype])).passed
    comparison = compared(rounded_like_plain(dtype), dtype, loss=2.0 * (1 + 1.1 * TOLERANCES[dtype]))
    assert not comparison.passed
    assert "the loss" in comparison.failures[0]


def test_a_tied_parameter_has_the_name_that_the_ranks_give_it():
    module = nn.Module()
    module.head, module.words = nn.Linear(2, 2, bias=False), nn.Embedding(2, 2)
    module.words.weight = module.head.weight
    for names, expected in (({"m.words.weight"}, "m.words.weight"), (set(), "m.head.weight")):
        module.head(module.words(torch.tensor([1]))).sum().backward()
        assert list(take_gradients({"m": module}, names)[0]) == [expected]
