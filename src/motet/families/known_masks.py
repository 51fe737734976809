"""Answers transformers' queries about masks and positions from values that the host already has.

transformers makes masks on the device and looks at their values to see whether they are needed: the host would wait for
the device. Where a mask is handed over here it is needed, and which samples share a row is known from their lengths.
"""

import threading
from typing import Any

from torch import Tensor
from transformers import masking_utils

from motet.devices import to_device

_is_tracing: Any = masking_utils.is_tracing
_find_packed: Any = masking_utils.find_packed_sequence_indices


class _Known(threading.local):
    is_given = False
    packed: Tensor | None = None


_known = _Known()


class KnownMasks:
    """Around a forward, or the making of masks, in which every 2-D mask hides something.

    `positions`: [rows, columns] on the host, those of packed samples; None: a row holds one sample."""

    def __init__(self, positions: Tensor | None = None) -> None:
        self._positions = positions

    def __enter__(self) -> None:
        self._before = _known.is_given, _known.packed
        _known.is_given = False  # On the host transformers may look.
        _known.packed = None if self._positions is None else _find_packed(self._positions)
        _known.is_given = True

    def __exit__(self, *_: object) -> None:
        _known.is_given, _known.packed = self._before


def _reads_no_values(tensor: Any = None) -> bool:
    return _known.is_given or bool(_is_tracing(tensor))


def _packed_samples(position_ids: Tensor) -> Tensor | None:
    if not _known.is_given:
        found: Tensor | None = _find_packed(position_ids)
        return found
    return None if _known.packed is None else to_device(_known.packed, position_ids.device)


# The module's functions find each other by these names.
masking_utils.is_tracing = _reads_no_values
masking_utils.find_packed_sequence_indices = _packed_samples
