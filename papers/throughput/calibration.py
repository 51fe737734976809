"""Fits the constants of devices and software profiles to published rows, and judges them on rows held out of the fit.

A constant has a prior (a value from its source, and how far it may be off as a share) and the rows whose prediction it
enters. The fit is a Gauss-Newton one on the logarithm of predicted over measured seconds, with a loss that grows
linearly for rows that are far off, and one that a group of many alike rows does not rule. Predictions are those of
`papers.throughput.prediction`: the simulator's, nothing simpler.

Cross-validation holds out each group (source, model, device) in turn, or each source. The constants of a fold are
fitted by the linearized predictions of the whole fit, without the held-out rows; the held-out rows are then predicted
with them by simulation.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log

import numpy as np

from motet.cluster import DEVICES, Device
from motet.costs.software import SOFTWARE, Software, with_unfused_attention
from motet.ragged_arrays import Floats
from papers.throughput.prediction import Prediction, device_of, predict, software_of
from papers.throughput.published import Measurement

Constants = Mapping[str, float]

EXPECTED_ERROR = 0.08
"""Error of a row from which the loss grows linearly."""
STEP = 0.05
"""Relative change of a constant by which its effect on a row is found."""
LARGEST_CHANGE = 0.5
"""Largest change of the logarithm of a constant in one round."""


@dataclass(frozen=True)
class Constant:
    """A constant that is fitted."""

    name: str
    prior: float
    spread: float
    """Standard deviation of its logarithm, by the prior."""
    applies: Callable[[Measurement], bool]
    prior_source: str


def generation(row: Measurement) -> str:
    """The device whose efficiencies the row's device shares: a800 is an A100 with fewer links, h200 an H100."""
    return "a100" if row.device.startswith("a") else "h100"


def _on(name: str, row: Measurement) -> bool:
    return generation(row) == name


def _under(profile: str, row: Measurement) -> bool:
    return row.software == profile


def _attends(device: str, kernel: str, row: Measurement) -> bool:
    return _on(device, row) and not row.unfused_attention and SOFTWARE[row.software].attention == kernel


def _cut_by_megatron(row: Measurement) -> bool:
    return row.tp > 1 and _under("megatron", row)


FLASH2 = "FlashAttention-2 (Dao 2023), figure 5: forward and backward, causal"
FLASH3 = "FlashAttention-3 (Shah et al. 2024), figures 5 and 6; cuDNN's is as fast"
CONSTANTS: tuple[Constant, ...] = (
    Constant("a100.gemm", 0.84, 0.1, partial(_on, "a100"), "cuBLAS on large bfloat16 products: 250 to 270 TFLOP/s"),
    Constant("h100.gemm", 0.7, 0.1, partial(_on, "h100"), "cuBLAS on large bfloat16 products: 600 to 750 TFLOP/s"),
    Constant("a100.flash1", 0.3, 0.3, partial(_attends, "a100", "flash1"), FLASH2 + ": 25 to 40% for its predecessor"),
    Constant("h100.flash1", 0.2, 0.3, partial(_attends, "h100", "flash1"), FLASH3 + ": half of FlashAttention-2"),
    Constant("h100.fused", 0.55, 0.15, partial(_attends, "h100", "fused"), FLASH3),
    Constant("convolution", 0.4, 0.5, lambda row: row.unet, "assumed: share of what matrix products reach"),
    Constant("fsdp_eager.memory_traffic", 2.5, 0.5, partial(_under, "fsdp_eager"), "assumed"),
    Constant("megatron.memory_traffic", 1.5, 0.3, partial(_under, "megatron"), "assumed"),
    Constant("fsdp_compiled.memory_traffic", 1.5, 0.3, partial(_under, "fsdp_compiled"), "assumed"),
    Constant("contention", 0.25, 0.5, lambda row: row.is_fully_sharded, "assumed"),
    Constant("megatron.exposed_collectives", 0.8, 0.3, _cut_by_megatron, "assumed"),
    Constant(
        "unfused_attention.score_bytes",
        12.0,
        0.3,
        lambda row: row.unfused_attention,
        "assumed: six passes of a 2-byte score",
    ),
)


def released() -> dict[str, float]:
    """The constants as they stand in the catalogue and the software profiles."""
    found = {"contention": SOFTWARE["fsdp_eager"].contention}
    for name, device in (("a100", DEVICES["a100-80"]), ("h100", DEVICES["h100"])):
        found[f"{name}.gemm"] = device.efficiency
        found["convolution"] = (device.convolution_efficiency or device.efficiency) / device.efficiency
        found |= {f"{name}.{kernel}": share for kernel, share in device.attention_efficiency.items()}
    for name, profile in SOFTWARE.items():
        found[f"{name}.memory_traffic"] = profile.memory_traffic
        found[f"{name}.exposed_collectives"] = profile.exposed_collectives
        found[f"{name}.score_bytes"] = profile.score_bytes
    return {constant.name: found[constant.name] for constant in CONSTANTS}


