"""The phases of a training: a run file for each, made from the whole one."""

import json
from typing import Any

from motet.config.run_file import RunConfig, set_value
from motet.errors import UserError
from motet.strict_parsing import parse_strictly


def phases_of(config: RunConfig) -> dict[str, RunConfig]:
    """The run of each phase by its name, in their order: with its own steps and values, and a folder of its own in
    `train.output`, where it leaves the checkpoint from whose weights the next one starts.

    Raises `UserError` naming a value that is wrong."""
    return {phase.name: _run_of(config, number) for number, phase in enumerate(config.train.phases)}


def chosen_run(config: RunConfig) -> RunConfig:
    """The run that a command processes: the whole run, or the phase that `train.only_phase` names.

    Raises `UserError` where there are phases and none is named."""
    if not config.train.phases:
        return config
    phases = phases_of(config)
    if config.train.only_phase is None:
        raise UserError(
            f"train.phases: are {', '.join(phases)}; this command needs one of them: add --set train.only_phase="
            f"{next(iter(phases))}"
        )
    return phases[config.train.only_phase]


def _run_of(config: RunConfig, number: int) -> RunConfig:
    phase = config.train.phases[number]
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    train = values["train"]
    for key in ("phases", "only_phase"):
        train.pop(key, None)
    for key, value in phase.set.items():
        set_value(values, key, value, f"train.phases[{number}].set.{key}")
    train = values["train"]
    train["steps"] = phase.steps
    train["output"] = f"{config.train.output}/{phase.name}"
    train["checkpoint_every"] = train.get("checkpoint_every") or phase.steps
    if number:
        before = config.train.phases[number - 1]
        train["start_from"] = f"{config.train.output}/{before.name}/checkpoints/step_{before.steps:08d}"
    return parse_strictly(RunConfig, json.dumps(values), what=f"train.phases[{number}] ({phase.name})")
