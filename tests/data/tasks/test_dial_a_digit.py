"""Properties of the task: what an example depends on, what the splits share, what is asked and answered."""

from collections import Counter

import numpy as np
import pytest

from motet.data.tasks.dial_a_digit import (
    CELL_SIZE,
    DTMF_HZ,
    REQUESTS,
    SAMPLING_RATE,
    SLOT_S,
    DialADigit,
    DialADigitExamples,
    Dialled,
    dial,
    handwriting,
    paint,
)

TASK = DialADigit()


def contents(num: int = 2000, task: DialADigit = TASK) -> list[Dialled]:
    return [task.dialled("train", index) for index in range(num)]


def test_an_example_depends_on_seed_split_and_index_alone() -> None:
    one, again = TASK.example("train", 7), DialADigit().example("train", 7)
    assert one == again
    for modality in ("image", "audio"):
        for a, b in zip(one.media[modality], again.media[modality], strict=True):
            assert np.array_equal(np.asarray(a.load()), np.asarray(b.load()))
    others = [DialADigit(seed=1).dialled("train", i) for i in range(20)]
    assert others != contents(20)
    assert [TASK.dialled("held_out", i) for i in range(20)] != contents(20)


def test_the_splits_share_no_handwriting() -> None:
    splits = handwriting()
    scans = {split: {scan.tobytes() for digit in splits[split] for scan in digit} for split in splits}
    assert not scans["train"] & scans["held_out"]
    assert sum(len(digit) for split in splits.values() for digit in split) == 1797
    assert min(len(digit) for digit in splits["held_out"]) >= 30


def test_most_examples_are_short_and_a_few_are_long() -> None:
    lengths = Counter(len(content.seen[0]) for content in contents() if content.seen)
    assert set(lengths) == set(range(1, 9))
    assert lengths[1] > 0.3 * lengths.total() > 4 * lengths[8] > 0


@pytest.mark.parametrize("most", [1, 3, 8])
def test_lengths_are_those_that_numpys_choice_draws(most: int) -> None:
    task = DialADigit(max_digits=most, max_images=5, no_image=0.0, no_sound=1.0)
    shares = 1 / np.arange(1, most + 1)
    for index in range(50):
        rng = np.random.default_rng((task.seed, 0, index))
        rng.random()
        num_images = rng.integers(1, 6)
        expected = rng.choice(most, size=num_images, p=shares / shares.sum()) + 1
        assert [len(digits) for digits in task.dialled("train", index).seen] == expected.tolist()


def test_some_examples_lack_a_modality_and_only_what_can_be_answered_is_asked() -> None:
    every = contents()
    without_image = [content for content in every if not content.seen]
    without_sound = [content for content in every if not content.heard]
    assert 0.12 < len(without_image) / len(every) < 0.18
    assert 0.12 < len(without_sound) / len(every) < 0.18
    assert not any(content.question == "see" for content in without_image)
    assert not any(content.question == "hear" for content in without_sound)
    assert all(content.seen or content.heard for content in every)
    shares = Counter(content.question for content in every)
    assert 0.17 < shares["sum"] / len(every) < 0.23
    assert 0.8 < shares["see"] / shares["hear"] < 1.25


@pytest.mark.parametrize(("question", "answer"), [("see", "3 1 4 9"), ("hear", "2 0"), ("sum", "19")])
def test_answers(question: str, answer: str) -> None:
    assert Dialled(((3, 1, 4), (9,)), ((2, 0),), question).answer == answer


def test_several_images_and_clips() -> None:
    task = DialADigit(max_images=3, max_clips=2, no_image=0.2, no_sound=0.0)
    assert {len(content.seen) for content in contents(300, task)} == {0, 1, 2, 3}
    assert {len(content.heard) for content in contents(300, task)} == {1, 2}
    examples = DialADigitExamples(task, "train", 50)
    assert len(examples) == 50
    for index in range(50):
        example = examples[index]
        text = example.messages[0].content
        assert text.count("<image>") == len(example.media["image"])
        assert text.count("<audio>") == len(example.media["audio"])


def test_media_are_of_the_size_that_they_tell() -> None:
    for index in range(20):
        example = TASK.example("train", index)
        for image in example.media["image"]:
            loaded = image.load()
            assert (loaded.height, loaded.width) == image.size()
            assert loaded.mode == "RGB"
        for clip in example.media["audio"]:
            wave = clip.load()
            assert (len(wave), SAMPLING_RATE) == clip.size()
            assert wave.dtype == np.float32
            assert np.abs(wave).max() <= 1


