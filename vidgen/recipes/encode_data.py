"""From videos and prompts to what training reads: latents and text embeddings, encoded once.

The folders that come out are described in [`vidgen.data.latent_dataset`] and [`vidgen.data.prompt_dataset`]. Both
functions go on where a stopped run ended.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from vidgen.data import DatasetError, VideoDecodeError, VideoReader
from vidgen.data.latent_dataset import FORMAT_VERSION, LATENT_INDEX
from vidgen.data.prompt_dataset import PROMPT_INDEX
from vidgen.models.streaming_vae import FRAMES_PER_GROUP, StreamingVAEEncoder
from vidgen.pipelines import ContextForcingPipeline, PromptPlan
from vidgen.pipelines.request import check_size
from vidgen.runtime.assets import is_hub_id
from vidgen.runtime.checkpoint import atomic_write, file_checksum, save_safetensors
from vidgen.runtime.device import select_device, select_dtype, set_threads
from vidgen.runtime.errors import VidgenError

SETTINGS_FILE = "settings.json"
PLANS_PER_SHARD = 1024
TEXT_BATCH_SIZE = 16
MAX_LINES_SHOWN = 10
# Larger than any video; whatever is larger still is a slip that would end in the middle of the work, out of memory.
MAX_SIZE, MAX_FPS = 8192, 1000


@dataclass(frozen=True)
class LatentEncoding:
    """How videos become clips.

    Attributes:
        height: pixels; the model's own if None, as for `width` and `fps`.
        width: pixels.
        fps: frames per second of the clips.
        min_seconds: shorter videos are left out.
        max_seconds: of a longer video the beginning is taken.
        device: where the models run.
        dtype: number format of the models and of the text embeddings; latents are always stored in float16.
    """

    height: int | None = None
    width: int | None = None
    fps: float | None = None
    min_seconds: float = 10.0
    max_seconds: float = 30.0
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("height", MAX_SIZE), ("width", MAX_SIZE), ("fps", MAX_FPS)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise VidgenError(f"{name}={value} must be above 0 and at most {most}.")
        if not 0 <= self.min_seconds <= self.max_seconds < math.inf:
            raise VidgenError(
                f"min_seconds={self.min_seconds}, max_seconds={self.max_seconds}; "
                "0 <= min_seconds <= max_seconds is needed."
            )


@dataclass(frozen=True)
class EncodingReport:
    """What a run did.

    Attributes:
        folder: the dataset.
        items: clips or prompt plans in it.
        encoded: how many of them this run made.
        too_short: videos left out for their length.
        broken: videos left out because they could not be read.
    """

    folder: Path
    items: int
    encoded: int
    too_short: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.folder}: {self.items} in all, {self.encoded} encoded now"
        if self.too_short:
            text += f", {len(self.too_short)} left out as too short"
        if self.broken:
            text += f", {len(self.broken)} left out as broken"
        return text


# --- videos ------------------------------------------------------------------------------------------------------


def encode_videos(
    videos: Path, captions: Path, model: str, output: Path, config: LatentEncoding, skip_broken: bool = False
) -> EncodingReport:
    """Encode captioned videos, one clip each.

    A clip that exists is not made again unless its caption changed. Several processes may each encode a part of the
    captions into one folder; a last run with all captions then only writes the index.

    Args:
        videos: folder that the captions' paths start from.
        captions: JSON lines, `{"video": "relative/path.mp4", "caption": "…"}`.
        model: pipeline folder or hub id.
        output: the dataset's folder.
        config: size, rate, length, device.
        skip_broken: finish the dataset without videos that cannot be read.

    Raises:
        DatasetError: A line of the captions is wrong (each is named), `output` holds other data or was made with other
            settings, no clip is left, or, without `skip_broken`, a video could not be read; all others are encoded.
    """
    if not videos.is_dir():
        raise DatasetError(f"{videos} is not a folder of videos.")
    entries = read_captions(captions)
    pipe = _load_pipeline(model, config.device, config.dtype)
    height, width = config.height or pipe.config.default_height, config.width or pipe.config.default_width
    check_size(pipe, height, width)
    settings = {
        **_text_settings(pipe, model),
        "height": height,
        "width": width,
        "fps": config.fps or pipe.config.fps,
        "chunk": pipe.transformer.config.num_frames_per_block,
        "channels": pipe.vae.config.z_dim,
        "latent_size": [height // pipe.vae_scale_factor_spatial, width // pipe.vae_scale_factor_spatial],
        "min_seconds": config.min_seconds,
        "max_seconds": config.max_seconds,
    }
    _check_folder(output, settings)

    clips, too_short, broken, encoded = [], [], [], 0
    for number, video, caption in tqdm(entries, desc="encoding clips", unit="clip"):
        file = f"clips/{video}.safetensors"
        frames = _finished_frames(output / file, caption)
        if frames is None:
            try:
                frames = _encode_clip(pipe, videos, video, caption, output, file, settings)
            except VideoDecodeError as error:
                tqdm.write(f"broken video, {captions} line {number}: {error}", file=sys.stderr)
                broken.append(video)
                continue
            encoded += bool(frames)
        if not frames:
            tqdm.write(f"too short, {captions} line {number}: {video}", file=sys.stderr)
            too_short.append(video)
            continue
        clips.append({"file": file, "frames": frames, "bytes": (output / file).stat().st_size})

    if broken and not skip_broken:
        raise DatasetError(
            f"{len(broken)} of {len(entries)} videos could not be read, the first is {broken[0]!r}; {len(clips)} clips"
            " are encoded. Repair these videos and run again, or finish the dataset without them by --skip-broken."
        )
    if not clips:
        raise DatasetError(
            f"no clip is left of {len(entries)} videos: {len(too_short)} are shorter than {config.min_seconds:g} s or "
            f"than one chunk, {len(broken)} are broken."
        )
    _write_json(
        output / LATENT_INDEX,
        {**settings, "num_clips": len(clips), "clips": clips, "too_short": too_short, "broken": broken},
    )
    return EncodingReport(output, len(clips), encoded, tuple(too_short), tuple(broken))


def read_captions(path: Path) -> list[tuple[int, str, str]]:
    """Read `(line number, video, caption)` of each line of a captions file.

    Raises:
        DatasetError: The file is missing or empty, or names every line that is malformed, leaves the folder of videos,
            or repeats a video.
    """
    seen: dict[str, int] = {}

    def parse(line: str, number: int) -> tuple[int, str, str]:
        entry = _parse_object(line, {"video", "caption"})
        video, caption = entry.get("video"), entry.get("caption")
        if not (isinstance(video, str) and video and isinstance(caption, str) and caption.strip()):
            raise ValueError('expected {"video": "relative/path.mp4", "caption": "…"}')
        relative = PurePosixPath(video)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"video {video!r} is not a path below the folder of videos")
        if str(relative) in seen:
            raise ValueError(f"video {video!r} is already in line {seen[str(relative)]}")
        seen[str(relative)] = number
        return number, str(relative), caption

    return _parse_lines(path, parse)


def nearest_frames(num_frames: int, source_fps: float, fps: float) -> np.ndarray:
    """Frames that show a video at another rate: for time `k / fps` the source frame nearest to it.

    Args:
        num_frames: Frames of the source.
        source_fps: Its frames per second, taken as constant.
        fps: Frames per second wanted.

    Returns:
        int64, indices of source frames, as many as the source lasts.
    """
    ratio = source_fps / fps
    nearest = np.floor(np.arange(math.ceil(num_frames / ratio) + 1) * ratio + 0.5)
    return nearest[nearest < num_frames].astype(np.int64)


def fit_pixels(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Crop frames around their center to the shape wanted, and resize them.

    Args:
        frames: uint8 (n, height, width, 3).
        height: Pixels wanted.
        width: Pixels wanted.

    Returns:
        float32 (1, 3, n, height, width) in [-1, 1].
    """
    given_height, given_width = frames.shape[1:3]
    scale = max(height / given_height, width / given_width)
    crop_height = min(given_height, max(1, round(height / scale)))
    crop_width = min(given_width, max(1, round(width / scale)))
    top, left = (given_height - crop_height) // 2, (given_width - crop_width) // 2
    pixels = frames[:, top : top + crop_height, left : left + crop_width].permute(0, 3, 1, 2).float()
    if (crop_height, crop_width) != (height, width):
        pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return (pixels / 127.5 - 1).transpose(0, 1).unsqueeze(0)


