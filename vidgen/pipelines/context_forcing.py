"""Long video from text, an image or a video, with a causal Wan transformer and a memory of constant size.

Implements the inference of Context Forcing ("Consistent Autoregressive Video Generation with Long Context", arXiv
2602.06028, section 3). It also runs any other block-causal student with Wan's parameters, and undistilled causal
models with a flow-matching ODE scheduler and classifier-free guidance.
"""

from __future__ import annotations

import html
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline
from diffusers.loaders import WanLoraLoaderMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

from vidgen.memory import KVMemory, KVMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.models.streaming_vae import FRAMES_PER_GROUP, StreamingVAEEncoder
from vidgen.pipelines.inputs import (
    ImageInput,
    Prompt,
    convert_frames,
    draw_seeds,
    parse_prompts,
    per_sample,
    to_pixels,
)
from vidgen.pipelines.request import (
    check_budget,
    check_noise,
    check_positions,
    check_size,
    count_latents,
    prepare_memory,
    resolve_guidance_scale,
    resolve_num_frames,
    resolve_num_steps,
)
from vidgen.pipelines.session import GenerationSession
from vidgen.pipelines.session_state import GenerationError, GenerationSettings
from vidgen.runtime.assets import require_model

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 5.0
OUTPUT_TYPES = ("pil", "np", "pt", "latent")
# What a pipeline folder needs; pickled weights are never fetched.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt")


@dataclass
class ContextForcingPipelineOutput(BaseOutput):
    """Output of [`ContextForcingPipeline`].

    Args:
        frames: by `output_type`: one list of PIL images per sample; float numpy `(batch, frames, height, width, 3)` in
            [0, 1]; float torch `(batch, frames, 3, height, width)` in [0, 1]; or the latents.
        latents: `(batch, channels, latent frames, h, w)` on the CPU, whole chunks (untrimmed).
        statistics: progress and memory, see [`GenerationSession.statistics`].
        timings: seconds spent per phase, in total, and until the first chunk.
    """

    frames: Any
    latents: torch.Tensor
    statistics: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


