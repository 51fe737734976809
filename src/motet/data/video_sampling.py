"""Sampling of a video's frames: a function of its header and the run file only. Imports no torch.

So planning, `motet data-stats` and every rank of a training derive the same frames, and decoding must find them.
"""

from motet.config import VideoConfig
from motet.data.example import VideoSize
from motet.errors import UserError


def frame_times(
    video: VideoSize, sampling: VideoConfig, *, tokens_per_patch: int = 1, frames_per_patch: int = 1
) -> tuple[float, ...]:
    """The times of the frames, in seconds from the video's beginning, ascending.

    Args:
        tokens_per_patch: what `frames_per_patch` frames together, or fewer at the end, take in the language model.

    Raises `UserError` if one patch alone takes more than `max_tokens`.
    """
    wanted = sampling.frames or int(video.duration_s * (sampling.fps or 1.0) + 1e-6)
    number = max(1, min(wanted, sampling.max_frames, video.num_frames))
    if sampling.max_tokens is not None:
        most = sampling.max_tokens // tokens_per_patch * frames_per_patch
        if not most:
            raise UserError(
                f"data.video.max_tokens: is {sampling.max_tokens}, but a frame of {video.height} x {video.width} "
                f"pixels takes {tokens_per_patch} tokens; give at least these, or let the processor make smaller images"
            )
        number = min(number, most)
    if number == 1:
        return (video.duration_s / 2,)
    last_s = video.duration_s * (video.num_frames - 1) / video.num_frames
    return tuple(last_s * i / (number - 1) for i in range(number))
