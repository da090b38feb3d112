"""Does a long video still show what its first frame showed, and what its prompt says?

Curves over time by the protocol of "Context Forcing: Consistent Autoregressive Video Generation with Long Context"
(arXiv 2602.06028): at a timestamp t the cosine similarity between the first frame and every frame within half a second
of t is averaged. DINOv2 features ("DINOv2: Learning Robust Visual Features without Supervision", arXiv 2304.07193) are
for structure, CLIP's picture features (arXiv 2103.00020) for semantics (CLIP-F), CLIP's text feature in place of the
first frame for the prompt (CLIP-T). The paper doesn't state the sizes of the backbones; ViT-B/14 and ViT-L/14 are the
usual ones. Its tables are the values times 100.

A high curve alone proves nothing: a frozen video scores 1, and a sudden return to the first frame scores well.
`vidgen.metrics.resets` tells these apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from vidgen.metrics.checks import check_frames, check_sequence, real_array
from vidgen.runtime.checks import check_positive, check_whole
from vidgen.runtime.device import select_device
from vidgen.runtime.errors import VidgenError, suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrameSource(Protocol):
    """Frames that are read by slices: an array, or a video reader that never holds the whole video."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class FrameFeatures(Protocol):
    """A network that describes frames one by one.

    Attributes:
        name: the network, as it belongs beside a number computed with it.
    """

    name: str

    def __call__(self, frames: FrameSource) -> np.ndarray:
        """uint8 `(frames, height, width, 3)` to float32 `(frames, dim)` of unit length."""
        ...


def read_batches(frames: FrameSource, size: int) -> Iterator[np.ndarray]:
    """All frames in order, uint8 `(frames, height, width, 3)`, at most `size` at a time.

    Raises:
        VidgenError: when the frames are of another type or shape, or there are none.
    """
    for start in range(0, max(_count(frames), 1), size):
        batch = np.ascontiguousarray(frames[start : start + size])
        check_frames(batch, axes="(frames, height, width, 3)")
        yield batch


def _count(frames: FrameSource) -> int:
    if not hasattr(frames, "__len__"):
        raise VidgenError(f"frames is a {type(frames).__name__}; expected uint8 (frames, height, width, 3).")
    return len(frames)


