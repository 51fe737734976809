"""What many samples are, one by one, is what a microbatch of each alone is."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_configs import EVERY_MODEL

from motet.assignment.sample import Sample, Segment
from motet.costs.cost_model import Load, microbatch_load, sample_loads
from motet.families.capabilities import packed_by_sample
from motet.families.shape_reading.module_shapes import module_workload

WORKLOADS = {name: module_workload(EVERY_MODEL[name][0]) for name in ("siglip", "llama", "mllama")}

images = st.lists(st.tuples(st.sampled_from([(12, 12), (2, 3)]), st.integers(1, 3)), max_size=3)
"""Grids and numbers of tiles."""


@st.composite
def drawn_samples(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for i in range(draw(st.integers(1, 5))):
        vision = tuple(
            Segment(rows * columns * tiles, item=item, num_outputs=draw(st.integers(1, 9)), grid=(rows, columns))
            for item, ((rows, columns), tiles) in enumerate(draw(images))
        )
        text = tuple(Segment(n) for n in draw(st.lists(st.integers(1, 9), max_size=3)))
        layouts = {"v": vision, "m": text} if draw(st.booleans()) else {"m": text}
        samples.append(Sample(str(i), layouts, {"m": draw(st.integers(0, 4))}))
    return samples


@given(
    drawn_samples(),
    st.sampled_from([("siglip", "v", ()), ("llama", "m", ("v",)), ("mllama", "m", ("v",))]),
    st.sampled_from(["separate", "padded", "packed"]),
)
def test_samples_one_by_one(samples: list[Sample], what: tuple[str, str, tuple[str, ...]], arrangement: str) -> None:
    name, module, sources = what
    workload = replace(WORKLOADS[name], arrangement=arrangement)
    expected = [microbatch_load(workload, module, [s], sources) if s.has(module) else Load() for s in samples]
    np.testing.assert_array_equal(sample_loads(workload, module, samples, sources), np.array(expected, float))


def test_loads_of_padded_and_packed_sequences():
    text = {"m": (Segment(4),)}, {"m": (Segment(6),)}
    samples = [Sample(str(i), layout, {"m": 2}) for i, layout in enumerate(text)]
    padded = module_workload(EVERY_MODEL["llama"][0])
    packed = module_workload(EVERY_MODEL["llama"][0], packing=True)
    assert microbatch_load(padded, "m", samples) == Load(
        tokens=12, pairs=72, sequences=2, outputs=4, tokens_squared=144
    )
    assert microbatch_load(packed, "m", samples) == Load(
        tokens=10, pairs=100, sequences=2, outputs=4, tokens_squared=100
    )
    by_sample = packed_by_sample(packed, "auto")
    assert microbatch_load(by_sample, "m", samples) == Load(
        tokens=10, pairs=16 + 36, sequences=2, outputs=4, tokens_squared=100
    )


def test_loads_of_encoders_count_items_and_tiles():
    samples = [Sample("a", {"v": (Segment(144, grid=(12, 12)), Segment(288, item=1, num_outputs=7, grid=(12, 12)))})]
    load = microbatch_load(WORKLOADS["siglip"], "v", samples)
    assert load == Load(tokens=432, pairs=3 * 144**2, sequences=3, outputs=151, tokens_squared=432**2)


def test_loads_of_cross_attention():
    workload = module_workload(EVERY_MODEL["mllama"][0])
    samples = [Sample(str(i), {"m": (Segment(5),), "v": (Segment(9, num_outputs=4),)}) for i in range(2)]
    load = microbatch_load(workload, "m", samples, ("v",))
    # Both rows see the tokens of both images.
    assert (load.incoming, load.incoming_pairs) == (2 * 8, 10 * 8)
