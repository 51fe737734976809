"""Short ways to write plans and batches in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.plan import Edge, ModuleKind, ModulePlan, Plan, Replica, Stage
from motet.schedule.routes import Routes, derive_routes


def replica(*groups: int | tuple[int, ...]) -> Replica:
    """One layer per stage; each stage's rank or group of ranks."""
    ranks = [(group,) if isinstance(group, int) else group for group in groups]
    return Replica(
        stages=tuple(Stage(layers=(i, i + 1), ranks=group, tp_size=len(group)) for i, group in enumerate(ranks))
    )


def module(
    *replicas: Replica,
    kind: ModuleKind = "encoder",
    trainable: tuple[tuple[int, int], ...] | None = None,
    loss_weight: float = 0.0,
    copy_of: str | None = None,
    tied: tuple[tuple[int, int], ...] = (),
) -> ModulePlan:
    """All layers are trainable unless told otherwise."""
    num_layers = replicas[0].stages[-1].layers[1]
    return ModulePlan(
        kind=kind,
        num_layers=num_layers,
        replicas=replicas,
        trainable=((0, num_layers),) if trainable is None else trainable,
        loss_weight=loss_weight,
        copy_of=copy_of,
        tied=tied,
    )


def language_model(*replicas: Replica, trainable: tuple[tuple[int, int], ...] | None = None) -> ModulePlan:
    return module(*replicas, kind="language_model", trainable=trainable, loss_weight=1.0)


def samples(num: int, modules: Sequence[str], lacking: Mapping[int, Sequence[str]] | None = None) -> list[Sample]:
    """Each sample has every module, but for those that `lacking` names for its index."""
    return [
        Sample(
            id=f"sample{i}",
            layouts={name: (Segment(3),) for name in modules if name not in (lacking or {}).get(i, ())},
        )
        for i in range(num)
    ]


def routes_of(plan: Plan, batch: Sequence[Sample] | None = None) -> Routes:
    """With one sample per microbatch, unless a batch is given."""
    if batch is None:
        batch = samples(plan.num_microbatches, [n for n, m in plan.modules.items() if m.copy_of is None])
    return derive_routes(plan, contiguous_assignment(plan, batch), batch)


def chain(num_stages: int, num_microbatches: int) -> Plan:
    """A language model alone, a rank per stage."""
    return Plan(
        modules={"llm": language_model(replica(*range(num_stages)))}, edges=(), num_microbatches=num_microbatches
    )


def interleaved(num_groups: int, num_chunks: int, num_microbatches: int, *, num_encoder_stages: int = 0) -> Plan:
    """A language model whose stages go round its ranks; an encoder before it on ranks of its own, if it has stages."""
    return _after_vision(list(range(num_groups)) * num_chunks, num_encoder_stages, num_microbatches)


def v_shaped(num_groups: int, num_microbatches: int, *, num_encoder_stages: int = 0) -> Plan:
    """A language model whose stages go through its ranks and back; an encoder before it, if it has stages."""
    there = list(range(num_groups))
    return _after_vision([*there, *reversed(there)], num_encoder_stages, num_microbatches)


def _after_vision(ranks: list[int], num_encoder_stages: int, num_microbatches: int) -> Plan:
    llm = language_model(replica(*ranks))
    if not num_encoder_stages:
        return Plan(modules={"llm": llm}, edges=(), num_microbatches=num_microbatches)
    first = 1 + max(ranks)
    return Plan(
        modules={"vision": module(replica(*range(first, first + num_encoder_stages))), "llm": llm},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=num_microbatches,
    )


def vision_audio_llm(num_microbatches: int, *, vision_trainable: tuple[tuple[int, int], ...] | None = None) -> Plan:
    """Modality parallelism: 2 stages of vision, 1 of audio, 3 of the language model, each on a rank of its own."""
    return Plan(
        modules={
            "vision": module(replica(0, 1), trainable=vision_trainable),
            "audio": module(replica(2)),
            "llm": language_model(replica(3, 4, 5)),
        },
        edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
        num_microbatches=num_microbatches,
    )


def contrastive(
    towers: Mapping[str, Sequence[Replica]],
    *,
    num_batches: int = 1,
    num_microbatches: Mapping[str, int] | None = None,
    schedule: str = "distmm_pipe",
    locked: Sequence[str] = (),
) -> Plan:
    """Towers and their loss. `num_batches`: contrastive ones; `num_microbatches`: of each tower's replica, by default
    one for each of them. Towers that are `locked` do not train."""
    members = sorted({rank for replicas in towers.values() for r in replicas for rank in r.stages[-1].ranks})
    together = Stage(layers=(0, 1), ranks=tuple(members), cp_size=len(members))
    modules = {
        name: replace(
            module(*replicas, kind="tower", trainable=() if name in locked else None),
            num_microbatches=(num_microbatches or {}).get(name),
        )
        for name, replicas in towers.items()
    }
    loss = replace(module(Replica(stages=(together,)), kind="loss", loss_weight=1.0), num_microbatches=num_batches)
    return Plan(
        modules={**modules, "loss": loss},
        edges=tuple(Edge(source=name, target="loss") for name in towers),
        num_microbatches=num_batches,
        schedule=schedule,
    )
