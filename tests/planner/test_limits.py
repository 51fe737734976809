"""The user's limits on degrees hold for every plan, whoever makes it; a modality that is missing does not matter."""

from collections import Counter
from dataclasses import replace

import pytest
from checkout import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from small_problem import sample, small_problem

from motet.api import read_problem
from motet.config import load_run_config
from motet.costs.analytic import analytic_table
from motet.errors import UserError
from motet.planner.evaluate import evaluate
from motet.planner.layouts.degrees import check_within_limits
from motet.planner.registry import PLANNERS, Planner, make_plan

SIZES = st.sampled_from([(1,), (2,), (1, 2)])
STAGES = st.sampled_from([1, 2, 3, None])


LIMITS = st.fixed_dictionaries({"tp_sizes": SIZES, "max_stages": STAGES})


def limited_problem(limits, **options):
    """Costs are known at the sizes that are allowed, and at no others."""
    problem = small_problem(**options)
    modules = {name: replace(module, **limits[name]) for name, module in problem.modules.items()}
    tables = [
        analytic_table({name: module.workload}, problem.cluster, tp_sizes=module.tp_sizes)
        for name, module in modules.items()
    ]
    table = replace(tables[0], modules={name: costs for each in tables for name, costs in each.modules.items()})
    return replace(problem, modules=modules, table=table)


def check(problem, plan, planner):
    replicas = Counter()
    for name, module in plan.modules.items():
        limits = problem.modules[module.copy_of or name]
        for replica in module.replicas:
            assert len(replica.stages) <= (limits.max_stages or 99), (
                f"{planner}: {name} has {len(replica.stages)} stages"
            )
            for stage in replica.stages:
                assert stage.tp_size in limits.tp_sizes, f"{planner}: {name} has tp {stage.tp_size}"
                assert stage.cp_size == 1
        replicas[name] = len(module.replicas)
    if planner == "oobleck":
        return
    assert replicas["language_model"] in problem.dp_sizes
    # Of these the language model's own number is limited; auto may take their plans.
    if planner not in ("optimus", "megatron_extra_stages", "auto"):
        assert all(number in problem.dp_sizes for number in replicas.values()), f"{planner}: {replicas}"


@examples(25)
@given(
    limits=st.fixed_dictionaries(dict.fromkeys(("vision", "audio", "language_model"), LIMITS)),
    num_devices=st.integers(2, 8),
    encoders=st.sampled_from([("vision",), ("vision", "audio")]),
    frozen=st.sampled_from([(), ("vision", "audio")]),
    dp_sizes=st.sampled_from([(1,), (2,), (1, 2), (1, 2, 4)]),
    schedule=st.sampled_from(["1f1b", "interleaved_1f1b"]),
)
def test_every_planner_keeps_to_them(limits, **options):
    """Or says that it has no plan."""
    problem = limited_problem(limits, **options)
    for planner, entry in PLANNERS.items():
        try:
            plan = entry.plan(problem)
        except UserError:
            continue
        check(problem, plan, planner)
        of_encoders = entry.limits_dp_of_encoders
        check_within_limits(problem, plan, limits_dp=entry.limits_dp, limits_dp_of_encoders=of_encoders)


NAMES = ("vision", "audio", "language_model")


@pytest.mark.parametrize(
    "planner",
    [
        "cornstarch",
        "disttrain",
        "entrain",
        "optimus",
        "megatron",
        "megatron_balanced",
        "encoders_colocated",
        "auto",
    ],
)
def test_one_stage_of_everything(planner):
    """Who can fill the devices with replicas, or leave some over, has a plan."""
    problem = limited_problem({name: {"tp_sizes": (1,), "max_stages": 1} for name in NAMES}, dp_sizes=(1, 2, 4))
    plan = make_plan(problem, planner)
    check(problem, plan, planner)
    assert all(len(replica.stages) == 1 for module in plan.modules.values() for replica in module.replicas)


@pytest.mark.parametrize(
    ("planner", "tp", "message"),
    [
        (
            "fsdp",
            {"language_model": (2,)},
            "tp of language_model is 2, but planner fsdp supports only tp 1 for it",
        ),
        (
            "megatron_extra_stages",
            {"audio": (2,)},
            "tp of audio is 2, but planner megatron_extra_stages supports only",
        ),
    ],
)
def test_planners_that_hold_modules_whole(planner, tp, message):
    """They say which limit is in the way, not which costs are missing."""
    limits = {name: {"tp_sizes": tp.get(name, (1, 2))} for name in NAMES}
    with pytest.raises(UserError, match=message):
        make_plan(limited_problem(limits, dp_sizes=(1, 2, 4)), planner)


def test_a_planner_that_knows_no_limits(monkeypatch):
    """It is found out, for every degree."""
    problem = small_problem()
    plan = make_plan(problem, "cornstarch")
    monkeypatch.setitem(PLANNERS, "cornstarch", Planner(plan=lambda problem, placement: plan))
    for limit, message in (
        ({"tp_sizes": (2,)}, "tp of vision is 2, but planner cornstarch needs 1; allow 1"),
        ({"max_stages": 1}, "max_pp of language_model is at most 1, but planner cornstarch needs 3; allow 3"),
    ):
        modules = {name: replace(module, **limit) for name, module in problem.modules.items()}
        with pytest.raises(UserError, match=message):
            make_plan(replace(problem, modules=modules), "cornstarch")
    with pytest.raises(UserError, match="dp of vision is 2 or 4, but planner cornstarch needs 1"):
        make_plan(replace(problem, dp_sizes=(2, 4)), "cornstarch")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "distmm"])
@pytest.mark.parametrize("missing", ["vision", "both"])
def test_no_sample_has_some_modality(planner, missing):
    problem = small_problem(dp_sizes=(1, 2, 4))
    samples = tuple(sample(i, image=False, sound=missing == "vision", words=10 + i) for i in range(16))
    plan = make_plan(replace(problem, samples=samples), planner)
    assert evaluate(problem, plan).iteration_time_s > 0


@pytest.mark.parametrize(
    ("num_devices", "expected"), [(8, (1, 2, 4, 8)), (9, (1, 2, 3, 4, 6, 8)), (7, (1, 2, 3, 4, 6)), (2, (1, 2))]
)
def test_numbers_of_replicas_where_the_user_sets_no_limit(num_devices, expected):
    llava = ROOT / "examples" / "layout" / "llava_8_gpus.yaml"
    config = load_run_config(llava, [f"cluster.num_devices={num_devices}"])
    assert read_problem(config).dp_sizes == expected
