"""Tensors survive the journey in one buffer, whatever their type and shape; headers from strangers are checked."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.data.service.shared_segments import new_segment
from motet.data.service.tensor_buffer import DTYPES, in_own_memory, pack, unpack, view_of_memory


@st.composite
def features(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
    made = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        made[name] = values.to(DTYPES[draw(st.sampled_from(sorted(DTYPES)))])
        if values.dim() > 1:
            made[name] = made[name].transpose(0, 1)
    return made


@examples(100)
@given(st.lists(features(), max_size=4), st.booleans())
def test_what_was_packed_comes_out(samples: list[dict[str, torch.Tensor]], in_shared: bool) -> None:
    def in_segment(num_bytes: int) -> torch.Tensor:
        segment = new_segment(max(1, num_bytes))
        os.close(segment.descriptor)
        return segment.data[:num_bytes]

    buffer = pack(samples, in_segment if in_shared else in_own_memory)
    received = list(unpack(json.loads(json.dumps(buffer.header)), buffer.data))
    assert len(received) == len(samples)
    for sent, got in zip(samples, received, strict=True):
        assert sent.keys() == got.keys()
        for name, tensor in sent.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor)


@pytest.mark.parametrize(
    "entry", [("float32", [3], 0), ("float32", [1], 8), ("uint8", [9], 0), ("uint8", [1], -1), ("complex", [1], 0)]
)
def test_a_header_that_lies_is_refused(entry: tuple[str, list[int], int]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        list(unpack([{"x": entry}], torch.zeros(8, dtype=torch.uint8)))


def test_a_view_keeps_its_owner_alive() -> None:
    owner = torch.arange(64, dtype=torch.uint8)
    view = view_of_memory(owner.data_ptr(), 64, owner)
    del owner
    _ = [torch.full((64,), 255, dtype=torch.uint8) for _ in range(100)]
    assert view.tolist() == list(range(64))