def unit_features(features: np.ndarray) -> np.ndarray:
    """Features of length 1 in float64, so that a dot product is a cosine.

    Args:
        features: `(frames, dim)`.

    Raises:
        VidgenError: when the shape is another, or a frame's feature is zero or not finite.
    """
    features = real_array("features", features, "(frames, dim)").astype(np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    wrong = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(wrong):
        raise VidgenError(f"The feature of frame {wrong[0]} has length {lengths[wrong[0], 0]:g}; it has no direction.")
    return features / lengths


def _window_means(
    values: np.ndarray, fps: float, seconds: Sequence[float] | None, window: float
) -> dict[float, float]:
    """Means of a per-frame value around timestamps; frame i is shown at i / fps."""
    check_positive(fps=fps, window=window)
    if window * fps < 1:
        raise VidgenError(f"window={window:g} s is less than a frame at fps={fps:g}; use at least {1 / fps:g} s.")
    duration = len(values) / fps
    if seconds is None:
        if duration + 1e-9 < 10:
            raise VidgenError(f"The video of {duration:g} s is shorter than the first timestamp, 10 s; pass seconds.")
        # Never a list: at a wrong fps a video seems to last for ages.
        seconds = takewhile(lambda second: second <= duration + 1e-9, count(10.0, 10.0))
    else:
        check_sequence("seconds", seconds)
    times = np.arange(len(values)) / fps
    curve = {}
    for second in seconds:
        check_positive(seconds=second)
        # Below half a window the first frame would be compared with itself.
        if not window / 2 < second <= duration + 1e-9:
            raise VidgenError(
                f"Timestamp {second:g} s of a video of {duration:g} s; "
                f"allowed: more than {window / 2:g} s (half the window) and at most {duration:g} s."
            )
        around = np.abs(times - second) <= window / 2 + 1e-9
        if not around.any():
            raise VidgenError(f"No frame within {window / 2:g} s of timestamp {second:g} s; use a wider window.")
        curve[float(second)] = float(values[around].mean())
    return curve


def consistency_curve(
    features: np.ndarray, fps: float, seconds: Sequence[float] | None = None, window: float = 1.0
) -> dict[float, float]:
    """Cosine similarity between the first frame and the frames around each timestamp.

    Args:
        features: `(frames, dim)`, of any length.
        fps: frames per second.
        seconds: timestamps. By default 10, 20, … up to the end of the video.
        window: seconds around a timestamp, half on either side; at the end of the video what there is of it.

    Returns:
        Mean similarity by timestamp, at most 1.

    Raises:
        VidgenError: when a timestamp lies outside the video or so early that its window holds the first frame, a
            window holds no frame, or a number isn't finite and positive.
    """
    features = unit_features(features)
    return _window_means(features @ features[0], fps, seconds, window)


def text_alignment_curve(
    features: np.ndarray,
    text_feature: np.ndarray,
    fps: float,
    seconds: Sequence[float] | None = None,
    window: float = 1.0,
) -> dict[float, float]:
    """Cosine similarity between a prompt and the frames around each timestamp (CLIP-T).

    Args:
        features: `(frames, dim)` of the pictures, from a network that embeds text into the same space.
        text_feature: `(dim,)` of the prompt.
        fps: frames per second.
        seconds: timestamps. By default 10, 20, … up to the end of the video.
        window: seconds around a timestamp, half on either side.

    Returns:
        Mean similarity by timestamp.

    Raises:
        VidgenError: as `consistency_curve`, and when the two dims differ.
    """
    features = unit_features(features)
    text = unit_features(real_array("text_feature", text_feature, "(dim)")[None])[0]
    if features.shape[1] != len(text):
        raise VidgenError(f"Frames have features of dim {features.shape[1]}, the text of dim {len(text)}.")
    return _window_means(features @ text, fps, seconds, window)


def _embed_frames(
    frames: FrameSource, embed: Callable[[np.ndarray], torch.Tensor], batch_size: int, name: str
) -> np.ndarray:
    """Run a network over frames in batches; returns float32 `(frames, dim)` of unit length."""
    features = []
    with tqdm(total=_count(frames), desc=name, unit="frame", disable=None, leave=False) as progress:
        for batch in read_batches(frames, batch_size):
            features.append(F.normalize(embed(batch).float(), dim=-1).cpu())
            progress.update(len(batch))
    return torch.cat(features).numpy()


class DINOv2Features:
    """Class token of a DINOv2 model after its last norm, by transformers.

    Pictures are resized and cropped as the model's image processor says: for the published weights the shorter side
    to 256 pixels, then the central 224 x 224.

    Args:
        model: folder in transformers' format (`config.json`, `model.safetensors`, `preprocessor_config.json`), the id
            of such a model on the Hugging Face Hub, or a loaded model.
        image_processor: of a loaded model; a folder or an id brings its own.
        device: where the model runs, by default the best of this machine.
        batch_size: frames per forward pass.
        local_files_only: never ask the hub, only the folder or the local cache.

    Raises:
        VidgenError: when the weights are not available, are incomplete, or belong to another architecture. Nothing
            else is computed in their place.
    """

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        image_processor: Any = None,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        local_files_only: bool = False,
    ) -> None:
        check_whole(1, batch_size=batch_size)
        if isinstance(model, str | os.PathLike):
            source, (model, image_processor) = str(model), _load_dinov2(str(model), local_files_only)
        elif image_processor is None:
            raise VidgenError("A loaded model needs its image_processor: size and normalization are not in the model.")
        else:
            source = model.name_or_path or "loaded"
        if model.config.model_type not in ("dinov2", "dinov2_with_registers"):
            raise VidgenError(
                f"{source} is a {model.config.model_type!r} model; allowed: dinov2, dinov2_with_registers."
            )
        self.name = f"dinov2[{Path(source).name}]"
        self.batch_size = batch_size
        self.device = select_device(device)
        self.image_processor = image_processor
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def _embed(self, frames: np.ndarray) -> torch.Tensor:
        pixels = self.image_processor(list(frames), input_data_format="channels_last", return_tensors="pt")
        pixel_values = pixels["pixel_values"].to(self.device, self.model.dtype)
        return self.model(pixel_values).last_hidden_state[:, 0]

    def __call__(self, frames: FrameSource) -> np.ndarray:
        """uint8 `(frames, height, width, 3)` to float32 `(frames, dim)` of unit length."""
        return _embed_frames(frames, self._embed, self.batch_size, self.name)


