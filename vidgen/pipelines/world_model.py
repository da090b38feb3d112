"""A playable world: frames that follow a few real ones, each steered by its control.

Inference of "LIVE: Long-horizon Interactive Video World Modeling" (arXiv 2602.03747) and of models trained by teacher
or diffusion forcing: one frame at a time in the latent space of an autoencoder of single frames. The work is done by
[`~vidgen.pipelines.world_session.WorldSession`].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import PIL.Image
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, DPMSolverMultistepScheduler
from diffusers.utils import BaseOutput

from vidgen.controls import ControlEncoder, ControlShapeError
from vidgen.memory import KVMemoryConfig
from vidgen.models.frame_autoencoder import stride_of
from vidgen.models.world_dit import WorldDiT
from vidgen.pipelines.world_session import Frames, WorldSession
from vidgen.runtime.assets import require_model
from vidgen.runtime.errors import ConfigError

OUTPUT_TYPES = ("np", "pil")
BASELINES_NAME = "baselines"


@dataclass
class WorldModelOutput(BaseOutput):
    """Output of [`WorldModelPipeline`].

    Args:
        frames: prompt and generated frames: uint8 `(frames, height, width, 3)`, with a leading batch axis if the
            prompt had one, or lists of PIL images.
    """

    frames: Any


class WorldModelPipeline(DiffusionPipeline):
    """Continues real frames under control.

    Args:
        transformer: predicts the velocity of a frame from those before it.
        vae: autoencoder of single frames; latents are `(posterior mean - shift_factor) * scaling_factor`.
        scheduler: the sampler of [`~vidgen.schedulers.flow_sampler`].
        controls: how controls are read, [`ControlEncoder.to_dict`].
        fps: frames per second the model was trained at.
        num_inference_steps: denoising steps of a frame, when a call names none.
        context_sigma: noise level of context frames, when a call names none; `None` takes the sampler's next-to-last
            level, or 0 for a transformer trained by teacher forcing.

    Raises:
        ConfigError: the controls are not those the transformer takes.

    Example:
        ```py
        pipe = WorldModelPipeline.from_pretrained("runs/doom/model")
        frames = pipe(prompt_frames, controls, seed=0).frames  # uint8 (frames, height, width, 3)
        session = pipe.open_session(prompt_frames[:1])
        frame = session.step(["forward", "turn left"])
        ```
    """

    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self,
        transformer: WorldDiT,
        vae: AutoencoderKL,
        scheduler: DPMSolverMultistepScheduler,
        controls: dict[str, Any] | None = None,
        fps: float = 10,
        num_inference_steps: int = 18,
        context_sigma: float | None = None,
    ) -> None:
        super().__init__()
        if controls is None:  # from_pretrained takes arguments without a default for models
            raise ConfigError("controls are missing; give ControlEncoder.to_dict() of those the model was trained on.")
        self.register_modules(transformer=transformer, vae=vae, scheduler=scheduler)
        self.register_to_config(
            controls=controls, fps=float(fps), num_inference_steps=num_inference_steps, context_sigma=context_sigma
        )
        self.control_encoder = ControlEncoder.from_dict(controls)
        for name in ("control_type", "control_dim", "control_frame"):
            read, taken = getattr(self.control_encoder, name), transformer.config[name]
            if read != taken:
                raise ConfigError(f"The controls have {name}={read!r}; the transformer was made for {taken!r}.")
        self.vae_scale_factor = stride_of(vae)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Load a pipeline folder, or a repository of the Hugging Face Hub, as `DiffusionPipeline.from_pretrained`.

        Raises:
            AssetError: there is no such folder, and the name is none of a repository.
        """
        require_model(pretrained_model_name_or_path, "the recipe world_model_assemble")
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def baselines(self, folder: str | Path) -> dict[str, WorldModelPipeline]:
        """Models that lie in this one's folder to be compared with it, by what they were trained with.

        Args:
            folder: that this pipeline was loaded from.

        Returns:
            Pipelines with a transformer of their own and this one's everything else, by the name of their objective
            (`"teacher_forcing"`); none where the folder has none.
        """
        found = {}
        for path in sorted((Path(folder) / BASELINES_NAME).glob("*/config.json")):
            transformer = WorldDiT.from_pretrained(path.parent, torch_dtype=self.dtype).to(self.device)
            options = {name: self.config[name] for name in ("controls", "fps", "num_inference_steps", "context_sigma")}
            if transformer.config.forcing == "teacher_forcing":
                options["context_sigma"] = None  # its context was never noisy
            found[path.parent.name] = WorldModelPipeline(transformer, self.vae, self.scheduler, **options)
        return found

    def open_session(
        self,
        prompt_frames: Frames,
        prompt_controls: Frames | None = None,
        *,
        cache: str = "frame",
        memory: KVMemoryConfig | None = None,
        num_inference_steps: int | None = None,
        context_sigma: float | None = None,
        seed: int | Sequence[int] = 0,
    ) -> WorldSession:
        """Start a world that is steered frame by frame.

        Args:
            prompt_frames: uint8 `(frames, height, width, 3)`, with a leading batch axis for several videos.
            prompt_controls: `(frames, columns)` or `(batch, frames, columns)` in the units of the data; may be left
                out for a single frame that motion or buttons lead on from.
            cache: when keys of context frames are computed: `"none"`, `"frame"` or `"rolling"`, see
                [`~vidgen.pipelines.world_session`].
            memory: which frames stay context; `None` keeps the newest that fit the model's window.
            num_inference_steps: denoising steps of a frame; default the pipeline's.
            context_sigma: noise level of context frames in [0, 1); default the pipeline's.
            seed: one per video, or one number: row `r` of a batch then has `seed + r`.

        Raises:
            VidgenError: a subclass that names the argument, what was given and what is allowed.
        """
        return WorldSession(
            self, prompt_frames, prompt_controls, cache, memory, num_inference_steps, context_sigma, seed
        )

    def stream(self, prompt_frames: Frames, controls: Frames, **options: Any) -> Iterator[np.ndarray]:
        """Yield each new frame as soon as it exists.

        Wrong arguments raise here, before the first frame.

        Args:
            prompt_frames: as for `open_session`.
            controls: as for `__call__`.
            options: the other arguments of `open_session`.

        Yields:
            uint8 `(height, width, 3)` or `(batch, height, width, 3)`: the frames of `__call__` after the prompt.
        """
        frames, controls = np.asarray(prompt_frames), torch.as_tensor(controls, dtype=torch.float64)
        self.control_encoder.controls.spec.check(controls)
        num_prompts = frames.shape[-4] if frames.ndim > 3 else 1
        if num_prompts > controls.shape[-2]:
            raise ControlShapeError(
                f"Controls of {controls.shape[-2]} frames for a prompt of {num_prompts}; the first rows belong to the "
                "prompt frames."
            )
        session = self.open_session(frames, controls[..., :num_prompts, :], **options)
        return self._frames(session, controls[..., num_prompts:, :].movedim(-2, 0))

    def _frames(self, session: WorldSession, controls: torch.Tensor) -> Iterator[np.ndarray]:
        try:
            for control in controls:
                yield session.step(control)
        finally:
            self.maybe_free_model_hooks()

    def __call__(
        self,
        prompt_frames: Frames,
        controls: Frames,
        num_inference_steps: int | None = None,
        context_sigma: float | None = None,
        cache: str = "frame",
        memory: KVMemoryConfig | None = None,
        seed: int | Sequence[int] = 0,
        output_type: str = "np",
    ) -> WorldModelOutput:
        """Continue real frames to the end of their controls.

        Args:
            prompt_frames: uint8 `(P, height, width, 3)`, with a leading batch axis for several videos.
            controls: `(P + N, columns)` or `(batch, P + N, columns)` in the units of the data; the first P rows belong
                to the prompt frames.
            num_inference_steps: as for `open_session`, like the arguments that follow.
            context_sigma: noise level of context frames.
            cache: `"none"`, `"frame"` or `"rolling"`.
            memory: which frames stay context.
            seed: one per video, or one number.
            output_type: `"np"` for uint8 arrays, `"pil"` for lists of images.

        Returns:
            All P + N frames; those of the prompt as they were given.

        Raises:
            VidgenError: a subclass that names the argument, what was given and what is allowed.
        """
        if output_type not in OUTPUT_TYPES:
            raise ConfigError(f"output_type={output_type!r}; allowed: {', '.join(map(repr, OUTPUT_TYPES))}.")
        options = {"num_inference_steps": num_inference_steps, "context_sigma": context_sigma}
        stream = self.stream(prompt_frames, controls, cache=cache, memory=memory, seed=seed, **options)
        frames = list(np.moveaxis(np.asarray(prompt_frames), -4, 0))
        with self.progress_bar(total=np.shape(controls)[-2] - len(frames)) as progress_bar:
            for frame in stream:
                frames.append(frame)
                progress_bar.update()
        frames = np.stack(frames, axis=-4)
        if output_type == "np":
            return WorldModelOutput(frames)
        if frames.ndim == 5:
            return WorldModelOutput([[PIL.Image.fromarray(frame) for frame in video] for video in frames])
        return WorldModelOutput([PIL.Image.fromarray(frame) for frame in frames])
