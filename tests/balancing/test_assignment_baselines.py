import numpy as np
from plans import language_model, module, replica, samples

from motet.balancing.policies import dip_like_assignment, random_assignment
from motet.plan import Edge, Plan

PLAN = Plan(
    modules={"vision": module(replica(0), replica(1)), "llm": language_model(replica(2), replica(3))},
    edges=(Edge(source="vision", target="llm"),),
    num_microbatches=3,
)
BATCH = samples(12, ["vision", "llm"])


def test_random_order_depends_on_the_seed_alone() -> None:
    first, again, other = (random_assignment(PLAN, BATCH, seed).microbatches["llm"] for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(i for cut in first for m in cut for i in m) == list(range(12))
    assert {len(m) for cut in first for m in cut} == {2}


def test_sub_microbatches_stay_within_their_microbatch() -> None:
    work = np.arange(12.0)
    assignment = dip_like_assignment(PLAN, BATCH, work, seed=0, pieces=2)
    limit = work.sum() / 6 / 2
    for pieces, microbatches in zip(assignment.microbatches["vision"], assignment.microbatches["llm"], strict=True):
        assert [i for piece in pieces for i in piece] == [i for m in microbatches for i in m]
        assert all(any(set(piece) <= set(m) for m in microbatches) for piece in pieces)
        assert all(len(piece) == 1 or work[list(piece)].sum() <= limit for piece in pieces)
        assert len(pieces) > len(microbatches)
