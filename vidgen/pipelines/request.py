"""What a pipeline is asked for, resolved and checked before any model runs."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from vidgen.memory import KVMemory, KVMemoryConfig, make_memory
from vidgen.pipelines.budget import describe_remedies, estimate_budget, format_bytes
from vidgen.pipelines.prompt_plan import PromptPlan
from vidgen.pipelines.session import num_chunks_until
from vidgen.pipelines.session_state import GenerationError, GenerationSettings
from vidgen.runtime.checks import check_finite, check_not_negative, check_positive, check_whole
from vidgen.runtime.device import available_memory
from vidgen.schedulers import FlowConsistencyScheduler

if TYPE_CHECKING:
    from vidgen.pipelines.context_forcing import ContextForcingPipeline

ODE_STEPS, ODE_GUIDANCE_SCALE = 50, 5.0  # Wan's own defaults
# Four days at 25 frames per second: beyond is a slip of the keyboard. `num_frames=None` goes on without an end.
MAX_FRAMES = 10_000_000


def resolve_num_frames(
    pipe: ContextForcingPipeline, num_frames: int | None, seconds: float | None, plans: Sequence[PromptPlan]
) -> int | None:
    """Frames to generate; `None` for no end."""
    if num_frames is not None and seconds is not None:
        raise GenerationError(f"Both num_frames={num_frames} and seconds={seconds} are given; give one of them.")
    fps = pipe.config.fps
    if num_frames is None:
        if seconds is None:
            lengths = [plan.seconds for plan in plans]
            if None in lengths:
                return None
            seconds = max(lengths)
        check_finite(seconds=seconds)
        if not 0.5 < seconds * fps < MAX_FRAMES + 0.5:
            raise GenerationError(
                f"seconds={seconds:g}; allowed at {fps:g} frames per second: {1 / fps:.3g} s, which is 1 frame, to "
                f"{MAX_FRAMES / fps:g} s, which are {MAX_FRAMES:,}."
            )
        num_frames = round(seconds * fps)
    check_finite(num_frames=num_frames)
    if num_frames != int(num_frames) or not 1 <= num_frames <= MAX_FRAMES:
        raise GenerationError(f"num_frames={num_frames}; allowed: whole numbers from 1 to {MAX_FRAMES:,}.")
    for plan in plans:
        plan.check_length(num_frames, fps)
    return int(num_frames)


def is_distilled(pipe: ContextForcingPipeline) -> bool:
    """Whether the scheduler is that of a few-step student."""
    return isinstance(pipe.scheduler, FlowConsistencyScheduler)


def resolve_num_steps(pipe: ContextForcingPipeline, num_inference_steps: int | None) -> int:
    """Denoising steps of a chunk, by default those of the scheduler, which must be one that sessions can run."""
    scheduler = pipe.scheduler
    if not isinstance(scheduler, (FlowConsistencyScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler)):
        raise GenerationError(
            f"The scheduler is a {type(scheduler).__name__}; allowed: FlowConsistencyScheduler, "
            "FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler."
        )
    if scheduler.config.get("stochastic_sampling") or scheduler.config.get("use_dynamic_shifting"):
        raise GenerationError(
            "The scheduler uses stochastic_sampling or use_dynamic_shifting, whose results depend on more than "
            "seed and chunk; turn both off."
        )
    if isinstance(scheduler, UniPCMultistepScheduler) and scheduler.config.prediction_type != "flow_prediction":
        raise GenerationError(
            f"The UniPC scheduler predicts {scheduler.config.prediction_type!r}; this transformer predicts "
            "velocity: configure prediction_type='flow_prediction' and use_flow_sigmas=True."
        )
    if num_inference_steps is None:
        default = scheduler.config.get("timesteps")
        default = len(default) if default else scheduler.config.get("num_inference_steps")
        return default if is_distilled(pipe) else ODE_STEPS
    check_whole(1, scheduler.config.num_train_timesteps, num_inference_steps=num_inference_steps)
    return num_inference_steps


def resolve_guidance_scale(pipe: ContextForcingPipeline, guidance_scale: float | None) -> float:
    """Classifier-free guidance, off by default for a distilled model, which is refused any other."""
    if guidance_scale is None:
        return 1.0 if is_distilled(pipe) else ODE_GUIDANCE_SCALE
    check_not_negative(guidance_scale=guidance_scale)
    if is_distilled(pipe) and guidance_scale > 1:
        raise GenerationError(
            f"guidance_scale={guidance_scale} was asked of a distilled few-step model, into which guidance is "
            "already trained; use guidance_scale=1, or an ODE scheduler with an undistilled transformer."
        )
    return float(guidance_scale)


def check_size(pipe: ContextForcingPipeline, height: int, width: int) -> None:
    """Refuse frames that the VAE and the patches cannot divide."""
    unit = pipe.size_multiple
    check_finite(height=height, width=width)
    if not all(isinstance(size, Integral) and size >= unit and size % unit == 0 for size in (height, width)):
        nearest = [max(unit, round(size / unit) * unit) for size in (height, width)]
        raise GenerationError(
            f"height={height}, width={width}; both must be multiples of {unit}. "
            f"Nearest valid: {nearest[0]}x{nearest[1]}."
        )


def count_latents(
    pipe: ContextForcingPipeline, num_frames: int | None, num_given_latents: int, counts: bool
) -> int | None:
    """Latent frames at the end, given ones included; `None` without an end."""
    if num_frames is None:
        return None
    chunk, stride = pipe.transformer.config.num_frames_per_block, pipe.vae_scale_factor_temporal
    end = num_frames
    if num_given_latents and not counts:
        end += (num_given_latents - 1) * stride + 1
    return num_given_latents + chunk * num_chunks_until(end, num_given_latents, chunk, stride)


def prepare_memory(
    pipe: ContextForcingPipeline, memory: str | KVMemoryConfig | KVMemory, total_latents: int | None
) -> KVMemory:
    """An empty memory that fits the transformer's chunks, from a name, a configuration or a memory."""
    chunk = pipe.transformer.config.num_frames_per_block
    if isinstance(memory, KVMemory):
        if memory.num_frames:
            raise GenerationError(
                f"The memory already holds {memory.num_frames} latent frames of another video; call its reset(), "
                "or continue that video's session."
            )
        if memory.num_frames_per_block < chunk:
            raise GenerationError(
                f"The memory was made for chunks of {memory.num_frames_per_block} latent frames, the transformer "
                f"works in chunks of {chunk}: build it with num_frames_per_block={chunk}."
            )
        return memory
    if memory == "full" and total_latents is None:
        raise GenerationError(
            "memory='full' grows with the video, which has no end here: give num_frames or seconds, or use "
            "memory='slow_fast'."
        )
    return make_memory(memory, chunk, max_frames=total_latents)


