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
    # How eventful the video was: the share of chunks that surprised the memory
    promotion_rate = float(torch.rand((), generator=generator)) ** 0.5
    memory = SlowFastMemory(config, num_frames_per_block=chunk)
    nothing = torch.zeros(1, chunk, 1, 1, 1)
    for _ in range(target):
        promote = torch.rand(1, generator=generator) < promotion_rate
        memory.commit([(nothing, nothing)], promote=promote)
    frame_ids = torch.cat([memory.frame_ids[0], torch.arange(target * chunk, (target + 1) * chunk)])

    sink, slow = config.sink, config.slow
    slot = torch.arange(slots)
    is_slow = (slot >= sink) & (slot < sink + slow)
    num_sink_blocks = -(-sink // chunk)
    fast_blocks = (slot - sink - slow) // chunk + num_sink_blocks + slow
    frame_blocks = torch.where(
        slot < sink, slot // chunk, torch.where(is_slow, slot - sink + num_sink_blocks, fast_blocks)
    )
    return Layout(frame_ids, frame_blocks, is_slow)
