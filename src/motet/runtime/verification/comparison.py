"""Compares gradients with a reference: rounding is allowed for, and nothing else.

The error of a parameter is |g - ref| / max(|ref|, floor), floor = 1e-3 x (RMS gradient per element of its module) x
sqrt(number of elements): some gradients are zero by mathematics (key biases without rotary positions), and only their
rounding is left of them. Parameters below the floor are listed.

How much rounding there is, plain transformers says, run on the same batch in the run's own dtype and in float64:

* float64: nothing is forgiven.
* float32: the reference is plain float32. Where float64 shows that the gradient is zero by mathematics, an error counts
  beyond `ROUNDING_MULTIPLE` x the rounding of plain float32. Nothing is forgiven elsewhere; where plain float32 rounds
  as much, a failure says so.
* bfloat16: the reference is plain float64. An error counts beyond `ROUNDING_MULTIPLE` x that of plain bfloat16, of the
  parameter itself or, relatively, of half of its module's parameters: the larger one.

docs/decisions/verification.md has the reasons.
"""

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet.runtime.verification.routing import Flips

FLOOR = 1e-3
ROUNDING_MULTIPLE = 4.0
ZERO_BY_MATHEMATICS = 1e-6
"""Share of the floor below which a float64 gradient is zero by mathematics: its float32 value is all rounding."""

TOLERANCES = {"float32": 1e-5, "float64": 1e-9, "bfloat16": 2.0**-8}
"""Tolerances of loss and gradients by `train.dtype`, beyond the rounding that is forgiven. bfloat16 rounds by 2^-9 at
most, twice."""


FLIPS = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 0.2}
"""How far from a tie, relative to the spread of a token's scores, rounding may send it to another expert."""


@dataclass(frozen=True)
class LossAndGradients:
    loss: float
    gradients: Mapping[str, Tensor]
    """Whole gradients by parameter name."""
    unreached: Set[str] = frozenset()
    """Parameters that have no gradient because no sample reaches them; zeros stand in `gradients`."""
    flips: Flips = field(default_factory=Flips)
    """Of mixtures of experts: where it would have chosen other experts than the run."""


@dataclass(frozen=True)
class References:
    """The plain model on the batch."""

    plain: LossAndGradients
    """Plain transformers in the run's own dtype."""
    exact: LossAndGradients
    """Plain transformers in float64; the same object as `plain` for a run in float64."""

    def of_runs_in(self, dtype: str) -> LossAndGradients:
        """The reference that such a run is compared with."""
        return self.exact if dtype == "bfloat16" else self.plain


@dataclass(frozen=True)
class ZeroGradient:
    """A parameter whose gradient is zero by mathematics: all of it is rounding."""

    parameter: str
    distributed_norm: float
    plain_norm: float
    """Loss of plain transformers in the run's dtype."""
    exact_norm: float
    """Loss of plain transformers in float64."""
    floor: float
    """The norm that the error is relative to."""