def _encode_clip(
    pipe: ContextForcingPipeline,
    videos: Path,
    video: str,
    caption: str,
    output: Path,
    file: str,
    settings: dict[str, Any],
) -> int:
    """Writes one clip; returns its latent frames, 0 (and no file) for a video that is too short."""
    fps, chunk = settings["fps"], settings["chunk"]
    with VideoReader(videos / video) as reader:
        if not reader.fps > 0:
            raise VideoDecodeError(f"{reader.path} names no frame rate.")
        if len(reader) / reader.fps < settings["min_seconds"]:
            return 0
        indices = nearest_frames(len(reader), reader.fps, fps)
        # A hair more, because 0.1 * 30 is not 3.
        indices = indices[: int(min(settings["max_seconds"] * fps, len(indices)) + 1e-6)]
        num_latents = (len(indices) - 1) // FRAMES_PER_GROUP + 1
        num_latents -= num_latents % chunk
        if not num_latents:
            return 0
        indices = indices[: (num_latents - 1) * FRAMES_PER_GROUP + 1]
        encoder, latents = StreamingVAEEncoder(pipe.vae), []
        for frames in _read_groups(reader, indices):
            try:
                pixels = fit_pixels(torch.from_numpy(frames).to(pipe.device), settings["height"], settings["width"])
                latents.append(encoder.encode(pixels)[0].half().cpu())
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                raise VidgenError(
                    f"frames of {settings['width']}x{settings['height']} pixels do not fit into the memory of "
                    f"{pipe.device}; ask for a smaller height and width."
                ) from error
    latents = torch.cat(latents, dim=1)
    if not torch.isfinite(latents).all():
        raise VidgenError(
            f"the latents of {video} overflow float16 in a VAE of {pipe.vae.dtype}; encode with dtype float32."
        )
    embeds, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
    metadata = {"source": video, "seconds": f"{len(indices) / fps:.3f}", "caption": caption}
    _claim_folder(output, settings)
    save_safetensors({"latents": latents, "prompt_embeds": embeds[0]}, output / file, metadata)
    return num_latents


