from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from motet.data.formats.media import ImageFile, SoundFile
from motet.errors import UserError


def write_image(path: Path, mode: str = "RGB") -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (60, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    return path


@pytest.mark.parametrize(("name", "mode"), [("a.png", "RGB"), ("a.jpg", "RGB"), ("a.png", "L"), ("a.png", "RGBA")])
def test_an_images_header_tells_its_size(tmp_path: Path, name: str, mode: str) -> None:
    image = ImageFile(write_image(tmp_path / name, mode))
    assert image.size() == (60, 40)
    assert image.load().mode == "RGB"
    assert image.load().size == (40, 60)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_a_sounds_header_tells_its_length(tmp_path: Path, name: str) -> None:
    soundfile.write(tmp_path / name, np.zeros(4000), 8000)
    sound = SoundFile(tmp_path / name)
    assert sound.size() == (4000, 8000)
    assert sound.load().shape == (4000,)
    assert sound.load().dtype == np.float32


def test_channels_are_averaged(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.tile([0.5, -0.25], (100, 1)), 8000)
    assert SoundFile(tmp_path / "a.wav").load() == pytest.approx(np.full(100, 0.125), abs=1e-4)


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(UserError, match=r"a\.png: is no image that Pillow reads; replace the file"):
        ImageFile(tmp_path / "a.png").size()


def test_an_image_cut_short_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png")
    path.write_bytes(path.read_bytes()[:-2000])
    assert ImageFile(path).size() == (60, 40)
    with pytest.raises(UserError, match=r"a\.png: cannot be decoded .*; replace the image"):
        ImageFile(path).load()


def test_a_missing_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.png: there is no such file"):
        ImageFile(tmp_path / "a.png").size()


def test_a_file_that_is_no_sound(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("no sound")
    with pytest.raises(UserError, match=r"a\.wav: cannot be read as a sound by libsndfile"):
        SoundFile(tmp_path / "a.wav").size()


def test_an_empty_clip(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0), 8000)
    with pytest.raises(UserError, match=r"a\.wav: is an empty clip"):
        SoundFile(tmp_path / "a.wav").size()


def test_a_clip_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(0).uniform(-1, 1, 20_000), 8000)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"a\.flac: .*; replace the clip"):
        SoundFile(path).load()


def test_samples_that_are_no_numbers(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([0.0, np.nan, 0.0], np.float32), 8000, subtype="FLOAT")
    with pytest.raises(UserError, match="not finite"):
        SoundFile(tmp_path / "a.wav").load()


def test_a_missing_clip(tmp_path: Path) -> None:
    for action in (SoundFile.size, SoundFile.load):
        with pytest.raises(UserError, match=r"a\.wav: there is no such file"):
            action(SoundFile(tmp_path / "a.wav"))
