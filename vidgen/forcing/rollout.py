"""A causal student writes a video through its own memory, as at inference, and keeps the gradient of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vidgen.forcing.conditions import Conditions, predict_beside_context, predict_velocity, take_frames
from vidgen.forcing.layouts import slot_blocks
from vidgen.memory import SlowFastMemory


@dataclass(frozen=True)
class Rollout:
    """A video the student wrote.

    Attributes:
        latents: `(batch, channels, frames, height, width)`; only the target carries a gradient.
        num_target: frames of the target, the last ones.
        memory: the student's memory as it was before the target.
        final_memory: the same memory at the end, all chunks but the last committed; its statistics cover the rollout.
    """

    latents: torch.Tensor
    num_target: int
    memory: SlowFastMemory
    final_memory: SlowFastMemory

    @property
    def target(self) -> torch.Tensor:
        return self.latents[:, :, -self.num_target :]


def rollout(
    student: nn.Module,
    memory: SlowFastMemory,
    conditions: Conditions,
    sigmas: Sequence[float],
    frame_shape: tuple[int, int, int],
    num_frames: int,
    num_target: int,
    exit_step: int,
    generator: torch.Generator,
    num_clean_context: int | None = None,
    requires_grad: bool = True,
    memory_gradient: bool = False,
) -> Rollout:
    """Self-rollout of Algorithm 1 in "Context Forcing" (arXiv 2602.06028).

    Chunks of the target leave the sampler after `exit_step` steps, with a gradient through that step alone
    ("Self Forcing", arXiv 2506.08009). The last `num_clean_context` frames before the target run all steps, so that
    the teacher reads context of the quality it knows; chunks older than those leave early as well.

    Args:
        student: few-step causal transformer.
        memory: an empty memory.
        conditions: text and channels of `num_frames` frames.
        sigmas: noise levels of the sampler, decreasing from 1, without the final 0.
        frame_shape: channels, height and width of a latent frame.
        num_frames: length L of the video, a multiple of the chunk.
        num_target: length l of its scored end, a multiple of the chunk.
        exit_step: r, from 1 to the number of sigmas.
        generator: source of all noise.
        num_clean_context: c; `None` denoises the whole context fully.
        requires_grad: whether the target keeps its graph.
        memory_gradient: whether the step with the gradient computes the keys and values of the frames in memory anew,
            so that the student learns to write its memory as well as to read it; the papers read stored ones.

    Raises:
        ValueError: a length is no multiple of the chunk, or the target is longer than the video.
    """
    chunk = memory.num_frames_per_block
    if num_frames % chunk or num_target % chunk or not 0 < num_target <= num_frames:
        raise ValueError(
            f"num_frames={num_frames}, num_target={num_target}; both must be multiples of the chunk of {chunk} latent "
            "frames, and the target must fit into the video."
        )
    if not 1 <= exit_step <= len(sigmas):
        raise ValueError(f"exit_step={exit_step}; it must be between 1 and {len(sigmas)}, the number of sigmas.")
    batch_size, device = conditions.text.shape[0], conditions.text.device
    target_start = num_frames - num_target
    clean_start = 0 if num_clean_context is None else target_start - num_clean_context

    def noise() -> torch.Tensor:
        channels, height, width = frame_shape
        return torch.randn(batch_size, channels, chunk, height, width, generator=generator, device=device)

    chunks = []
    context_memory = memory
    for start in range(0, num_frames, chunk):
        if start == target_start:
            context_memory = memory.clone()
        in_target = start >= target_start
        steps = len(sigmas) if clean_start <= start < target_start else exit_step
        text = conditions.text_at(start // chunk)
        channels = conditions.channels_at(torch.arange(start, start + chunk))

        sample = noise()
        for step, sigma in enumerate(sigmas[:steps], start=1):
            learns = requires_grad and in_target and step == steps
            with torch.set_grad_enabled(learns):
                if learns and memory_gradient and memory.num_slots:
                    past = torch.cat(chunks, dim=2).detach()
                    velocity = _velocity_beside_memory(student, memory, sample, sigma, text, past, conditions)
                else:
                    velocity = predict_velocity(student, sample, sigma, text, channels, kv_memory=memory)
                clean = sample - sigma * velocity  # x_0 = x_s - s v
            if step < steps:
                sample = (1 - sigmas[step]) * clean + sigmas[step] * noise()
        chunks.append(clean)
        if start + chunk < num_frames:
            commit_frames(student, memory, clean.detach(), text, channels)
    return Rollout(torch.cat(chunks, dim=2), num_target, context_memory, memory)


def _velocity_beside_memory(
    student: nn.Module,
    memory: SlowFastMemory,
    sample: torch.Tensor,
    sigma: float,
    text: torch.Tensor,
    past: torch.Tensor,
    conditions: Conditions,
) -> torch.Tensor:
    """Velocity of the chunk after `past` in one forward over the clean frames in memory and the noisy chunk.

    Equal to the cached forward while nothing was dropped; afterwards the frames in memory are read without those that
    they were written beside.
    """
    frame_ids, (blocks, _) = memory.frame_ids, slot_blocks(memory)
    num_past, chunk = past.shape[2], sample.shape[2]
    own_ids = torch.arange(num_past, num_past + chunk).expand(len(past), -1)
    return predict_beside_context(
        student,
        take_frames(past, frame_ids),
        blocks.to(past.device),
        sample,
        sample.new_full((len(past),), sigma),
        text,
        conditions.channels_at(torch.cat([frame_ids, own_ids], dim=1)),
    )


@torch.no_grad()
def commit_frames(
    transformer: nn.Module,
    memory: SlowFastMemory,
    frames: torch.Tensor,
    text: torch.Tensor,
    channels: torch.Tensor | None,
) -> None:
    """Store a finished chunk: one forward of the clean frames at noise level 0."""
    hidden_states = frames if channels is None else torch.cat([frames, channels.to(frames)], dim=1)
    timestep = torch.zeros(frames.shape[0], device=frames.device)
    output = transformer(hidden_states, timestep, text, kv_memory=memory, return_key_values=True)
    memory.commit(output.key_values)


@torch.no_grad()
def replay(
    transformer: nn.Module, memory: SlowFastMemory, frames: torch.Tensor, conditions: Conditions
) -> SlowFastMemory:
    """Show a finished video to another model's empty memory, chunk by chunk; returns that memory.

    Args:
        frames: `(batch, channels, frames, height, width)` clean latents, whole chunks.
    """
    chunk = memory.num_frames_per_block
    for start in range(0, frames.shape[2], chunk):
        channels = conditions.channels_at(torch.arange(start, start + chunk))
        commit_frames(
            transformer, memory, frames[:, :, start : start + chunk], conditions.text_at(start // chunk), channels
        )
    return memory
