"""The closed forms against schedules written down as text. A change of a golden file is a change of what is run."""

from pathlib import Path

import pytest
from plans import chain, routes_of, samples, vision_audio_llm

from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.validate import validate

GOLDEN = Path(__file__).parent.parent / "golden"

CASES: dict[str, Routes] = {
    "chain_4x8": routes_of(chain(4, 8)),
    "vision_audio_llm_x6": routes_of(vision_audio_llm(6)),
    # Vision is frozen, all of it: no backward and no limit on how far it runs ahead.
    "frozen_vision_x4": routes_of(vision_audio_llm(4, vision_trainable=())),
    # Microbatch 1 has no image, 2 neither image nor sound, 6 no sound.
    "missing_modalities_x8": routes_of(
        vision_audio_llm(8),
        samples(8, ["vision", "audio", "llm"], {1: ["vision"], 2: ["vision", "audio"], 6: ["audio"]}),
    ),
}


@pytest.mark.parametrize("generator", sorted(GENERATORS))
@pytest.mark.parametrize("case", CASES)
def test_closed_forms_equal_the_golden_files(case: str, generator: str) -> None:
    golden = (GOLDEN / f"{generator}_{case}.txt").read_text()
    schedule = GENERATORS[generator](CASES[case])
    body = "".join(f"{line}\n" for line in golden.splitlines() if not line.startswith("#"))
    assert schedule.text() + "\n" == body
    assert Schedule.parse(golden) == schedule
    validate(schedule, Dependencies(CASES[case]))


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {
        f"{generator}_{case}" for generator in GENERATORS for case in CASES
    }
