"""Video files (exact, flat-memory reading and incremental, kill-safe writing) and encoded training data."""

from .latent_dataset import DatasetError, LatentVideoDataset
from .prompt_dataset import PromptDataset
from .video_reader import VideoDecodeError, VideoReader, usable_backends
from .video_writer import VideoWriteError, VideoWriter

__all__ = [
    "DatasetError",
    "LatentVideoDataset",
    "PromptDataset",
    "VideoDecodeError",
    "VideoReader",
    "VideoWriteError",
    "VideoWriter",
    "usable_backends",
]