@dataclass(frozen=True)
class Comparison:
    """The result of `motet verify`. The errors mean nothing unless `passed` is true."""

    passed: bool
    dtype: str
    tolerance: float
    loss_reference: float
    loss_distributed: float
    loss_rel_err: float
    max_grad_rel_err: float
    """Beyond the rounding that is forgiven; infinite if no parameter was compared."""
    worst_parameter: str
    max_grad_rel_err_of_module: dict[str, float]
    max_raw_grad_rel_err: float
    """Largest error without any forgiven rounding."""
    worst_raw_parameter: str
    num_parameters_compared: int
    floored_parameters: list[str]
    """Their error is relative to the floor, not to their own gradient."""
    zero_by_mathematics: list[ZeroGradient]
    """Floored parameters whose gradient is all rounding; empty in float64."""
    unreached_parameters: list[str]
    """No sample of the batch reaches them: they have no gradient, or one of zeros, in the reference and in the run."""
    failures: list[str]
    """Messages: parameters without gradient, with zeros where the reference has none, errors beyond the tolerance."""
    world_size: int
    num_routed_tokens: int = 0
    """Tokens of mixtures of experts, counted once for each mixture; the reference takes over the run's choices."""
    num_flipped_tokens: int = 0
    """Those for which the reference alone would have chosen other experts."""
    worst_flip: float = 0.0
    """How far from a tie, relative to the spread of a token's scores, the worst of these was."""

    def to_json(self) -> dict[str, object]:
        """Numbers that are infinite or none at all become null: JSON has no words for them."""
        return {key: _json(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class _Errors:
    """The error of one parameter."""

    raw: float
    counted: float


def compare(
    loss: float,
    gradients: Mapping[str, Sequence[Tensor]],
    references: References,
    *,
    dtype: str,
    world_size: int,
) -> Comparison:
    """Every trainable parameter of either side against the other.

    Args:
        gradients: by parameter name, whole: every version of it that ranks hold; the worst counts.
        dtype: key of `TOLERANCES`.
    """
    reference = references.of_runs_in(dtype)
    floors = _floors(reference.gradients)
    zero = _zero_by_mathematics(references, floors) if dtype != "float64" else set()
    errors, failures = _compare_parameters(gradients, references, dtype, floors, zero)
    unreached = [name for name in errors if not reference.gradients[name].any()]
    failures += _nothing_compared(errors, unreached)
    loss_error = _relative(abs(loss - reference.loss), abs(reference.loss))
    tolerance = TOLERANCES[dtype]
    failures += _beyond_tolerance(loss_error, errors, tolerance)
    flips = reference.flips
    if not flips.worst <= FLIPS[dtype]:
        failures.append(
            f"{flips.num_flipped} of {flips.num_routed} tokens of mixtures were sent to other experts than in the "
            f"reference, one {flips.worst:.1e} of its scores' spread from a tie; rounding explains {FLIPS[dtype]:.0e}"
        )
    if dtype == "float32" and _may_be_rounding(loss_error, errors, references, floors):
        failures.append(
            "float32: plain transformers is as far from itself in float64, or nearly, in each of these; "
            "--dtype float64 tells whether it is rounding"
        )
    worst = max(errors, key=lambda name: (errors[name].counted, errors[name].raw), default="")
    worst_raw = max(errors, key=lambda name: errors[name].raw, default="")
    return Comparison(
        passed=not failures,
        dtype=dtype,
        tolerance=tolerance,
        loss_reference=reference.loss,
        loss_distributed=loss,
        loss_rel_err=loss_error,
        max_grad_rel_err=errors[worst].counted if worst else math.inf,
        worst_parameter=worst,
        max_grad_rel_err_of_module={
            module: max(error.counted for name, error in errors.items() if _module_of(name) == module)
            for module in dict.fromkeys(map(_module_of, errors))
        },
        max_raw_grad_rel_err=errors[worst_raw].raw if worst_raw else math.inf,
        worst_raw_parameter=worst_raw,
        num_parameters_compared=len(errors),
        floored_parameters=[name for name in errors if _norm(reference.gradients[name]) < floors[name]],
        zero_by_mathematics=[
            _zero_gradient(name, gradients[name], references, floors[name]) for name in sorted(zero & set(errors))
        ],
        unreached_parameters=unreached,
        failures=failures,
        world_size=world_size,
        num_routed_tokens=flips.num_routed,
        num_flipped_tokens=flips.num_flipped,
        worst_flip=flips.worst,
    )


def _compare_parameters(
    gradients: Mapping[str, Sequence[Tensor]],
    references: References,
    dtype: str,
    floors: Mapping[str, float],
    zero: set[str],
) -> tuple[dict[str, _Errors], list[str]]:
    """Returns the worst version's error of each parameter that both sides have, and failures that no tolerance
    allows."""
    reference = references.of_runs_in(dtype)
    forgiven = _forgiven(references, floors, zero, dtype)
    failures: list[str] = []
    errors: dict[str, _Errors] = {}
    for name in sorted({*gradients, *reference.gradients}):
        if name in gradients and not gradients[name] and name in reference.unreached:
            errors[name] = _Errors(0.0, 0.0)
            continue
        if not gradients.get(name) or name not in reference.gradients:
            where = "the reference" if gradients.get(name) else "the distributed run"
            failures.append(f"{name} has no gradient in {where}")
            continue
        base = references.exact if name in zero else reference
        versions = [
            _error(version, base.gradients[name], floors[name], forgiven.get(name, 0.0)) for version in gradients[name]
        ]
        errors[name] = max(versions, key=lambda error: error.counted)
        if reference.gradients[name].any() and not all(version.any() for version in gradients[name]):
            failures.append(f"{name} has a gradient of zeros, the reference has not")
    return errors, failures


def _nothing_compared(errors: Mapping[str, _Errors], unreached: Sequence[str]) -> list[str]:
    if not errors:
        return ["no parameter was compared: nothing is trainable"]
    if len(unreached) == len(errors):
        return ["the reference has gradients of zeros only: the batch reaches nothing that is trainable"]
    return []


def _zero_gradient(name: str, versions: Sequence[Tensor], references: References, floor: float) -> ZeroGradient:
    return ZeroGradient(
        parameter=name,
        distributed_norm=max(map(_norm, versions)),
        plain_norm=_norm(references.plain.gradients[name]),
        exact_norm=_norm(references.exact.gradients[name]),
        floor=floor,
    )


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _floors(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """For each parameter, the smallest norm that a gradient is compared with."""
    squares: dict[str, float] = {}
    elements: dict[str, int] = {}
    for name, gradient in reference.items():
        module = _module_of(name)
        squares[module] = squares.get(module, 0.0) + _norm(gradient) ** 2
        elements[module] = elements.get(module, 0) + gradient.numel()
    return {
        name: FLOOR * math.sqrt(squares[_module_of(name)] / elements[_module_of(name)] * gradient.numel())
        for name, gradient in reference.items()
    }


def _zero_by_mathematics(references: References, floors: Mapping[str, float]) -> set[str]:
    """A gradient that is exactly zero in plain transformers is not among them: it has no rounding to forgive."""
    return {
        name
        for name, exact in references.exact.gradients.items()
        if _norm(exact) <= ZERO_BY_MATHEMATICS * floors[name] and references.plain.gradients[name].any()
    }


def _forgiven(references: References, floors: Mapping[str, float], zero: set[str], dtype: str) -> dict[str, float]:
    """For each parameter that has rounding forgiven, the norm of it."""
    if dtype == "float64":
        return {}
    exact = references.exact.gradients
    rounding = {name: _norm(references.plain.gradients[name].double() - exact[name].double()) for name in exact}
    if dtype == "float32":
        return {name: ROUNDING_MULTIPLE * rounding[name] for name in zero}
    scales = {name: max(_norm(exact[name]), floors[name]) for name in exact}
    relative: dict[str, list[float]] = {}
    for name in exact:
        if scales[name]:
            relative.setdefault(_module_of(name), []).append(rounding[name] / scales[name])
    typical = {module: statistics.median(values) for module, values in relative.items()}
    return {
        name: ROUNDING_MULTIPLE * max(rounding[name], typical.get(_module_of(name), 0.0) * scales[name])
        for name in exact
    }


def _error(ours: Tensor, theirs: Tensor, floor: float, forgiven: float) -> _Errors:
    difference = _norm(ours.double() - theirs.double())
    scale = max(_norm(theirs), floor)
    # What is not a number must not slip through `max`.
    counted = max(0.0, difference - forgiven) if math.isfinite(difference - forgiven) else math.inf
    return _Errors(_relative(difference, scale), _relative(counted, scale))


def _beyond_tolerance(loss_error: float, errors: Mapping[str, _Errors], tolerance: float) -> list[str]:
    """In words, the worst of them only: one mistake is often in hundreds of parameters."""
    failures = []
    if not loss_error <= tolerance:
        failures.append(f"the loss has a relative error of {loss_error:.2e}, the tolerance is {tolerance:.0e}")
    beyond = sorted((e.counted, name) for name, e in errors.items() if not e.counted <= tolerance)
    if beyond:
        error, name = beyond[-1]
        others = f", and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        failures.append(f"{name} has a relative error of {error:.2e}, the tolerance is {tolerance:.0e}{others}")
    return failures


def _may_be_rounding(
    loss_error: float, errors: Mapping[str, _Errors], references: References, floors: Mapping[str, float]
) -> bool:
    """Whether nothing but gradients is beyond the tolerance of float32, by no more than what plain float32 rounds."""
    tolerance = TOLERANCES["float32"]
    beyond = [name for name, error in errors.items() if not error.counted <= tolerance]
    exact, plain = references.exact.gradients, references.plain.gradients
    return (
        bool(beyond)
        and loss_error <= tolerance
        and all(
            errors[name].counted
            <= ROUNDING_MULTIPLE
            * _relative(_norm(plain[name].double() - exact[name].double()), max(_norm(exact[name]), floors[name]))
            for name in beyond
        )
    )


def _relative(difference: float, scale: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    if scale:
        return difference / scale
    return math.inf if difference else 0.0


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


def _module_of(parameter: str) -> str:
    return parameter.partition(".")[0]