def _load_dinov2(source: str, local_files_only: bool) -> tuple[Any, Any]:
    from transformers import AutoImageProcessor, AutoModel

    try:
        image_processor = AutoImageProcessor.from_pretrained(source, local_files_only=local_files_only)
        model, loading = AutoModel.from_pretrained(
            source, local_files_only=local_files_only, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise VidgenError(
            f"No DINOv2 model at {source!r} ({error}). Pass the id of a model on the hub (facebook/dinov2-base) where "
            "the hub can be reached, or the folder of one that was downloaded: "
            "hf download facebook/dinov2-base --local-dir dinov2-base"
        ) from error
    # transformers draws what a checkpoint lacks at random and only logs it.
    lacking = sorted({*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])})
    if lacking:
        raise VidgenError(f"The weights at {source!r} lack {len(lacking)} tensors of the model, such as {lacking[0]}.")
    return model, image_processor


class CLIPFeatures:
    """Picture and text features of a CLIP model, by open_clip.

    Args:
        weights: folder with `open_clip_config.json` and safetensors, as CLIP models for open_clip lie on the Hugging
            Face Hub, or one safetensors file.
        architecture: open_clip's name of the architecture, for a file only. Weights that OpenAI trained need one that
            ends in `-quickgelu`; with another activation the weights load and the features are wrong.
        device: where the model runs, by default the best of this machine.
        batch_size: frames or prompts per forward pass.

    Raises:
        VidgenError: when open_clip is not installed, or the weights are missing, are no safetensors, or don't fit the
            architecture. Nothing is downloaded.
    """

    def __init__(
        self,
        weights: str | os.PathLike,
        architecture: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        check_whole(1, batch_size=batch_size)
        self.device = select_device(device)
        self.batch_size = batch_size
        self.model, self.preprocess, self.tokenizer = _load_clip(Path(weights), architecture)
        self.model.to(self.device).eval()
        self.name = f"clip[{architecture or Path(weights).name}]"

    @torch.no_grad()
    def _embed(self, frames: np.ndarray) -> torch.Tensor:
        from PIL import Image

        pixels = torch.stack([self.preprocess(Image.fromarray(frame)) for frame in frames])
        return self.model.encode_image(pixels.to(self.device))

    def __call__(self, frames: FrameSource) -> np.ndarray:
        """uint8 `(frames, height, width, 3)` to float32 `(frames, dim)` of unit length."""
        return _embed_frames(frames, self._embed, self.batch_size, self.name)

    @torch.no_grad()
    def embed_text(self, prompts: Sequence[str]) -> np.ndarray:
        """Prompts to float32 `(prompts, dim)` of unit length, in the space of the pictures.

        What a prompt has beyond the model's context (77 tokens in the published models) is cut off.
        """
        if isinstance(prompts, str):
            raise VidgenError(f"prompts={prompts!r:.60} is one text; give a list of them.")
        check_sequence("prompts", prompts)
        features = [
            self.model.encode_text(self.tokenizer(list(prompts[start : start + self.batch_size])).to(self.device))
            for start in range(0, len(prompts), self.batch_size)
        ]
        return F.normalize(torch.cat(features).float(), dim=-1).cpu().numpy()


def _load_clip(weights: Path, architecture: str | None) -> tuple[Any, Callable[..., torch.Tensor], Any]:
    is_folder = weights.is_dir()
    if not (
        any(weights.glob("*.safetensors")) if is_folder else weights.is_file() and weights.suffix == ".safetensors"
    ):
        raise VidgenError(
            f"No CLIP weights at {weights}; expected a folder with open_clip_config.json and safetensors, or one "
            "safetensors file. Where the hub can be reached: "
            "hf download timm/vit_large_patch14_clip_224.openai --local-dir clip-vit-l-14"
        )
    if is_folder and architecture is not None:
        raise VidgenError(f"architecture={architecture!r} for a folder; its open_clip_config.json already says which.")
    if not is_folder and architecture is None:
        raise VidgenError(f"{weights} is a file; pass the architecture of its weights, such as ViT-L-14-quickgelu.")
    try:
        import open_clip
    except ImportError as error:
        raise VidgenError("CLIP features need open_clip: pip install 'vidgen[eval]'") from error
    if architecture is not None and architecture not in open_clip.list_models():
        raise VidgenError(
            f"Unknown architecture {architecture!r}: {suggestion(architecture, open_clip.list_models())}"
        )
    name = f"local-dir:{weights}" if is_folder else architecture
    try:
        # Fails, where create_model_and_transforms would go on with random weights.
        model, preprocess = open_clip.create_model_from_pretrained(name, None if is_folder else str(weights))
        tokenizer = open_clip.get_tokenizer(name)
    # Sizes that don't fit are an AssertionError of open_clip.
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise VidgenError(f"The CLIP model at {weights} doesn't load: {error}") from error
    return model, preprocess, tokenizer
