"""Two toy layers on two ranks, with an optimizer and checkpoints: what needs no language model."""

from pathlib import Path

import torch
from toy_model import toy_stage_maker

from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.runtime.checkpoint.checkpoint import CheckpointWriter
from motet.runtime.checkpoint.folder import TrainingState
from motet.runtime.engine import Engine
from motet.runtime.training.optimizer import LearningRateSchedule, Optimizer, OptimizerConfig


def toy_plan(num_layers: int = 2, *, trainable: tuple[tuple[int, int], ...] = ((0, 9),)) -> Plan:
    stages = (
        Stage(layers=(0, 1), ranks=(0,), tp_size=1),
        Stage(layers=(1, num_layers), ranks=(1,), tp_size=1),
    )
    ranges = tuple((first, min(last, num_layers)) for first, last in trainable)
    module = ModulePlan(
        kind="language_model",
        num_layers=num_layers,
        replicas=(Replica(stages=stages),),
        trainable=ranges,
        loss_weight=1.0,
    )
    return Plan(modules={"llm": module}, edges=(), num_microbatches=1)


class Toy:
    """A model and its optimizer, on this rank."""

    def __init__(self, plan: Plan) -> None:
        self.engine = Engine(plan, toy_stage_maker(plan), device=torch.device("cpu"), boundary_dtype=torch.float64)
        self.model = self.engine.model
        config = OptimizerConfig(
            learning_rate=0.1, part_learning_rates={}, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, zero1=False
        )
        schedule = LearningRateSchedule(warmup_steps=0, total_steps=9, shape="constant", min_ratio=1.0)
        self.optimizer = Optimizer(self.model.parameters, config, schedule)
        self.finished_steps = 0

    def step(self) -> None:
        for parameter in self.model.trainable():
            parameter.grad = torch.full_like(parameter, 1.0 + self.finished_steps)
        self.optimizer.step(self.finished_steps)
        self.finished_steps += 1

    def save(self, folder: Path, *, keep: int = 2, is_best: bool = False) -> Path | None:
        """Returns when it is complete."""
        writer = CheckpointWriter(folder, keep=keep)
        writer.save(self.model, self.optimizer, TrainingState(self.finished_steps, {}, ""), is_best=is_best)
        return writer.finish()

    def weights(self) -> dict[str, torch.Tensor]:
        return {p.name: p.parameter.detach().clone() for p in self.model.parameters}
