from dataclasses import MISSING, fields, replace
from random import Random
from typing import Any

import pytest
from drawing import Limits, draw_problem
from plans import chain, contrastive, language_model, module, replica, vision_audio_llm

from motet.plan import Edge, ModulePlan, Plan, Replica, Stage, module_order

PLAN = vision_audio_llm(4)


def test_ranks_and_stages() -> None:
    assert PLAN.num_ranks == 6
    assert [(name, s, stage.ranks) for name, _, s, stage in PLAN.stages()] == [
        ("vision", 0, (0,)),
        ("vision", 1, (1,)),
        ("audio", 0, (2,)),
        ("llm", 0, (3,)),
        ("llm", 1, (4,)),
        ("llm", 2, (5,)),
    ]
    assert [entry[0] for entry in PLAN.stages_of_rank(2)] == ["audio"]


def test_trainable_runs() -> None:
    plan = ModulePlan(kind="encoder", num_layers=6, replicas=(), trainable=((1, 2), (4, 6)))
    assert [plan.is_trainable((i, i + 1)) for i in range(6)] == [False, True, False, False, True, True]
    assert plan.is_trainable((0, 2))
    assert not plan.is_trainable((2, 4))


def test_modules_come_in_topological_order_and_else_in_that_of_the_file() -> None:
    assert module_order(PLAN) == ["vision", "audio", "llm"]
    turned = replace(PLAN, modules={name: PLAN.modules[name] for name in ("llm", "audio", "vision")})
    assert module_order(turned) == ["audio", "vision", "llm"]


