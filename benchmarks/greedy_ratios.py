"""How far greedy assignments come from the best at worst, over random small cases whose best is found by trying all."""

from collections.abc import Callable, Mapping
from itertools import permutations, product

import numpy as np

from motet.balancing.disttrain import balanced_groups, reordered
from motet.balancing.entrain import by_encoder_then_llm, defer, evenly_on_both, stratified_microbatches
from motet.ragged_arrays import Floats

Ratio = Callable[[np.random.Generator], float]


def worst_ratios(num_cases: int, seed: int) -> Mapping[str, float]:
    """The largest result over the best one."""
    rng = np.random.default_rng(seed)
    return {name: max(ratio(rng) for _ in range(num_cases)) for name, ratio in RATIOS.items()}


def _largest(works: list[Floats], groups: list[list[int]]) -> float:
    return max(float(work[group].sum()) for work in works for group in groups)


def _best(works: list[Floats], num_groups: int, room: int | None = None) -> float:
    n = len(works[0])
    cuts = np.array(list(product(range(num_groups), repeat=n)))
    if room is not None:
        cuts = cuts[np.array([np.bincount(cut, minlength=num_groups).max() <= room for cut in cuts])]
    return min(
        max(float(((cuts == g) @ work)[c]) for g in range(num_groups) for work in works) for c in range(len(cuts))
    )


def _drawn(rng: np.random.Generator) -> tuple[Floats, Floats, int]:
    n, groups = int(rng.integers(3, 8)), int(rng.integers(2, 4))
    encoder, llm = rng.lognormal(0, 1, (2, n))
    return encoder / encoder.sum(), llm / llm.sum(), groups


def _stratified(rng: np.random.Generator) -> float:
    encoder, llm, groups = _drawn(rng)
    return _largest([encoder], stratified_microbatches(encoder, llm, groups)) / _best([encoder], groups)


def _thesis_replicas(rng: np.random.Generator) -> float:
    encoder, llm, groups = _drawn(rng)
    return _largest([encoder, llm], by_encoder_then_llm(encoder, llm, groups)) / _best([encoder, llm], groups)


def _replicas_on_both(rng: np.random.Generator) -> float:
    encoder, llm, groups = _drawn(rng)
    return _largest([encoder, llm], evenly_on_both(encoder, llm, groups)) / _best([encoder, llm], groups)


def _longest_first(rng: np.random.Generator) -> float:
    _, sizes, groups = _drawn(rng)
    return _largest([sizes], balanced_groups(sizes, groups, equal_counts=False)) / _best([sizes], groups)


def _longest_first_equal_counts(rng: np.random.Generator) -> float:
    _, sizes, groups = _drawn(rng)
    best = _best([sizes], groups, room=-(-len(sizes) // groups))
    return _largest([sizes], balanced_groups(sizes, groups)) / best


def _deferred(rng: np.random.Generator) -> float:
    encoder, llm, groups = _drawn(rng)
    found = defer(range(len(llm)), encoder, llm, groups)
    return _largest([llm], [list(m) for m in found.language_model]) / _best([llm], groups)


def _reordered(rng: np.random.Generator) -> float:
    forward = rng.lognormal(0, 0.7, 6)[:, None] * np.ones(3)
    seconds = [iteration_s(forward[list(order)], 2 * forward[list(order)]) for order in permutations(range(6))]
    order = reordered(forward, 2 * forward, 3)
    return iteration_s(forward[order], 2 * forward[order]) / min(seconds)


def iteration_s(forward_s: Floats, backward_s: Floats) -> float:
    """1F1B on a chain, [microbatch, stage] seconds."""
    count, stages = forward_s.shape
    lists = []
    for s in range(stages):
        warm_up = min(count, stages - s)
        turns = [("B", i) for i in range(count)]
        for i in range(warm_up, count):
            turns.insert(2 * (i - warm_up) + 1, ("F", i))
        lists.append([("F", i) for i in range(warm_up)] + turns)
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(lists[s]):
                kind, i = lists[s][at[s]]
                before = (kind, i, s - 1) if kind == "F" else (kind, i, s + 1) if s + 1 < stages else ("F", i, s)
                if (kind, s) != ("F", 0) and before not in ends:
                    break
                seconds = (forward_s if kind == "F" else backward_s)[i, s]
                free[s] = ends[kind, i, s] = max(free[s], ends.get(before, 0.0)) + float(seconds)
                at[s] += 1
    return max(free)


RATIOS: Mapping[str, Ratio] = {
    "encoder work, stratified (bound 2 - 1/K)": _stratified,
    "LLM work after deferral, largest microbatch": _deferred,
    "replicas by the thesis' rule, larger of both works": _thesis_replicas,
    "replicas evenly on both": _replicas_on_both,
    "Algorithm 2, longest first (bound 4/3 - 1/(3m))": _longest_first,
    "Algorithm 2 with equal counts": _longest_first_equal_counts,
    "Algorithm 3, iteration of 6 microbatches on 3 stages": _reordered,
}