class ContextForcingPipeline(DiffusionPipeline, WanLoraLoaderMixin):
    """Generates videos of any length, chunk by chunk.

    Args:
        tokenizer: tokenizer of the text encoder.
        text_encoder: UMT5 encoder.
        vae: Wan's causal video VAE.
        transformer: block-causal Wan transformer.
        scheduler: [`FlowConsistencyScheduler`] for distilled few-step students, `FlowMatchEulerDiscreteScheduler` or
            `UniPCMultistepScheduler` (with `prediction_type="flow_prediction"`) for undistilled models.
        fps: frames per second the model was trained at.
        default_height: pixels, when a call names no height.
        default_width: pixels, when a call names no width.
        max_sequence_length: text tokens; shorter texts are padded with zero embeddings.

    Example:
        ```py
        pipe = ContextForcingPipeline.from_pretrained("assets/landscape-tiny")
        video = pipe("a meadow at dawn", seconds=60, generator=torch.Generator().manual_seed(0)).frames[0]
        for frames in pipe.stream([("a meadow", 5), ("a meadow in the rain", None)], seconds=20):
            writer.append(frames)  # uint8 (frames, height, width, 3)
        ```
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _lora_loadable_modules = ["transformer"]

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: UMT5EncoderModel,
        vae: AutoencoderKLWan,
        transformer: CausalWanTransformer3DModel,
        scheduler: SchedulerMixin,
        fps: float = 16,
        default_height: int = 480,
        default_width: int = 832,
        max_sequence_length: int = 512,
    ) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
        )
        self.register_to_config(
            fps=fps,
            default_height=default_height,
            default_width=default_width,
            max_sequence_length=max_sequence_length,
        )
        self.vae_scale_factor_temporal = vae.config.scale_factor_temporal
        self.vae_scale_factor_spatial = vae.config.scale_factor_spatial

    # --- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Load a pipeline folder, or a stock Wan2.1 text-to-video folder.

        Only safetensors weights are read. A stock folder's `WanTransformer3DModel` is loaded as a
        [`CausalWanTransformer3DModel`] with a warning, because bidirectional weights were not trained for this use.

        Args:
            pretrained_model_name_or_path: a folder, or a repository id on the Hugging Face Hub.
            kwargs: as for `DiffusionPipeline.from_pretrained`.

        Raises:
            ValueError: for a folder that isn't there, pickled weights, or a Wan2.2 folder with two transformers.
        """
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise ValueError("use_safetensors=False would read pickled weights; only safetensors files are loaded.")
        folder = Path(pretrained_model_name_or_path)
        require_model(pretrained_model_name_or_path, "the recipe landscape_assemble")
        if not folder.is_dir():
            hub_options = ("cache_dir", "force_download", "local_files_only", "token", "revision")
            options = {name: kwargs.pop(name) for name in hub_options if name in kwargs}
            folder = Path(
                snapshot_download(str(pretrained_model_name_or_path), allow_patterns=HUB_PATTERNS, **options)
            )

        index_file = folder / "model_index.json"
        index = json.loads(index_file.read_text()) if index_file.is_file() else {}
        if index.get("transformer_2", [None, None])[1] is not None:
            raise ValueError(
                f"{folder} holds two transformers (Wan2.2, high and low noise), which has no causal form here. "
                "Use a Wan2.1 text-to-video folder."
            )
        if index.get("transformer", [None, None])[1] == "WanTransformer3DModel" and "transformer" not in kwargs:
            logger.warning(
                "%s holds bidirectional Wan weights. They load into the causal transformer unchanged, but were "
                "trained neither to be causal nor for few steps: expect noise and inconsistency until they are "
                "fine-tuned, and use an undistilled scheduler with guidance_scale > 1.",
                folder,
            )
            dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
            dtype = dtype.get("transformer", dtype.get("default")) if isinstance(dtype, dict) else dtype
            kwargs["transformer"] = CausalWanTransformer3DModel.from_pretrained(
                folder, subfolder="transformer", dtype=dtype, use_safetensors=True, variant=kwargs.get("variant")
            )
        return super().from_pretrained(str(folder), **kwargs)

    def load_lora_weights(self, pretrained_model_name_or_path_or_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Load LoRA layers as `WanLoraLoaderMixin` does, from safetensors files only."""
        kwargs.setdefault("use_safetensors", True)
        super().load_lora_weights(pretrained_model_name_or_path_or_dict, *args, **kwargs)

    # --- text ---------------------------------------------------------------------------------------------------

    def encode_prompt(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embed texts, with zeros behind their last token as Wan was trained.

        Args:
            prompt: one or several texts.
            negative_prompt: what guidance moves away from; one, or as many as prompts.
            do_classifier_free_guidance: whether to embed the negative prompt.

        Returns:
            Embeddings `(batch, length, dim)` of the prompts, and of the negative prompts or `None`.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        prompt_embeds = self._encode_texts(prompts)
        if not do_classifier_free_guidance:
            return prompt_embeds, None
        return prompt_embeds, self._encode_texts(per_sample(negative_prompt or "", len(prompts), "negative_prompt"))

    @torch.no_grad()
    def _encode_texts(self, texts: Sequence[str]) -> torch.Tensor:
        length = min(self.config.max_sequence_length, self.tokenizer.model_max_length)
        texts = [re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip() for text in texts]
        for text in texts:
            num_tokens = len(self.tokenizer(text, truncation=False, verbose=False).input_ids)
            if num_tokens > length:
                logger.warning("A prompt of %d tokens is cut to %d: %r …", num_tokens, length, text[:60])
        tokens = self.tokenizer(
            texts,
            padding="max_length",
            max_length=length,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = self._execution_device
        attention_mask = tokens.attention_mask.to(device)
        hidden_states = self.text_encoder(tokens.input_ids.to(device), attention_mask).last_hidden_state
        hidden_states = hidden_states.masked_fill(attention_mask.unsqueeze(-1) == 0, 0.0)
        return hidden_states.to(device=device, dtype=self.transformer.dtype)

    # --- sessions -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def session(
        self,
        prompt: Prompt,
        negative_prompt: str | Sequence[str] | None = None,
        num_frames: int | None = None,
        seconds: float | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        memory: str | KVMemoryConfig | KVMemory = "slow_fast",
        prompt_switch: str = "recache",
        image: ImageInput | None = None,
        video: ImageInput | None = None,
        include_input: bool = False,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        undo_depth: int = 1,
        decode: bool = True,
        max_memory_gb: float | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_chunk_end: Callable | None = None,
    ) -> GenerationSession:
        """Start a generation that is stepped by the caller. Arguments as in `__call__`, except:

        Args:
            num_frames: without it, `seconds` and a plan of known length, the session has no end.
            undo_depth: chunks that `undo` can take back.
            decode: `False` makes `step` return latents.

        Raises:
            ValueError: a subclass that names the argument, what was given and what is allowed.
        """
        plans = parse_prompts(prompt)
        batch_size = len(plans)
        num_frames = resolve_num_frames(self, num_frames, seconds, plans)
        settings = GenerationSettings(
            height=self.config.default_height if height is None else height,
            width=self.config.default_width if width is None else width,
            fps=self.config.fps,
            num_frames=num_frames,
            num_inference_steps=resolve_num_steps(self, num_inference_steps),
            guidance_scale=resolve_guidance_scale(self, guidance_scale),
            negative_prompts=tuple(per_sample(negative_prompt or "", batch_size, "negative_prompt")),
            prompt_switch=prompt_switch,
            undo_depth=undo_depth,
            decode=decode,
        )
        check_size(self, settings.height, settings.width)

        # 1. Given frames
        if image is not None and video is not None:
            raise GenerationError(
                "Both image and video are given; an image begins a video, a video is continued: pick one."
            )
        if image is not None and num_frames is not None and num_frames < 2:
            raise GenerationError(f"num_frames={num_frames}; the image is the first frame, so ask for 2 or more.")
        given = None
        if image is not None or video is not None:
            given = self._given_pixels(image, video, settings, batch_size)
        num_given_latents = 0 if given is None else (given.shape[2] - 1) // self.vae_scale_factor_temporal + 1

        # 2. Memory, and whether it fits
        total_latents = count_latents(self, num_frames, num_given_latents, counts=image is not None)
        memory = prepare_memory(self, memory, total_latents)
        check_positions(self, memory, total_latents)
        check_budget(self, memory, settings, batch_size, max_memory_gb)

        # 3. Noise
        noise = check_noise(self, latents, settings, batch_size, total_latents, num_given_latents)
        session = GenerationSession(
            self,
            settings,
            plans,
            memory,
            draw_seeds(generator, batch_size),
            noise=noise,
            attention_kwargs=attention_kwargs,
            callback_on_step_end=callback_on_step_end,
            callback_on_chunk_end=callback_on_chunk_end,
        )
        if given is not None:
            is_image = image is not None
            session.prefill(self._encode_pixels(given), emit=is_image or include_input, counts=is_image)
        return session

    @property
    def size_multiple(self) -> int:
        """Height and width must be multiples of it: VAE stride times patch."""
        return self.vae_scale_factor_spatial * math.lcm(*self.transformer.config.patch_size[1:])

    def _given_pixels(
        self, image: ImageInput | None, video: ImageInput | None, settings: GenerationSettings, batch_size: int
    ) -> torch.Tensor:
        """`(batch, 3, frames, height, width)` in [-1, 1] of the conditioning image or video."""
        size = (settings.height, settings.width, batch_size)
        if video is None:
            return to_pixels(image, *size, is_video=False)
        pixels = to_pixels(video, *size, is_video=True)
        num_frames, stride = pixels.shape[2], self.vae_scale_factor_temporal
        shortest = (self.transformer.config.num_frames_per_block - 1) * stride + 1
        if num_frames < shortest:
            raise GenerationError(
                f"The video to continue has a length of {num_frames} frames; at least one chunk of {shortest} frames "
                "is needed. For one frame use image=."
            )
        kept = num_frames - (num_frames - 1) % stride
        if kept != num_frames:
            logger.warning("video has %d frames, not %dn + 1: only the newest %d are used.", num_frames, stride, kept)
        return pixels[:, :, num_frames - kept :]

    def _encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalized latents `(batch, channels, frames, h, w)` in float32, encoded in pieces of constant size."""
        encoder = StreamingVAEEncoder(self.vae)
        pieces = [pixels[:, :, :1], *(pixels[:, :, 1:].split(FRAMES_PER_GROUP, dim=2) if pixels.shape[2] > 1 else [])]
        device, dtype = self._execution_device, self.vae.dtype
        return torch.cat([encoder.encode(piece.to(device, dtype)).float() for piece in pieces], dim=2)

    def stream(self, prompt: Prompt, **kwargs: Any) -> Iterator[np.ndarray]:
        """Yield frames as soon as their chunk is generated.

        Arguments are those of `session`; without a length it never ends. Wrong arguments raise here, before the first
        chunk.

        Yields:
            uint8 `(frames, height, width, 3)`, with a leading batch axis for more than one sample. All chunks together
            are the frames of `__call__`.
        """
        kwargs.setdefault("undo_depth", 0)
        return self._chunks(self.session(prompt, **kwargs))

    def _chunks(self, session: GenerationSession) -> Iterator[np.ndarray | torch.Tensor]:
        """The session's chunks, with a progress bar where the end is known."""
        total = session.num_chunks_left
        try:
            if total is None:
                yield from session
                return
            with self.progress_bar(total=total) as progress_bar:
                for chunk in session:
                    progress_bar.update()
                    yield chunk
        finally:
            self.maybe_free_model_hooks()

    @torch.no_grad()
    def __call__(
        self,
        prompt: Prompt,
        negative_prompt: str | Sequence[str] | None = None,
        num_frames: int | None = None,
        seconds: float | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        memory: str | KVMemoryConfig | KVMemory = "slow_fast",
        prompt_switch: str = "recache",
        image: ImageInput | None = None,
        video: ImageInput | None = None,
        include_input: bool = False,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        max_memory_gb: float | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_chunk_end: Callable | None = None,
    ) -> ContextForcingPipelineOutput | tuple:
        """Generate whole videos.

        The VAE and the transformer work in whole chunks (the first latent frame stands for one frame, every later
        one for four; a chunk is `num_frames_per_block` latent frames). As many chunks are generated as the requested
        length needs, and frames beyond it are cut off: the result has exactly `num_frames`, or
        `round(seconds * fps)`, frames.

        Args:
            prompt: one text; a list of texts, one per sample of a batch; a plan, as `[(prompt, seconds), …]`, a
                `PromptPlan` or the `pathlib.Path` of a plan file; or a list of plans, one per sample. A new prompt
                takes effect at the first chunk that begins at or after its time.
            negative_prompt: what guidance moves away from.
            num_frames: frames of the result. A given image is its first frame; frames of a given video aren't counted.
            seconds: instead of `num_frames`. Without both: the plan's length, else 5 seconds.
            height: pixels, a multiple of VAE stride times patch.
            width: as `height`.
            num_inference_steps: denoising steps of a chunk; default the scheduler's (50 for ODE schedulers).
            guidance_scale: classifier-free guidance above 1 (default 5 for ODE schedulers); refused when distilled.
            memory: what the model keeps of the past: `"slow_fast"` and `"sliding_window"` have constant size, `"full"`
                grows with the video; or a configuration, or an empty memory.
            prompt_switch: `"recache"`, `"keep"` or `"flush"`, see [`GenerationSettings`].
            image: first frame (PIL, uint8 array `(height, width, 3)`, or float tensor `(3, height, width)` in [0, 1]);
                with a leading batch axis or a list for one per sample. Resized to the frame size.
            video: frames to continue (list of PIL images, uint8 array `(frames, height, width, 3)`, or float tensor
                `(frames, 3, height, width)`), at least one chunk long; cut to the newest 4n + 1 frames.
            include_input: whether the result begins with the decoded frames of `video`.
            generator: one, or one per sample. A seed per sample is drawn from it, from which all noise follows.
            latents: `(batch, channels, latent frames, h, w)` initial noise of all generated chunks.
            output_type: `"pil"`, `"np"`, `"pt"` or `"latent"`.
            return_dict: `False` returns the tuple `(frames,)`.
            max_memory_gb: refuse before starting when weights, memory and decoder state are estimated to need more.
                Default: what is free on the device, not counting the loaded weights.
            attention_kwargs: `{"scale": …}` scales LoRA layers.
            callback_on_step_end: `callback(pipe, step, timestep, {"latents": …})` after each denoising step.
            callback_on_chunk_end: `callback(session, chunk_index, frames)` after each chunk.

        Raises:
            ValueError: a subclass that names the argument, what was given and what is allowed.
        """
        started = time.perf_counter()
        if output_type not in OUTPUT_TYPES:
            raise GenerationError(f"output_type={output_type!r}; allowed: {', '.join(map(repr, OUTPUT_TYPES))}.")
        plans = parse_prompts(prompt)
        if num_frames is None and seconds is None and all(plan.seconds is None for plan in plans):
            seconds = DEFAULT_SECONDS
        session = self.session(
            plans,
            negative_prompt=negative_prompt,
            num_frames=num_frames,
            seconds=seconds,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            memory=memory,
            prompt_switch=prompt_switch,
            image=image,
            video=video,
            include_input=include_input,
            generator=generator,
            latents=latents,
            undo_depth=0,
            decode=output_type != "latent",
            max_memory_gb=max_memory_gb,
            attention_kwargs=attention_kwargs,
            callback_on_step_end=callback_on_step_end,
            callback_on_chunk_end=callback_on_chunk_end,
        )

        chunks, latent_chunks = [], []
        if session.input_latents is not None:
            latent_chunks.append(session.input_latents)
        first_chunk_seconds = None
        for chunk in self._chunks(session):
            first_chunk_seconds = first_chunk_seconds or time.perf_counter() - started
            chunks.append(chunk)
            latent_chunks.append(session.last_latents)
        if not chunks:
            raise GenerationError("The generation was interrupted before its first chunk was done.")

        all_latents = torch.cat(latent_chunks, dim=2)
        if output_type == "latent":
            frames = all_latents
        else:
            frames = convert_frames(np.concatenate(chunks, axis=-4), output_type)
        if not return_dict:
            return (frames,)
        timings = {**session.timings, "first_chunk": first_chunk_seconds, "total": time.perf_counter() - started}
        return ContextForcingPipelineOutput(frames, all_latents, session.statistics, timings)