@pytest.mark.parametrize(
    "plan", [PLAN, chain(3, 2), *(draw_problem(Random(i), Limits(tied=True)).plan for i in range(20))]
)
def test_json_round_trips(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_json_keeps_every_field() -> None:
    plan = replace(
        PLAN,
        replica_microbatches=(4,),
        schedule="gpipe",
        assignment="entrain",
        max_packed_tokens=512,
        planner="auto",
        recompute=("llm",),
        recompute_features=("vision",),
        zero1=True,
        run_ahead=True,
    )
    defaults = {field.name: field.default for field in fields(Plan) if field.default is not MISSING}
    assert {name for name, default in defaults.items() if getattr(plan, name) == default} == {"version"}
    assert Plan.from_json(plan.to_json()) == plan


def stage(layers: tuple[int, int], ranks: tuple[int, ...], **sizes: int) -> Stage:
    return Stage(layers=layers, ranks=ranks, **sizes)


def llm(*stages: Stage, num_layers: int = 2, **values: object) -> dict[str, ModulePlan]:
    return {
        "llm": ModulePlan(
            kind="language_model",
            num_layers=num_layers,
            replicas=(Replica(stages=stages),),
            **values,  # type: ignore[arg-type]
        )
    }


def encoder_and(**other: ModulePlan) -> dict[str, ModulePlan]:
    return {"vision": module(replica(0, 1)), **other}


WITH_LLM = encoder_and(llm=language_model(replica(0)))


@pytest.mark.parametrize(
    ("modules", "edges", "fault"),
    [
        ({}, (), "modules: is empty"),
        ({"llm": ModulePlan(kind="language_model", num_layers=1, replicas=())}, (), r"modules.llm.replicas: is empty"),
        (llm(stage((0, 1), (0,)), stage((2, 3), (1,)), num_layers=3), (), r"layers: is \[2, 3\]; .* begins at 1"),
        (llm(stage((0, 0), (0,)), stage((0, 2), (1,))), (), r"stages\[0\].layers: is \[0, 0\]"),
        (llm(stage((0, 1), (0,))), (), "its stages end at layer 1, but the module has 2 layers"),
        (llm(stage((0, 2), (0, 1))), (), r"ranks: \[0, 1\] is not 1 x 1 \(tp_size x cp_size\) different ranks"),
        (llm(stage((0, 2), (0, 0), tp_size=2)), (), r"ranks: \[0, 0\] is not 2 x 1"),
        (llm(stage((0, 2), (), tp_size=0)), (), r"ranks: \[\] is not 0 x 1"),
        (llm(stage((0, 2), (0, -1), tp_size=2)), (), r"ranks: \[0, -1\] is not 2 x 1"),
        (
            {"vision": replace(llm(stage((0, 1), (0,)), stage((1, 2), (1, 2), cp_size=2))["llm"], kind="tower")},
            (),
            "stages 0 and 1 differ in cp_size; those of a tower share no tokens",
        ),
        (llm(stage((0, 2), (1,))), (), r"ranks: \[0\] of 0..1 have no stage"),
        (llm(stage((0, 2), (0,)), trainable=((1, 3),)), (), r"llm.trainable: \[1, 3\) is not within the 2 layers"),
        (llm(stage((0, 2), (0,)), tied=((0, 2),)), (), "modules.llm.tied: 0 and 2 are not two layers"),
        (llm(stage((0, 2), (0,)), copy_of="vision"), (), "modules.llm.copy_of: there is no module 'vision'"),
        (llm(stage((0, 2), (0,)), ep=0), (), "modules.llm.ep: is 0; give at least 1"),
        (llm(stage((0, 2), (0,)), ep=2), (), r"ep: is 2, but must be tp_size \(1\) times a divisor of the 1 replicas"),
        (llm(stage((0, 2), (0, 1), tp_size=2), ep=3), (), r"must be tp_size \(2\) times"),
        (llm(stage((0, 1), (0, 1), tp_size=2), stage((1, 2), (2,)), ep=2), (), "its stages or replicas are not alike"),
        (
            llm(stage((0, 2), (0, 1), tp_size=2), ep=2, fully_sharded=True),
            (),
            "llm.ep: is 2, which fully_sharded does not support",
        ),
        (
            {"vision": replace(llm(stage((0, 2), (0, 1), tp_size=2), ep=2)["llm"], kind="encoder")},
            (),
            "only a language model's experts are distributed",
        ),
        (encoder_and(copy=module(replica(0, 1), copy_of="copy")), (), "modules.copy.copy_of: copy is itself a copy"),
        (encoder_and(copy=module(replica(0), copy_of="vision")), (), "copy: its num_layers and trainable differ"),
        (encoder_and(copy=module(replica(0, 1), copy_of="vision", trainable=())), (), "copy: its num_layers"),
        (encoder_and(), (Edge(source="vision", target="llm"),), "edges: there is no module 'llm'"),
        (WITH_LLM, (Edge(source="vision", target="llm", layers=(1,)),), r"enters llm at layers \[1\]"),
        (WITH_LLM, (Edge(source="vision", target="llm", layers=()),), r"enters llm at layers \[\]"),
        (WITH_LLM, (Edge(source="vision", target="llm"),) * 2, "vision -> llm stands twice"),
        (
            WITH_LLM,
            (Edge(source="vision", target="llm"), Edge(source="llm", target="vision")),
            "vision, llm form a cycle",
        ),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_executed_are_refused(
    modules: dict[str, ModulePlan], edges: tuple[Edge, ...], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        Plan(modules=modules, edges=edges, num_microbatches=1)
    assert str(caught.value).startswith("plan: ")
    assert "\n" not in str(caught.value)


def test_microbatches_and_recomputation_are_checked() -> None:
    with pytest.raises(ValueError, match="num_microbatches: is 0; give at least 1"):
        replace(PLAN, num_microbatches=0)
    with pytest.raises(ValueError, match="replica_microbatches: has 3 numbers, but vision has 1 replicas"):
        replace(PLAN, replica_microbatches=(1, 2, 1))
    shared = replace(language_model(replica(0), replica(1)), ep=2)
    with pytest.raises(ValueError, match=r"replicas that share experts \(ep 2\) need equal numbers"):
        Plan(modules={"llm": shared}, edges=(), num_microbatches=1, replica_microbatches=(1, 2))
    for count, remedy in ((0, "at least 1"), (1_000_001, "at most 1000000")):
        with pytest.raises(ValueError, match=rf"replica_microbatches\[1\]: is {count}; give {remedy}$"):
            replace(PLAN, replica_microbatches=(2, count))
    with pytest.raises(ValueError, match="recompute: there is no module 'text'"):
        replace(PLAN, recompute=("text",))


TOWERS = contrastive({"image": [replica(0, 1), replica(2, 3)], "text": [replica(4)]}, num_microbatches={"image": 3})


def test_a_loss_is_on_the_ranks_that_hold_features() -> None:
    assert TOWERS.loss_module == "loss"
    assert TOWERS.modules["loss"].replicas[0].stages[0].ranks == (1, 3, 4)
    assert [TOWERS.num_microbatches_of(name) for name in TOWERS.modules] == [3, 1, 1]
    assert Plan.from_json(TOWERS.to_json()) == TOWERS
    assert PLAN.loss_module is None


def changed_loss(**values: object) -> dict[str, ModulePlan]:
    return {**TOWERS.modules, "loss": replace(TOWERS.modules["loss"], **values)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("modules", "edges", "fault"),
    [
        ({**TOWERS.modules, "other": TOWERS.modules["loss"]}, TOWERS.edges, "loss, other are all losses; give one"),
        (TOWERS.modules, (), "modules.loss: no tower enters it"),
        (
            changed_loss(replicas=(replica((1, 3)),)),
            TOWERS.edges,
            r"ranks: \[1, 3\] must be the ranks of the last stages",
        ),
        (changed_loss(replicas=(replica((1, 3, 4)),)), TOWERS.edges, "with tp_size 1"),
        (changed_loss(replicas=(replica(1), replica(3))), TOWERS.edges, "has 2 stages; a loss has one replica"),
        (
            changed_loss(num_microbatches=2),
            TOWERS.edges,
            "modules.image.num_microbatches: 3 is no multiple of loss's 2",
        ),
        (changed_loss(num_microbatches=0), TOWERS.edges, "modules.loss.num_microbatches: is 0; give at least 1"),
        (
            {**TOWERS.modules, "text": replace(TOWERS.modules["text"], replicas=(replica(4),))},
            (*TOWERS.edges, Edge(source="loss", target="text")),
            "form a cycle|a loss enters no other",
        ),
    ],
)
def test_a_wrong_loss_is_named(modules: dict[str, ModulePlan], edges: tuple[Edge, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Plan(modules=modules, edges=edges, num_microbatches=2)


def test_recomputation_names_modules() -> None:
    with pytest.raises(ValueError, match="recompute_features: there is no module 'audio'"):
        replace(TOWERS, recompute_features=("audio",))


def _sharing(*replicas: Replica, number: int = 2, **changes: Any) -> Plan:
    planned = replace(language_model(*replicas), fully_sharded=True, sharded_replicas=number)
    return Plan(modules={"llm": replace(planned, **changes)}, edges=(), num_microbatches=1)


def test_replicas_that_share_parameters() -> None:
    plan = _sharing(replica(0, 1), replica(2, 3))
    assert plan.modules["llm"].sharing_groups(1, 0) == [(0, 2)]
    assert Plan.from_json(plan.to_json()) == plan
    hybrid = _sharing(*(replica((4 * r, 4 * r + 1), (4 * r + 2, 4 * r + 3)) for r in range(4)))
    assert hybrid.modules["llm"].sharing_groups(3, 1) == [(10, 14), (11, 15)]
    for wrong, message in (
        (lambda: _sharing(replica(0), replica(1), replica(2)), "is 2; give a divisor of its 3 replicas"),
        (lambda: _sharing(replica(0), replica(1), fully_sharded=False), "is 2 without fully_sharded"),
        (lambda: _sharing(replica(0, 1), replica(2, (3, 4))), "need equal stages"),
        (lambda: _sharing(replica(0), replica(0)), "on the same ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
