"""Training sequences that look like what a slow-fast memory will show the model.

A layout picks `sink + slow + fast` latent frames of a long video in the order of the memory's slots, the last chunk of
them being the one to denoise ("target"). Early in a video the memory holds every frame, so the layout is simply its
beginning; later it is `[sink | slow | fast | target]`, each slow frame a block of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vidgen.memory import SlowFastMemory, SlowFastMemoryConfig


@dataclass(frozen=True)
class Layout:
    """Frames of one training sequence.

    Attributes:
        frame_ids: `(slots,)` int64, latent frame of the video in each slot.
        frame_blocks: `(slots,)` int64, block of each slot for the block-causal mask.
        is_slow: `(slots,)` bool, slots whose frame stands alone, without its chunk.
    """

    frame_ids: torch.Tensor
    frame_blocks: torch.Tensor
    is_slow: torch.Tensor


def sample_layout(
    config: SlowFastMemoryConfig,
    num_video_frames: int,
    chunk: int,
    steady: bool,
    generator: torch.Generator,
) -> Layout:
    """Draw one layout by running the memory's own rule over a video of `num_video_frames` latent frames.

    Args:
        config: sizes of the memory; promotions are drawn at random, because no keys exist yet.
        num_video_frames: latent frames available.
        chunk: latent frames per chunk.
        steady: `True` for a memory that has already dropped frames, `False` for the beginning of the video.
        generator: source of the target chunk and of the promotions.

    Raises:
        ValueError: when the video is too short.
    """
    slots = config.sink + config.slow + config.fast
    filled_chunks = slots // chunk
    num_chunks = num_video_frames // chunk
    if num_chunks < filled_chunks + steady:
        raise ValueError(
            f"A video of {num_video_frames} latent frames is too short for {slots} slots; "
            f"it needs at least {(filled_chunks + steady) * chunk}."
        )
    if not steady:
        frame_ids = torch.arange(slots)
        return Layout(frame_ids, frame_ids // chunk, torch.zeros(slots, dtype=torch.bool))

    target = int(torch.randint(filled_chunks, num_chunks, (), generator=generator))
    return sample_context_layout(config, target, chunk, chunk, generator)


def sample_context_layout(
    config: SlowFastMemoryConfig, context_chunks: int, chunk: int, target_frames: int, generator: torch.Generator
) -> Layout:
    """Draw what a memory may hold after `context_chunks` chunks, followed by `target_frames` frames as one block.

    Args:
        config: sizes of the memory; promotions are drawn at random, because no keys exist yet.
        context_chunks: chunks before the target.
        chunk: latent frames per chunk.
        target_frames: latent frames to denoise together.
        generator: source of the promotions.
    """
    # How eventful the video was: the share of chunks that surprised the memory
    promotion_rate = float(torch.rand((), generator=generator)) ** 0.5
    memory = SlowFastMemory(config, num_frames_per_block=chunk)
    nothing = torch.zeros(1, chunk, 1, 1, 1)
    for _ in range(context_chunks):
        promote = torch.rand(1, generator=generator) < promotion_rate
        memory.commit([(nothing, nothing)], promote=promote)
    target_ids = torch.arange(target_frames) + context_chunks * chunk
    blocks, is_slow = slot_blocks(memory)
    target_block = blocks[-1:] + 1 if len(blocks) else torch.zeros(1, dtype=torch.int64)
    return Layout(
        torch.cat([memory.frame_ids.flatten(), target_ids]),
        torch.cat([blocks, target_block.expand(target_frames)]),
        torch.cat([is_slow, torch.zeros(target_frames, dtype=torch.bool)]),
    )


def slot_blocks(memory: SlowFastMemory) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and slow flags, `(slots,)` each, of the frames in a memory, for a forward over them without the memory.

    While nothing was dropped the slots are the beginning of the video, chunk by chunk; afterwards each slow frame
    stands alone, because its chunk is gone.
    """
    config, chunk = memory.config, memory.num_frames_per_block
    slot = torch.arange(memory.num_slots)
    if memory.num_frames == memory.num_slots:
        return slot // chunk, torch.zeros(memory.num_slots, dtype=torch.bool)
    sink, slow = config.sink, config.slow
    is_slow = (slot >= sink) & (slot < sink + slow)
    num_sink_blocks = -(-sink // chunk)
    fast_blocks = (slot - sink - slow) // chunk + num_sink_blocks + slow
    slow_blocks = torch.where(is_slow, slot - sink + num_sink_blocks, fast_blocks)
    return torch.where(slot < sink, slot // chunk, slow_blocks), is_slow