def _is_out_of_memory(error: RuntimeError) -> bool:
    # On CPUs torch has no class of its own for it.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _read_groups(reader: VideoReader, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the frames in the groups that the VAE takes: one, then four at a time."""
    shown, image = -1, np.empty(0)
    for start in [0, *range(1, len(indices), FRAMES_PER_GROUP)]:
        group = indices[start : start + FRAMES_PER_GROUP] if start else indices[:1]
        wanted, places = np.unique(group, return_inverse=True)
        # A frame repeated across groups is kept: asking for it again would decode from the key frame before it.
        new = [int(index) for index in wanted if index != shown]
        frames = reader.get_batch(new)
        if len(new) < len(wanted):
            frames = np.concatenate([image[None], frames])
        shown, image = int(wanted[-1]), frames[-1]
        yield frames[places]


def _finished_frames(path: Path, caption: str) -> int | None:
    """Latent frames of a clip that is there with this caption."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            frames = file.get_slice("latents").get_shape()[1]
            return frames if file.metadata()["caption"] == caption else None
    except (SafetensorError, KeyError, TypeError):
        return None  # damaged since it was written: made again


# --- prompts -----------------------------------------------------------------------------------------------------


def encode_prompts(
    prompts: Path,
    model: str,
    output: Path,
    limit: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> EncodingReport:
    """Encode prompts and prompt plans, 1024 to a shard.

    Args:
        prompts: `.txt` with a prompt per line, or `.jsonl` with `{"prompt": "…"}` or
            `{"prompts": [["…", seconds], …]}` per line, where the last prompt's seconds may be null.
        model: pipeline folder or hub id.
        output: the dataset's folder.
        limit: take only so many, from the beginning.
        device: where the text encoder runs.
        dtype: its number format, and that of the embeddings.

    Raises:
        DatasetError: A line is wrong (each is named), or `output` holds other data or was made with other settings.
    """
    if limit is not None and limit < 1:
        raise VidgenError(f"limit={limit} must be at least 1.")
    plans = read_prompts(prompts)[:limit]
    pipe = _load_pipeline(model, device, dtype)
    settings = {
        **_text_settings(pipe, model),
        "fps": pipe.config.fps,
        "num_plans": len(plans),
        "prompts_crc32": file_checksum(prompts),
    }
    _check_folder(output, settings)

    shards, encoded = [], 0
    with tqdm(total=len(plans), desc="encoding prompts", unit="prompt") as progress:
        for first in range(0, len(plans), PLANS_PER_SHARD):
            part = plans[first : first + PLANS_PER_SHARD]
            file = f"prompts_{first // PLANS_PER_SHARD:05d}.safetensors"
            if not (output / file).is_file():
                shard = _encode_shard(pipe, part, progress)
                _claim_folder(output, settings)
                save_safetensors(shard, output / file)
                encoded += len(part)
            shards.append({"file": file, "plans": len(part)})
            progress.update(first + len(part) - progress.n)
    _write_json(output / PROMPT_INDEX, {**settings, "shards": shards})
    return EncodingReport(output, len(plans), encoded)


def read_prompts(path: Path) -> list[PromptPlan]:
    """Read a prompt plan from each line of a `.txt` or `.jsonl` file; blank lines are skipped.

    Raises:
        DatasetError: The file is missing, empty or of another kind, or names every line that cannot be read.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise DatasetError(f"{path} is not a file of prompts; use .txt or .jsonl.")

    def parse(line: str, number: int) -> PromptPlan:
        if path.suffix == ".txt":
            return PromptPlan.parse(line)
        entry = _parse_object(line, {"prompt", "prompts"})
        prompt, pairs = entry.get("prompt"), entry.get("prompts")
        if len(entry) != 1 or not isinstance(prompt if pairs is None else pairs, str if pairs is None else list):
            raise ValueError('expected {"prompt": "…"} or {"prompts": [["…", seconds], …]}')
        return PromptPlan.parse(prompt if pairs is None else pairs)

    return _parse_lines(path, parse)


