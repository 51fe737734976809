"""The frozen rule over the graph of modules, by hand and against brute force."""

from hypothesis import given
from hypothesis import strategies as st
from small_problem import small_problem

from motet.plan import Edge
from motet.planner.problem import ModuleProblem, PlanningProblem


def flags(problem, name):
    return "".join(
        {(0, 0): "-", (1, 0): "i", (0, 1): "w", (1, 1): "b"}[g.input_gradient, g.weight_gradient]
        for g in problem.gradients[name]
    )


def test_frozen_encoder_with_trainable_projector():
    """The projector needs its weight gradient only, everything after it an input gradient."""
    problem = small_problem(encoders=("vision",), frozen=("vision", "language_model"))
    assert flags(problem, "vision") == "-" * 8 + "w"
    assert flags(problem, "language_model") == "i" * 10


def test_all_trainable():
    problem = small_problem(encoders=("vision",), frozen=())
    assert flags(problem, "vision") == "w" + "b" * 8
    assert flags(problem, "language_model") == "b" * 10


def test_a_trainable_language_model_behind_frozen_encoders_without_projector():
    problem = small_problem(frozen=())
    modules = {
        name: ModuleProblem(workload=m.workload, trainable=((3, 10),) if name == "language_model" else ())
        for name, m in problem.modules.items()
    }
    problem = PlanningProblem(
        modules=modules,
        edges=problem.edges,
        cluster=problem.cluster,
        table=problem.table,
        samples=problem.samples,
        num_microbatches=4,
    )
    assert flags(problem, "audio") == "-" * 7
    assert flags(problem, "language_model") == "---w" + "b" * 6


@given(st.data())
def test_rule_against_reachability(data):
    """An input gradient is needed if a path leads to the layer from a trainable layer before it."""
    base = small_problem()
    layers = {name: m.workload.num_layers for name, m in base.modules.items()}
    trainable = {name: data.draw(st.sets(st.integers(0, n - 1), max_size=3)) for name, n in layers.items()}
    entry = {
        name: data.draw(st.lists(st.integers(0, layers["language_model"] - 1), min_size=1, max_size=2, unique=True))
        for name in ("vision", "audio")
    }
    problem = PlanningProblem(
        modules={
            name: ModuleProblem(workload=m.workload, trainable=tuple((i, i + 1) for i in sorted(trainable[name])))
            for name, m in base.modules.items()
        },
        edges=tuple(Edge(source=s, target="language_model", layers=tuple(entry[s])) for s in entry),
        cluster=base.cluster,
        table=base.table,
        samples=base.samples,
        num_microbatches=4,
    )
    links = {(name, i): [(name, i + 1)] for name, n in layers.items() for i in range(n - 1)}
    for source, targets in entry.items():
        links.setdefault((source, layers[source] - 1), []).extend(("language_model", t) for t in targets)
    reached, frontier = set(), [(name, i) for name in layers for i in trainable[name]]
    while frontier:
        for after in links.get(frontier.pop(), ()):
            if after not in reached:
                reached.add(after)
                frontier.append(after)
    for name, n in layers.items():
        for i in range(n):
            assert problem.gradients[name][i].input_gradient == ((name, i) in reached)
            assert problem.gradients[name][i].weight_gradient == (i in trainable[name])
