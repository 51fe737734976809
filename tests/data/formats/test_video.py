"""Frames are those that a player shows at a time, in whichever container they are."""

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from video_files import write_video

from motet.data.example import VideoSize
from motet.data.formats.media import InMemory
from motet.data.formats.video import VideoFile
from motet.errors import UserError

pytest.importorskip("av")

FORMATS = [("a.mp4", "mpeg4"), ("a.webm", "libvpx-vp9"), ("a.mkv", "mpeg4"), ("a.avi", "mjpeg")]


def numbers(video: VideoFile, times_s: list[float]) -> list[int]:
    return [round(float(np.asarray(image).mean()) / 5) for image in video.load(times_s)]


@pytest.mark.parametrize(("name", "codec"), FORMATS)
def test_the_frames_shown_at_some_times(tmp_path: Path, name: str, codec: str) -> None:
    video = VideoFile(write_video(tmp_path / name, 40, codec=codec))
    assert video.size() == VideoSize(48, 64, 40, 4.0)
    # The last ones are reached by seeking.
    assert numbers(video, [0, 0.05, 0.1, 0.35, 3.5, 3.99]) == [0, 0, 1, 3, 35, 39]
    assert numbers(video, [3.5]) == [35]
    assert video.load([0])[0].mode == "RGB"


def test_a_video_inside_another_file(tmp_path: Path) -> None:
    content = write_video(tmp_path / "a.mp4", 12).read_bytes()
    assert numbers(VideoFile(InMemory("shard: a.mp4", content)), [0.5]) == [5]


def test_a_video_that_was_recorded_upright(tmp_path: Path) -> None:
    """Phones write frames that lie on their side, and a matrix that turns them."""
    path = write_video(tmp_path / "a.mp4", 3, size=(32, 64))
    content = path.read_bytes()
    matrix = b"".join(n.to_bytes(4, "big", signed=True) for n in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
    turned = b"".join(n.to_bytes(4, "big", signed=True) for n in (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30))
    start = content.index(matrix, content.index(b"tkhd"))
    path.write_bytes(content[:start] + turned + content[start + len(turned) :])
    video = VideoFile(path)
    assert (video.size().height, video.size().width) == (64, 32)
    assert video.load([0])[0].size == (32, 64)


def test_files_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(UserError, match=r"text\.mp4: cannot be decoded as a video"):
        VideoFile(tmp_path / "text.mp4").size()
    with pytest.raises(UserError, match=r"gone\.mp4: there is no such file"):
        VideoFile(tmp_path / "gone.mp4").size()
    soundfile.write(tmp_path / "sound.wav", np.zeros(4000), 8000)
    with pytest.raises(UserError, match=r"sound\.wav: has no pictures"):
        VideoFile(tmp_path / "sound.wav").size()


def test_a_video_cut_short_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    content = write_video(tmp_path / "a.mkv", 100).read_bytes()
    video = VideoFile(InMemory("cut.mkv", content[: len(content) // 2]))
    assert video.size().num_frames == 100
    with pytest.raises(UserError, match=r"cut\.mkv: is truncated before 9\.90 s"):
        video.load([0, 9.9])


def test_without_pyav_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"a\.mp4: videos need PyAV, which is not installed; pip install 'motet\[vid"):
        VideoFile(tmp_path / "a.mp4").size()
