"""Video files: exact, flat-memory reading and incremental, kill-safe writing."""

from .video_reader import VideoDecodeError, VideoReader, usable_backends
from .video_writer import VideoWriteError, VideoWriter

__all__ = ["VideoDecodeError", "VideoReader", "VideoWriteError", "VideoWriter", "usable_backends"]
