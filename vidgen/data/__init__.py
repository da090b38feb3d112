"""Video files (exact, flat-memory reading and incremental, kill-safe writing) and encoded training data."""

from .episode_writer import EpisodeWriter
from .episodes import EpisodeAlignmentError, EpisodeDataset, EpisodesInfo, align_check
from .latent_dataset import DatasetError, LatentVideoDataset
from .prompt_dataset import PromptDataset
from .recording import make_world, record
from .video_reader import VideoDecodeError, VideoReader, usable_backends
from .video_writer import VideoWriteError, VideoWriter

__all__ = [
    "DatasetError",
    "EpisodeAlignmentError",
    "EpisodeDataset",
    "EpisodeWriter",
    "EpisodesInfo",
    "LatentVideoDataset",
    "PromptDataset",
    "VideoDecodeError",
    "VideoReader",
    "VideoWriteError",
    "VideoWriter",
    "align_check",
    "make_world",
    "record",
    "usable_backends",
]