def _encode_shard(pipe: ContextForcingPipeline, plans: list[PromptPlan], progress: tqdm) -> dict[str, torch.Tensor]:
    texts = [segment.prompt for plan in plans for segment in plan.segments]
    rows = []
    for first in range(0, len(texts), TEXT_BATCH_SIZE):
        batch = texts[first : first + TEXT_BATCH_SIZE]
        for embeds in pipe.encode_prompt(batch, do_classifier_free_guidance=False)[0].cpu():
            # The pipeline pads with zeros, so rows of zeros at the end need no storage.
            used = embeds.ne(0).any(dim=1).nonzero()
            rows.append(embeds[: int(used.max()) + 1 if len(used) else 1].clone())
        progress.update(len(plans) * len(batch) // len(texts))
    return {
        "embeds": torch.cat(rows),
        "token_offsets": torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        "plan_offsets": torch.tensor([0, *(len(plan.segments) for plan in plans)]).cumsum(0),
        "starts": torch.tensor([start for plan in plans for start in plan.starts], dtype=torch.float64),
    }


# --- shared ------------------------------------------------------------------------------------------------------


def _load_pipeline(model: str, device: str | None, dtype: str | None) -> ContextForcingPipeline:
    if not is_hub_id(model) and not Path(model, "model_index.json").is_file():
        raise VidgenError(f"model {model!r} is not a pipeline folder: it has no model_index.json.")
    torch_device = select_device(device)
    set_threads()
    return ContextForcingPipeline.from_pretrained(model, dtype=select_dtype(dtype, torch_device)).to(torch_device)


def _text_settings(pipe: ContextForcingPipeline, model: str) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "model": model,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "text_length": min(pipe.config.max_sequence_length, pipe.tokenizer.model_max_length),
        "text_dim": pipe.transformer.config.text_dim,
    }


def _claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Binds a dataset's folder to its settings, which is due when there is something to store and not before."""
    _check_folder(folder, settings)
    if not (folder / SETTINGS_FILE).is_file():
        _write_json(folder / SETTINGS_FILE, settings)


def _check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Makes sure that a dataset's folder is free, or was begun with the same settings."""
    path = folder / SETTINGS_FILE
    try:
        if not path.is_file():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise DatasetError(f"{folder} holds something else; choose another folder.")
            return
    except OSError as error:
        raise DatasetError(f"cannot use the folder {folder}: {error.strerror}; choose another one.") from error
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(f"{path} is damaged: {error}.") from error
    changed = [name for name in settings if not isinstance(begun, dict) or begun.get(name) != settings[name]]
    if changed:
        given = ", ".join(f"{name}={settings[name]!r} instead of {begun.get(name)!r}" for name in changed)
        raise DatasetError(
            f"{folder} was begun with other settings: this run has {given}. Use the same ones, or another folder."
        )


def _parse_lines(path: Path, parse: Callable[[str, int], Any]) -> list[Any]:
    """Applies `parse(line, number)` to every line that is not blank, and reports all lines it refuses at once."""
    if not path.is_file():
        raise DatasetError(f"{path} is not a file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text; save it as UTF-8.") from error
    parsed, errors = [], []
    # Not splitlines: it also splits at separators that JSON allows inside of strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(line.strip(), number))
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = f"; and {len(errors) - MAX_LINES_SHOWN} more" if len(errors) > MAX_LINES_SHOWN else ""
        raise DatasetError(f"{path}, {'; '.join(errors[:MAX_LINES_SHOWN])}{more}")
    if not parsed:
        raise DatasetError(f"{path} is empty.")
    return parsed


def _parse_object(line: str, keys: set[str]) -> dict[str, Any]:
    entry = json.loads(line)
    if not isinstance(entry, dict) or set(entry) - keys:
        raise ValueError(f"expected a JSON object with {' and '.join(sorted(keys))} only, not {line[:80]!r}")
    return entry


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