def test_digits_stand_in_their_cells() -> None:
    page = np.asarray(paint((3, 1, 4, 1), "train", np.random.default_rng(0)))[..., 0]
    cells = page.reshape(3, CELL_SIZE, 3, CELL_SIZE).transpose(0, 2, 1, 3).reshape(9, -1)
    has_ink = (cells > 128).any(axis=1)
    assert has_ink.tolist() == [True] * 4 + [False] * 5


def test_each_tone_is_the_telephones() -> None:
    digits = (1, 5, 9, 0, 6)
    wave = dial(digits, np.random.default_rng(0))
    for digit, slot in zip(
        digits, np.split(wave, len(wave) // round(SLOT_S * SAMPLING_RATE))[: len(digits)], strict=True
    ):
        power = np.abs(np.fft.rfft(slot)) ** 2
        hz = np.fft.rfftfreq(len(slot), 1 / SAMPLING_RATE)
        low = hz[np.argmax(np.where(hz < 1050, power, 0))]
        high = hz[np.argmax(np.where(hz > 1050, power, 0))]
        assert abs(low - DTMF_HZ[str(digit)][0]) < 15
        assert abs(high - DTMF_HZ[str(digit)][1]) < 15


def test_who_is_denied_a_modality_gets_noise_of_the_same_size_and_the_same_question() -> None:
    index = next(i for i in range(100) if TASK.dialled("held_out", i).seen and TASK.dialled("held_out", i).heard)
    whole, denied = (TASK.example("held_out", index, denied=d) for d in ((), ("image", "audio")))
    assert whole.messages == denied.messages
    for modality in ("image", "audio"):
        assert whole.media[modality][0].size() == denied.media[modality][0].size()
    assert np.asarray(whole.media["image"][0].load()).max() > 128
    assert np.asarray(denied.media["image"][0].load()).max() < 128
    assert paint((1, 2), "train", np.random.default_rng(0), is_blank=True) != paint(
        (1, 2), "train", np.random.default_rng(0)
    )
    wave = denied.media["audio"][0].load()
    spectrum = np.abs(np.fft.rfft(wave)) ** 2
    assert spectrum.max() < 30 * spectrum.mean()


def test_drawings_ask_for_one_digit() -> None:
    task = DialADigit(drawings=0.5)
    drawings = [drawing for i in range(2000) if (drawing := task.drawing("train", i))]
    assert 0.46 < len(drawings) / 2000 < 0.54
    shares = Counter(drawing.request for drawing in drawings)
    assert set(shares) == set(REQUESTS)
    assert max(shares.values()) < 1.4 * min(shares.values())
    assert set(Counter(drawing.digit for drawing in drawings)) == set(range(10))
    for drawing in drawings:
        assert drawing.terms == () or sum(drawing.terms) == drawing.digit
        assert len(drawing.terms) == {"told": 1, "sum": 2, "seen": 0, "heard": 0}[drawing.request]


def test_what_is_to_be_drawn_is_handwriting_of_its_split() -> None:
    task = DialADigit(drawings=1.0)
    for index in range(40):
        drawing, example = task.drawing("train", index), task.example("train", index)
        assert drawing is not None
        assert example.messages[-1].content == f"{drawing.digit} <generate>"
        (target,) = example.media["generate"]
        drawn = np.asarray(target.load())[..., 0]
        assert (drawn.shape, target.size()) == ((8, 8), (8, 8))
        nearest = min(np.abs(drawn / 255 - scan).max() for scan in handwriting()["train"][drawing.digit])
        assert nearest < 1 / 128
        assert set(example.media) - {"generate"} == {"seen": {"image"}, "heard": {"audio"}}.get(drawing.request, set())


def test_drawings_follow_from_what_the_examples_have() -> None:
    task = DialADigit(drawings=1.0, no_image=1.0, no_sound=0.0)
    assert {task.drawing("train", i).request for i in range(50)} == {"told", "sum", "heard"}  # type: ignore[union-attr]


def test_without_drawings_nothing_has_changed() -> None:
    """Checkpoints keep the fingerprint of their data."""
    asks = DialADigit(drawings=0.3)
    for index in range(50):
        if asks.drawing("train", index) is None:
            assert asks.example("train", index) == TASK.example("train", index)
        assert TASK.drawing("train", index) is None
    plain, drawn = (DialADigitExamples(task, "train", 50).fingerprint for task in (TASK, asks))
    assert "drawings" not in plain
    assert drawn == f"{plain} with drawings 0.3"