def check_positions(pipe: ContextForcingPipeline, memory: KVMemory, total_latents: int | None) -> None:
    """Refuse a video whose positions would run over the rotary table."""
    table = pipe.transformer.config.rope_max_seq_len
    highest = total_latents
    if memory.config.positions == "bounded":
        in_view = memory.capacity + pipe.transformer.config.num_frames_per_block
        highest = in_view if total_latents is None else min(total_latents, in_view)
    if highest is not None and highest > table:
        seconds = ((table - 1) * pipe.vae_scale_factor_temporal + 1) / pipe.config.fps
        raise GenerationError(
            f"memory={memory.name!r} with positions={memory.config.positions!r} would give this video {highest} "
            f"temporal positions; the transformer's rotary table has {table}, enough for {seconds:.0f} s. Use "
            "memory='slow_fast', whose positions are bounded, or a shorter video."
        )


def check_budget(
    pipe: ContextForcingPipeline,
    memory: KVMemory,
    settings: GenerationSettings,
    batch_size: int,
    max_memory_gb: float | None,
) -> None:
    """Refuse a generation that is estimated to need more than `max_memory_gb`, or than is free without it."""
    if max_memory_gb is not None:
        check_positive(max_memory_gb=max_memory_gb)
    budget = estimate_budget(pipe, memory, settings, batch_size)
    weights = ""  # they are on the device already
    if max_memory_gb is None:
        needed, limit = budget.state, available_memory(pipe._execution_device)
        source = f"free on {pipe._execution_device}"
    else:
        weights = f"weights {format_bytes(budget.weights)}, "
        needed, limit, source = budget.weights + budget.state, int(min(max_memory_gb, 1e9) * 1e9), "max_memory_gb"
    if needed > limit:
        remedies = describe_remedies(pipe, memory, settings, batch_size, limit - (needed - budget.key_values))
        advice = "No single change is enough; ask for much smaller or fewer frames, or raise the limit."
        if remedies:
            advice = f"Any of these is enough (keys and values then): {remedies}."
        raise GenerationError(
            f"This generation needs an estimated {needed:,} bytes ({format_bytes(needed)}: "
            f"{weights}keys and values "
            f"{format_bytes(budget.key_values)}, decoder {format_bytes(budget.decoder)}); the limit is "
            f"{format_bytes(limit)} ({source}). {advice}"
        )


def check_noise(
    pipe: ContextForcingPipeline,
    noise: torch.Tensor | None,
    settings: GenerationSettings,
    batch_size: int,
    total_latents: int | None,
    num_given_latents: int,
) -> torch.Tensor | None:
    """Given initial noise in float32 on the CPU, or `None`."""
    if noise is None:
        return None
    if total_latents is None:
        raise GenerationError("latents are given for a video without an end; give num_frames or seconds.")
    if not isinstance(noise, torch.Tensor):
        raise GenerationError(f"latents is a {type(noise).__name__}; give a tensor, or none to draw the noise.")
    stride = pipe.vae_scale_factor_spatial
    expected = (
        batch_size,
        pipe.transformer.config.in_channels,
        total_latents - num_given_latents,
        settings.height // stride,
        settings.width // stride,
    )
    if tuple(noise.shape) != expected:
        raise GenerationError(
            f"latents has shape {tuple(noise.shape)}; expected (batch, channels, latent frames of whole chunks, "
            f"height, width) = {expected}."
        )
    if not bool(torch.isfinite(noise).all()):
        raise GenerationError("latents holds NaN or infinity; give finite noise, or none to draw it.")
    return noise.float().cpu()
