"""What planners know of families without torch is what the families themselves say."""

from motet.families.encoders.encoder_families import ENCODER_FAMILIES
from motet.planner.layouts.degrees import NO_CONTEXT_PARALLELISM


def test_encoders_whose_tokens_cannot_be_shared() -> None:
    assert set(NO_CONTEXT_PARALLELISM) == {
        name for name, family in ENCODER_FAMILIES.items() if not family.has_full_attention
    }
