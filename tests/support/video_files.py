"""Tiny videos, written into a test's folder. Needs PyAV."""

from pathlib import Path

import numpy as np


def write_video(
    path: Path, num_frames: int, *, fps: int = 10, size: tuple[int, int] = (48, 64), codec: str = "mpeg4"
) -> Path:
    """Frame `i` is grey, of brightness 5 * (i % 50). `size`: (height, width)."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for i in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((*size, 3), 5 * (i % 50), np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path
