"""Video files (exact, flat-memory reading and incremental, kill-safe writing) and encoded training data."""

from .align import Alignment, EpisodeAlignmentError, align_check, alignment
from .episode_writer import EpisodeWriter
from .episodes import EpisodeDataset, EpisodesInfo
from .latent_dataset import DatasetError, LatentVideoDataset
from .prompt_dataset import PromptDataset
from .realestate10k import ImportReport, import_realestate10k
from .recording import make_world, record
from .video_reader import VideoDecodeError, VideoReader, usable_backends
from .video_writer import VideoWriteError, VideoWriter

__all__ = [
    "Alignment",
    "DatasetError",
    "EpisodeAlignmentError",
    "EpisodeDataset",
    "EpisodeWriter",
    "EpisodesInfo",
    "ImportReport",
    "LatentVideoDataset",
    "PromptDataset",
    "VideoDecodeError",
    "VideoReader",
    "VideoWriteError",
    "VideoWriter",
    "align_check",
    "alignment",
    "import_realestate10k",
    "make_world",
    "record",
    "usable_backends",
]
