"""The cut of one parameter for tensor parallelism, and the group sizes that a family allows. Imports no torch.

Every transformer layer is cut as Megatron-LM does (Shoeybi et al. 2019, section 3): queries, keys, values and the first
half of the MLP by their outputs ("column"), the attention's and the MLP's last linear by their inputs ("row"), so that
each rank computes whole heads and a slice of the MLP and one sum closes each half. Which linears these are is derived
from the model (`motet.parallel.tensor.tensor_cuts`).

Limits: key-value heads are never copied, so the size must divide their number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motet.errors import UserError

Config = Mapping[str, Any] | Any
"""A transformers configuration: the object, or its complete `to_dict()`."""


@dataclass(frozen=True)
class Shard:
    """The cut of one parameter: each section of `dim` is divided evenly over the ranks."""

    dim: int
    sections: tuple[int, ...] = (1,)
    """Relative sizes of the sections that lie one after the other along `dim` (fused queries | keys | values)."""


def setting(config: Config, name: str, default: Any = None) -> Any:
    """Returns a value of the configuration, or `default` if it is absent or None."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def check_tp(numbers: Mapping[str, int], tp_size: int) -> None:
    """Raises `UserError` if the size does not divide; it names what does not divide and the sizes that work."""
    if tp_size >= 1 and all(number % tp_size == 0 for number in numbers.values()):
        return
    common = math.gcd(*numbers.values())
    fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
    wrong = [f"{name} {number}" for name, number in numbers.items() if tp_size < 1 or number % tp_size]
    use = fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"
    raise UserError(f"tp_size: {tp_size} does not divide {' / '.join(wrong)}; use {use}")


def local_ranges(full_size: int, shard: Shard, rank: int, tp_size: int) -> list[tuple[int, int]]:
    """The half-open ranges of the whole dimension that make up `rank`'s shard, one per section."""
    unit, rest = divmod(full_size, sum(shard.sections))
    assert rest == 0, f"sections {shard.sections} do not divide {full_size}"
    ranges, start = [], 0
    for section in shard.sections:
        size, rest = divmod(section * unit, tp_size)
        assert rest == 0, f"a section of {section * unit} does not divide by {tp_size}"
        ranges.append((start + rank * size, start + (rank + 1) * size))
        start += section * unit
    return ranges
