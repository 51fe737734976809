"""Videos in files, read by PyAV (the extra `video`), which is imported when the first one is opened. Imports no torch.

A frame is named by a time: it is the one that a player shows at that time. So neither the number of frames that the
header states nor variable frame rates matter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from motet.config import USUAL_LIMITS, FileLimits
from motet.data.example import VideoSize
from motet.errors import UserError

SEEK_S = 2.0
"""Distance to a frame above which seeking a key frame costs less than decoding the frames in between."""

TOLERANCE_S = 1e-3
"""Containers round times to milliseconds."""

LAST_FRAME_S = 1.0
"""Longest time for which the last frame is shown: the sound may be longer than the pictures."""


@dataclass(frozen=True)
class VideoFile:
    path: Any
    """A `Path` or a `motet.data.formats.media.StoredFile`."""
    limits: FileLimits = USUAL_LIMITS

    def size(self) -> VideoSize:
        """From the header and the first frame. Raises `UserError` if it is not a video, or PyAV is not installed."""
        return self._size

    @cached_property
    def _size(self) -> VideoSize:
        with self._opened() as (container, stream):
            duration_s = (
                float(stream.duration * stream.time_base) if stream.duration else (container.duration or 0) / 1e6
            )
            rate = float(stream.average_rate or 0)
            num_frames = stream.frames or round(duration_s * rate)
            if not duration_s and rate:
                duration_s = num_frames / rate
            if not (num_frames and duration_s):
                raise UserError(
                    f"{self.path}: its header does not state its duration; rewrite it, e.g. by "
                    "ffmpeg -i OLD -c copy NEW.mp4"
                )
            if stream.width * stream.height > self.limits.image_pixels:
                raise UserError(
                    f"{self.path}: has frames of {stream.height} x {stream.width} pixels; replace the video, or give "
                    f"more than data.limits.image_pixels: {self.limits.image_pixels}"
                )
            first = next(container.decode(stream), None)
            if first is None:
                raise UserError(f"{self.path}: has no frame; replace the file, or leave it out")
            height, width = first.height, first.width
            if round(first.rotation) % 180:
                height, width = width, height
            return VideoSize(height, width, num_frames, duration_s)

    def load(self, times_s: Sequence[float]) -> list[Image.Image]:
        """The frames shown at some times, in ascending order, as RGB images, turned upright. Raises `UserError` if the
        file ends before the last of them."""
        with self._opened() as (container, stream):
            if len(times_s) and self._size.duration_s < times_s[-1]:
                raise UserError(
                    f"{self.path}: lasts {self._size.duration_s:.2f} s, so it has no frame at {times_s[-1]:.2f} s"
                )
            return list(self._frames(container, stream, times_s))

    def _frames(self, container: Any, stream: Any, times_s: Sequence[float]) -> Iterator[Image.Image]:
        start_s = float((stream.start_time or 0) * stream.time_base)
        frames = container.decode(stream)
        shown = coming = next(frames, None)
        for time_s in times_s:
            if coming is not None and time_s - (coming.time - start_s) > SEEK_S:
                container.seek(int((time_s + start_s) / stream.time_base), stream=stream, backward=True)
                frames = container.decode(stream)
                coming = next(frames, None)
                if coming is None or coming.time - start_s > time_s + TOLERANCE_S:  # Its index is wrong.
                    container.seek(int(start_s / stream.time_base), stream=stream, backward=True)
                    frames = container.decode(stream)
                    coming = next(frames, None)
                shown = coming
            while coming is not None and coming.time - start_s <= time_s + TOLERANCE_S:
                shown, coming = coming, next(frames, None)
            if shown is None or (coming is None and time_s - (shown.time - start_s) > LAST_FRAME_S):
                raise UserError(f"{self.path}: is truncated before {time_s:.2f} s; replace the video")
            image = shown.to_image()
            yield image.rotate(shown.rotation, expand=True) if round(shown.rotation) % 360 else image

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        try:
            import av
        except ImportError:
            raise UserError(
                f"{self.path}: videos need PyAV, which is not installed; pip install 'motet[video]'"
            ) from None
        if isinstance(self.path, Path) and not self.path.is_file():
            raise UserError(f"{self.path}: there is no such file; give the path of a video")
        try:
            with av.open(str(self.path) if isinstance(self.path, Path) else self.path.open()) as container:
                if not container.streams.video:
                    raise UserError(f"{self.path}: has no pictures; give a video")
                stream = container.streams.video[0]
                stream.thread_type = "NONE"
                yield container, stream
        except (av.error.FFmpegError, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.path}: cannot be decoded as a video ({error}); replace the file") from None
