"""The best mapping against every mapping, tried one by one with the thesis' formulas."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sampling import examples

from motet.planner.templates.stage_mapping import (
    ChainCosts,
    CutCosts,
    MappedStage,
    MappingProblem,
    StageMapping,
    map_stages,
)

Fits = Callable[[int, int, slice, int], bool]
"""(devices, context-parallel size, layers, number from the end) of a stage"""
Timed = tuple[float, float]
"""Seconds of a stage, and until what it has made is where the next one is (and back)."""


def chains(
    num_layers: int, first: int, end: int, costs: ChainCosts, size: int, fits: Fits = lambda size, cp, run, number: True
) -> Iterator[list[Timed]]:
    """Every way to put the last `num_layers` layers on the devices [first, end)."""
    if num_layers == 0 or first == end:
        if num_layers == 0 and first == end:
            yield []
        return
    total = len(next(iter(costs.seconds.values())))
    choices = [(cp, tp, seconds) for cp in (costs, *costs.others) for tp, seconds in cp.seconds.items()]
    for each, tp, seconds in choices:
        cp = each.cp_size
        if first % size + tp > size or first + tp > end:
            continue
        for taken in range(1, num_layers + 1):
            run = slice(total - num_layers, total - num_layers + taken)
            for rest in chains(num_layers - taken, first + tp, end, costs, size, fits):
                if fits(tp, cp, run, len(rest) + 1):
                    yield [(sum(seconds[run]), cut_s(each, tp, run.stop, first + tp, size)), *rest]


def cut_s(costs: ChainCosts, group: int, layer: int, device: int, size: int) -> float:
    """After a stage on so many devices, if the next one begins with this layer and device."""
    if costs.cut_s is None:
        return 0.0
    return (costs.cut_s[group].within if device % size else costs.cut_s[group].between)[layer]


def thesis_s(stages: Sequence[Timed], num_microbatches: int) -> float:
    """T1 + T2 + T3 of one chain, as they stand there, and the messages of one microbatch."""
    times = [t for t, _ in stages]
    slowest = max(k for k, t in enumerate(times) if t >= max(times) - 1e-12)
    t1 = sum(times) + sum(message for _, message in stages)
    t2 = (num_microbatches - len(stages) + slowest - 1) * times[slowest]
    return t1 + t2 + sum(times[slowest:])


def best_chain(costs: ChainCosts, num_nodes: int, size: int, num_microbatches: int | None) -> float:
    num_layers = len(costs.layers)
    most = min(num_nodes * size, num_layers)
    return min(
        (
            thesis_s(stages, 4 * len(stages) if num_microbatches is None else max(num_microbatches, most + 1))
            for stages in chains(num_layers, 0, num_nodes * size, costs, size)
        ),
        default=float("inf"),
    )


def draw_costs(random: Random, num_layers: int, sizes: Sequence[int]) -> ChainCosts:
    """Some layers alike, some not; devices help more or less."""
    kinds = [random.choice([1.0, 2.0, random.uniform(0.2, 3)]) for _ in range(random.randint(1, 3))]
    layers = [random.choice(kinds) for _ in range(num_layers)]
    return ChainCosts(
        seconds={size: [t * size ** -random.uniform(0.3, 1) for t in layers] if size > 1 else layers for size in sizes}
    )


def with_cuts(random: Random, costs: ChainCosts, *, is_last: bool) -> ChainCosts:
    """In half of the cases. The last module hands nothing on; what the others do goes from node to node."""
    if random.random() < 0.5:
        return costs

    def drawn_cuts(costs: ChainCosts) -> CutCosts:
        within, between = (
            [random.choice([0.1, random.uniform(0, most)]) for _ in (0, *costs.layers)] for most in (0.5, 1.5)
        )
        within[-1] = between[-1] = 0.0 if is_last else between[-1]
        return CutCosts(within, between)

    def drawn(costs: ChainCosts) -> ChainCosts:
        return replace(costs, cut_s={size: drawn_cuts(costs) for size in costs.seconds})

    return replace(drawn(costs), others=tuple(drawn(other) for other in costs.others))


def with_others(random: Random, costs: ChainCosts, sizes: Sequence[int]) -> ChainCosts:
    """Layers may be faster under other context-parallel sizes, or slower, each by itself."""

    def under(cp: int) -> ChainCosts:
        factors = [random.uniform(0.7, 1.4) for _ in costs.layers]
        return ChainCosts(
            seconds={
                size: [t * cp ** -random.uniform(0.5, 1) * factor for t, factor in zip(seconds, factors, strict=True)]
                for size, seconds in ((cp * size, costs.seconds[size]) for size in costs.seconds)
                if size in sizes
            },
            cp_size=cp,
        )

    others = tuple(under(cp) for cp in random.choice([(), (2,), (2, 4)]))
    return replace(costs, others=tuple(other for other in others if other.seconds))


@examples(300)
@given(st.integers(0, 2**32))
def test_no_chain_is_faster(seed: int) -> None:
    random = Random(seed)
    size, num_nodes = random.choice([(1, 4), (2, 2), (4, 1), (2, 3), (3, 2)])
    # Some models can be cut into 2 or 4 only.
    sizes = [s for s in random.choice([(1, 2, 4), (1, 2, 4), (2, 4), (2,)]) if s <= size] or [1]
    costs = with_others(random, draw_costs(random, random.randint(1, 6), sizes), sizes)
    costs = with_cuts(random, costs, is_last=True)
    num_microbatches = random.choice([None, 8, 20])
    problem = MappingProblem(modules={"llm": costs}, devices_per_node=size, num_microbatches=num_microbatches)
    found = map_stages(problem, num_nodes)
    expected = best_chain(costs, num_nodes, size, num_microbatches)
    if found is None:
        assert expected == float("inf")
        return
    assert found.objective_s == pytest.approx(expected, rel=1e-9)
    check_stages(problem, num_nodes, found)
    times = seconds_of(problem, found.stages)["llm"]
    most = min(num_nodes * size, len(costs.layers))
    count = 4 * len(times) if num_microbatches is None else max(num_microbatches, most + 1)
    assert thesis_s(times, count) == pytest.approx(expected, rel=1e-9)


def seconds_of(problem: MappingProblem, stages: Sequence[MappedStage]) -> dict[str, list[Timed]]:
    found: dict[str, list[Timed]] = {name: [] for name in problem.modules}
    for stage in stages:
        costs, end = of_cp(problem.modules[stage.module], stage.cp_size), stage.first_device + stage.num_devices
        message = cut_s(costs, stage.num_devices, stage.layers[1], end, problem.devices_per_node)
        found[stage.module].append((sum(costs.seconds[stage.num_devices][slice(*stage.layers)]), message))
    return found


def of_cp(costs: ChainCosts, cp_size: int) -> ChainCosts:
    [found] = (each for each in (costs, *costs.others) if each.cp_size == cp_size)
    return found


def check_stages(problem: MappingProblem, num_nodes: int, found: StageMapping) -> None:
    """All devices in turn, all layers in turn, no stage on two nodes."""
    device, size = 0, problem.devices_per_node
    reached = dict.fromkeys(problem.modules, 0)
    for stage in found.stages:
        assert stage.first_device == device
        assert device % size + stage.num_devices <= size
        assert stage.layers[0] == reached[stage.module] < stage.layers[1]
        reached[stage.module] = stage.layers[1]
        device += stage.num_devices
    assert device == num_nodes * size
    assert reached == {name: len(next(iter(c.seconds.values()))) for name, c in problem.modules.items()}


def best_dag(problem: MappingProblem, num_nodes: int, fits: Mapping[str, Fits] | None = None) -> float:
    """The longest path, all further microbatches at the slowest stage's pace, less what the stages that lie on every
    path take less than it, from the slowest on."""
    size = problem.devices_per_node
    num_devices = num_nodes * size
    names = list(problem.modules)
    num_layers = {name: len(next(iter(c.seconds.values()))) for name, c in problem.modules.items()}
    assert problem.num_microbatches is not None
    num_microbatches = max(problem.num_microbatches, min(num_devices, sum(num_layers.values())) + 1)
    best = float("inf")
    for inner in product(range(1, num_devices), repeat=len(names) - 1):
        borders = [0, *inner, num_devices]
        if borders != sorted(set(borders)):
            continue
        options = [
            list(chains(num_layers[name], a, b, problem.modules[name], size, *([fits[name]] if fits else [])))
            for name, a, b in zip(names, borders, borders[1:], strict=False)
        ]
        for choice in product(*options):
            best = min(best, dag_s(choice, num_microbatches))
    return best


def dag_s(modules: Sequence[Sequence[Timed]], num_microbatches: int) -> float:
    *encoders, last = [[t for t, _ in stages] for stages in modules]
    common = [*encoders[0], *last] if len(encoders) == 1 else list(last)
    pace = max(max(each) for each in (*encoders, last))
    slowest = [k for k, t in enumerate(common) if t >= pace - 1e-12]
    first = max(slowest) if slowest else 0
    *paths, after = [sum(t + message for t, message in stages) for stages in modules]
    return max(paths, default=0.0) + after + (num_microbatches - 1) * pace - sum(pace - t for t in common[first:])


@examples(300)
@example(4530156)  # The slowest stage is in one of two encoders.
@given(st.integers(0, 2**32))
def test_no_mapping_of_several_modules_is_faster(seed: int) -> None:
    random = Random(seed)
    size, num_nodes = random.choice([(1, 4), (2, 2), (4, 1), (2, 3)])
    sizes = [s for s in (1, 2) if s <= size]
    names = random.choice([["vision", "llm"], ["vision", "audio", "llm"]])
    modules = {name: draw_costs(random, random.randint(1, 3), sizes) for name in names}
    modules = {name: with_others(random, each, [s for s in (1, 2, 4) if s <= size]) for name, each in modules.items()}
    modules = {name: with_cuts(random, each, is_last=name == "llm") for name, each in modules.items()}
    problem = MappingProblem(
        modules=modules,
        devices_per_node=size,
        num_microbatches=random.choice([4, 16]),
    )
    found = map_stages(problem, num_nodes)
    expected = best_dag(problem, num_nodes)
    if found is None:
        assert expected == float("inf")
        return
    assert found.objective_s == pytest.approx(expected, rel=1e-9)
    check_stages(problem, num_nodes, found)
    times = seconds_of(problem, found.stages)
    most = min(num_nodes * size, sum(len(c.seconds[1]) for c in problem.modules.values()))
    count = max(problem.num_microbatches or 0, most + 1)
    assert dag_s(list(times.values()), count) == pytest.approx(expected, rel=1e-9)


def with_memory(costs: ChainCosts, static: Sequence[float], saved: Sequence[float], fixed: float = 0.0) -> ChainCosts:
    """Tensor parallelism divides parameters and activations, context parallelism activations alone."""
    return replace(
        costs,
        static_bytes={s: [costs.cp_size * x / s for x in static] for s in costs.seconds},
        saved_bytes={s: [x / s for x in saved] for s in costs.seconds},
        fixed_bytes=dict.fromkeys(costs.seconds, fixed),
        others=tuple(with_memory(other, static, saved, fixed) for other in costs.others),
    )


@examples(300)
@given(st.integers(0, 2**32))
def test_no_chain_that_fits_is_faster(seed: int) -> None:
    random = Random(seed)
    size, num_nodes = random.choice([(1, 4), (2, 2), (4, 1), (2, 3)])
    num_layers = random.randint(1, 6)
    times = draw_costs(random, num_layers, [s for s in (1, 2, 4) if s <= size])
    static = [random.uniform(0.5, 2) for _ in range(num_layers)]
    saved = [random.choice([0, random.uniform(0, 1)]) for _ in range(num_layers)]
    times = with_cuts(random, with_others(random, times, range(1, size + 1)), is_last=True)
    costs = with_memory(times, static, saved)
    device_bytes = random.uniform(1, 5)
    num_microbatches = random.choice([2, 8])
    most = min(num_nodes * size, num_layers)

    def fits(size: int, cp: int, run: slice, number: int) -> bool:
        return (cp * sum(static[run]) + min(number, num_microbatches) * sum(saved[run])) / size <= device_bytes

    expected = min(
        (
            thesis_s(stages, max(num_microbatches, most + 1))
            for stages in chains(num_layers, 0, num_nodes * size, costs, size, fits)
        ),
        default=float("inf"),
    )
    problem = MappingProblem(
        modules={"llm": costs},
        devices_per_node=size,
        num_microbatches=num_microbatches,
        device_bytes=device_bytes,
    )
    found = map_stages(problem, num_nodes)
    if found is None:
        assert expected == float("inf")
        return
    assert found.objective_s == pytest.approx(expected, rel=1e-9)
    check_stages(problem, num_nodes, found)
    stages = found.stages
    assert all(fits(s.num_devices, s.cp_size, slice(*s.layers), len(stages) - i) for i, s in enumerate(stages))


@examples(300)
@given(st.integers(0, 2**32))
def test_no_mapping_of_several_modules_that_fits_is_faster(seed: int) -> None:
    """Encoders must fit with as many microbatches in flight as there can be."""
    random = Random(seed)
    size, num_nodes = random.choice([(1, 4), (2, 2), (4, 1), (2, 3)])
    names = random.choice([["vision", "llm"], ["vision", "audio", "llm"]])
    modules, layer_bytes = {}, {}
    for name in names:
        times = draw_costs(random, random.randint(1, 3), [s for s in (1, 2) if s <= size])
        static = [random.uniform(0.5, 2) for _ in times.layers]
        saved = [random.choice([0, random.uniform(0, 0.5)]) for _ in times.layers]
        layer_bytes[name] = static, saved
        times = with_cuts(random, with_others(random, times, range(1, size + 1)), is_last=name == "llm")
        modules[name] = with_memory(times, static, saved, fixed=0.25)
    device_bytes = random.uniform(1, 6)
    num_microbatches = random.choice([2, 8])
    most_stages = min(num_nodes * size, sum(len(costs.layers) for costs in modules.values()))

    def fits_of(name: str) -> Fits:
        static, saved = layer_bytes[name]

        def fits(size: int, cp: int, run: slice, number: int) -> bool:
            in_flight = min(number if name == "llm" else most_stages, num_microbatches)
            return 0.25 + (cp * sum(static[run]) + in_flight * sum(saved[run])) / size <= device_bytes

        return fits

    problem = MappingProblem(
        modules=modules, devices_per_node=size, num_microbatches=num_microbatches, device_bytes=device_bytes
    )
    fits = {name: fits_of(name) for name in names}
    found, expected = map_stages(problem, num_nodes), best_dag(problem, num_nodes, fits)
    if found is None:
        assert expected == float("inf")
        return
    assert found.objective_s == pytest.approx(expected, rel=1e-9)
    check_stages(problem, num_nodes, found)
    seconds = list(seconds_of(problem, found.stages).values())
    assert dag_s(seconds, max(num_microbatches, most_stages + 1)) == pytest.approx(expected, rel=1e-9)
    for name in names:
        stages = [stage for stage in found.stages if stage.module == name]
        for i, stage in enumerate(stages):
            assert fits[name](stage.num_devices, stage.cp_size, slice(*stage.layers), len(stages) - i)


def test_memory_of_several_modules() -> None:
    """The encoder's place changes with what the language model keeps in flight."""

    def chain(num_layers: int, saved: float) -> ChainCosts:
        return ChainCosts(
            seconds={1: [1.0] * num_layers}, static_bytes={1: [1.0] * num_layers}, saved_bytes={1: [saved] * num_layers}
        )

    def cut(saved: float) -> list[tuple[str, int]]:
        problem = MappingProblem(
            modules={"vision": chain(2, 0.0), "llm": chain(6, saved)},
            devices_per_node=1,
            num_microbatches=8,
            device_bytes=6.0,
        )
        found = map_stages(problem, 4)
        assert found is not None
        return [(stage.module, stage.layers[1] - stage.layers[0]) for stage in found.stages]

    assert cut(0.0) == [("vision", 2), ("llm", 2), ("llm", 2), ("llm", 2)]
    assert cut(1.0) == [("vision", 2), ("llm", 1), ("llm", 2), ("llm", 3)]


def test_where_an_encoder_hands_its_outputs_to() -> None:
    """To the same node, if there is only one."""

    def chain(*cut: float) -> ChainCosts:
        return ChainCosts(seconds={1: [1.0]}, cut_s={1: CutCosts([0.0, cut[0]], [0.0, cut[1]])})

    def fill_s(num_nodes: int, size: int) -> float:
        modules = {"vision": chain(0.1, 0.5), "llm": chain(0.0, 0.0)}
        problem = MappingProblem(modules=modules, devices_per_node=size, num_microbatches=8)
        found = map_stages(problem, num_nodes)
        assert found is not None
        return found.fill_s

    assert fill_s(1, 2) == pytest.approx(2.1)
    assert fill_s(2, 1) == pytest.approx(2.5)
