"""The closed forms against schedules written down as text. A change of a golden file is a change of what is run."""

import pytest
from checkout import ROOT
from plans import chain, interleaved, language_model, module, replica, routes_of, samples, v_shaped, vision_audio_llm

from motet.plan import Edge, Plan
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.validate import validate

GOLDEN = ROOT / "tests/schedule/golden"

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
    "4x2x8": routes_of(interleaved(4, 2, 8)),
    # 2 does not divide 5; the encoder keeps as many in flight as the first chunk needs.
    "2x2x5_after_vision": routes_of(interleaved(2, 2, 5, num_encoder_stages=1)),
    "v_4x8": routes_of(v_shaped(4, 8)),
    # Fewer microbatches than 2 P.
    "v_2x3_after_vision": routes_of(v_shaped(2, 3, num_encoder_stages=1)),
    # Encoders on the language model's two ranks: vision two layers each, audio frozen and on the first.
    "colocated_2x4": routes_of(
        Plan(
            modules={
                "vision": module(replica(0, 0, 1, 1)),
                "audio": module(replica(0), trainable=()),
                "llm": language_model(replica(0, 1)),
            },
            edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
            num_microbatches=4,
        )
    ),
}

WHOLE = ["chain_4x8", "vision_audio_llm_x6", "frozen_vision_x4", "missing_modalities_x8"]
ROUND = ["4x2x8", "2x2x5_after_vision"]
GOLDEN_OF = {
    "gpipe": WHOLE,
    "1f1b": WHOLE,
    "interleaved_1f1b": ROUND,
    "interleaved_1f1b_adjusted": ROUND,
    "zero_bubble_h1": WHOLE,
    "zero_bubble_h2": ["chain_4x8", "missing_modalities_x8"],
    "zero_bubble_v": ["v_4x8", "v_2x3_after_vision"],
    "eager_1f1b": ["chain_4x8", "missing_modalities_x8"],
    "bubble_filling": ["colocated_2x4"],
    "critical_path": ["chain_4x8", "colocated_2x4"],
    "iterated_critical_path": ["colocated_2x4"],
    "dip": ["colocated_2x4", "missing_modalities_x8"],
}
PAIRS = [(generator, case) for generator, cases in GOLDEN_OF.items() for case in cases]


@pytest.mark.parametrize(("generator", "case"), PAIRS)
def test_closed_forms_equal_the_golden_files(generator: str, case: str) -> None:
    golden = (GOLDEN / f"{generator}_{case}.txt").read_text()
    schedule = GENERATORS[generator](CASES[case])
    body = "".join(f"{line}\n" for line in golden.splitlines() if not line.startswith("#"))
    assert schedule.text() + "\n" == body
    assert Schedule.parse(golden) == schedule
    validate(schedule, Dependencies(CASES[case]))


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {f"{generator}_{case}" for generator, case in PAIRS}