def predict_with(row: Measurement, constants: Constants) -> Prediction:
    return predict(row, _device(row, constants), _software(row, constants))


def _device(row: Measurement, constants: Constants) -> Device:
    device, name = device_of(row), generation(row)
    kernels = {
        kernel: constants.get(f"{name}.{kernel}", share) for kernel, share in device.attention_efficiency.items()
    }
    return replace(
        device,
        efficiency=constants[f"{name}.gemm"],
        convolution_efficiency=constants["convolution"] * constants[f"{name}.gemm"],
        attention_efficiency=kernels,
    )


def _software(row: Measurement, constants: Constants) -> Software:
    profile, name = software_of(row), row.software
    if row.unfused_attention:
        profile = replace(with_unfused_attention(profile), score_bytes=constants["unfused_attention.score_bytes"])
    return replace(
        profile,
        contention=constants["contention"],
        memory_traffic=constants[f"{name}.memory_traffic"],
        exposed_collectives=constants.get(f"{name}.exposed_collectives", profile.exposed_collectives),
    )


@dataclass(frozen=True)
class Linearized:
    """Logarithms of predicted over measured seconds, as linear functions of the logarithms of the constants."""

    rows: Sequence[Measurement]
    at: Constants
    errors: Floats
    effects: Floats
    """[row, constant]"""

    def fitted_without(self, held_out: Callable[[Measurement], bool]) -> "Fold":
        """The constants that fit the other rows best."""
        keep = np.array([not held_out(row) for row in self.rows])
        return Fold(
            constants=_minimized([row for row in self.rows if not held_out(row)], self, keep),
            fitted_on=tuple(row.id for row in self.rows if not held_out(row)),
            held_out=tuple(row.id for row in self.rows if held_out(row)),
        )


@dataclass(frozen=True)
class Fold:
    constants: Constants
    fitted_on: tuple[str, ...]
    """Rows."""
    held_out: tuple[str, ...]


def linearize(rows: Sequence[Measurement], at: Constants) -> Linearized:
    errors = np.array([_error(row, at) for row in rows])
    effects = np.zeros((len(rows), len(CONSTANTS)))
    for k, constant in enumerate(CONSTANTS):
        larger = {**at, constant.name: at[constant.name] * (1 + STEP)}
        for i, row in enumerate(rows):
            if constant.applies(row):
                effects[i, k] = (_error(row, larger) - errors[i]) / log(1 + STEP)
    return Linearized(rows, at, errors, effects)


def fit(rows: Sequence[Measurement], start: Constants, *, rounds: int = 3) -> dict[str, float]:
    constants = dict(start)
    for _ in range(rounds):
        linear = linearize(rows, constants)
        constants = _minimized(rows, linear, np.ones(len(rows), dtype=bool))
    return constants


def _error(row: Measurement, constants: Constants) -> float:
    assert row.seconds is not None
    return log(predict_with(row, constants).seconds / row.seconds)


def _minimized(rows: Sequence[Measurement], linear: Linearized, keep: Floats) -> dict[str, float]:
    from scipy.optimize import least_squares

    sizes = Counter(row.group for row in rows)
    weights = np.array([sizes[row.group] ** -0.25 for row in rows])
    errors, effects = linear.errors[keep], linear.effects[keep]
    start = np.log([linear.at[constant.name] for constant in CONSTANTS])
    prior = np.log([constant.prior for constant in CONSTANTS])
    spread = np.array([constant.spread for constant in CONSTANTS])

    def residuals(values: Floats) -> Floats:
        of_rows = weights * (errors + effects @ (values - start)) / EXPECTED_ERROR
        bounded = np.sign(of_rows) * np.sqrt(2 * (np.sqrt(1 + of_rows**2) - 1))
        return np.concatenate([bounded, (values - prior) / spread])

    found = np.clip(least_squares(residuals, start).x, start - LARGEST_CHANGE, start + LARGEST_CHANGE)
    return {constant.name: float(value) for constant, value in zip(CONSTANTS, np.exp(found), strict=True)}


@dataclass(frozen=True)
class HeldOut:
    """The prediction of a row by constants that were fitted without it."""

    prediction: Prediction
    fold: Fold


def cross_validate(linear: Linearized, key: Callable[[Measurement], object]) -> list[HeldOut]:
    """Predicts every row with constants fitted without the rows of equal `key`."""
    result = []
    for held in dict.fromkeys(key(row) for row in linear.rows):
        fold = linear.fitted_without(lambda row, held=held: key(row) == held)  # type: ignore[misc]
        result += [HeldOut(predict_with(row, fold.constants), fold) for row in linear.rows if key(row) == held]
    return result
