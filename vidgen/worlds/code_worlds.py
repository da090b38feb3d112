"""Two worlds of tiny latent videos in which nothing but memory can predict what comes back into view.

A latent frame is a row of tokens, each a patch of 2 x 2 latent pixels that shows one of eight codes. Which code a
place shows is drawn anew for every video, so a model that has forgotten a place can only guess, and is right one time
in eight. The model is told where it looks through conditioning channels that are concatenated to the latents.

- `PanoramaWorld`: a camera moves over a cyclic strip of columns. Neighboring frames share columns, so finding a column
  again can be learned from local context; what is tested is which frames a memory keeps.
- `RoomsWorld`: a visit to a room lasts some chunks, then the video jumps to another room. Inside a short window a flag
  alone decides between "copy the last chunk" and "invent"; that a room code seen long ago means the same content again
  is rewarded only by a teacher that sees the long context.

They measure the memory of "Context Forcing: Consistent Autoregressive Video Generation with Long Context"
(arXiv 2602.06028), which has no such test of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vidgen.runtime.errors import ConfigError, VidgenError

# The corners of {-1, 1}^4 with an even number of -1: any two are orthogonal or opposite, so two codes differ in at
# least half of their channels. (8 codes, 4 channels)
_BITS = (torch.arange(8)[:, None] >> torch.arange(3)) & 1
CODEBOOK = 1.0 - 2.0 * torch.cat([_BITS, _BITS.sum(1, keepdim=True) % 2], dim=1)

# Room r is told by the parities of r under the seven non-zero 3-bit masks (the simplex code): any two of the eight
# words differ in exactly four bits. (8 rooms, 7 bits)
_PARITIES = (_BITS @ ((torch.arange(1, 8)[:, None] >> torch.arange(3)) & 1).T) % 2
ROOM_CODES = 1.0 - 2.0 * _PARITIES

ROOM_TOKENS = 4
FRAMES_PER_COLUMN = 2
# Share of the camera's two-frame steps that draw a new velocity. Steps that were all independent would make it
# tremble in place: places would come back after a few frames or hardly ever.
TURN_PROBABILITY = 0.25


@dataclass(frozen=True)
class CodeVideos:
    """Latent videos and the truth about them; T tokens per latent frame.

    Attributes:
        latents: float `(batch, 4, frames, 2, 2T)`; the four pixels of a patch show the same code.
        conditions: float `(batch, 8, frames, 2, 2T)`; what the model is told, constant over a patch.
        places: int64 `(batch, frames, T)`; the place a token looks at, unique within its frame; a place has the
            same number whenever it is in view.
        codes: int64 `(batch, frames, T)`; row of `CODEBOOK` that the token shows.
    """

    latents: Tensor
    conditions: Tensor
    places: Tensor
    codes: Tensor


@dataclass(frozen=True)
class PanoramaWorld:
    """A camera that shows `view` neighboring columns of a cyclic strip.

    A column's place is its index. Its angle `a` is told as sin and cos of a, 3a, 5a and 7a: with these odd harmonics
    any two of 16 columns get orthogonal or opposite conditions.

    Args:
        columns: of the strip, more than `view`.
        view: columns in view, one token each.

    Raises:
        ConfigError: when nothing is in view or nothing can leave it.
    """

    columns: int = 16
    view: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.view < self.columns:
            raise ConfigError(f"view={self.view} of columns={self.columns}; allowed: 1 <= view < columns.")

    def sample(
        self, batch_size: int, num_frames: int, generator: torch.Generator, path: Tensor | None = None
    ) -> CodeVideos:
        """Draws videos; the content doesn't depend on the path.

        Args:
            batch_size: number of videos.
            num_frames: latent frames per video.
            generator: on the CPU.
            path: int64 `(batch_size or 1, num_frames)`, leftmost column of each frame, taken modulo `columns`; None
                draws a `random_path` for each video.

        Raises:
            VidgenError: when there is nothing to draw or the path has another shape or isn't integer.
        """
        _check_size(batch_size, num_frames)
        contents = torch.randint(len(CODEBOOK), (batch_size, self.columns), generator=generator)
        if path is None:
            path = self.random_path(batch_size, num_frames, generator)
        if path.shape not in ((batch_size, num_frames), (1, num_frames)) or path.is_floating_point():
            raise VidgenError(
                f"path is {path.dtype} {tuple(path.shape)}; allowed: int64 ({batch_size}, {num_frames}) "
                f"or (1, {num_frames})."
            )
        places = (path.long()[:, :, None] + torch.arange(self.view)) % self.columns
        places = places.expand(batch_size, -1, -1).contiguous()  # (B, F, T)
        angles = torch.arange(self.columns)[:, None] * torch.tensor([1, 3, 5, 7]) * (2 * math.pi / self.columns)
        told = torch.cat([angles.sin(), angles.cos()], dim=1)  # (columns, 8)
        return _videos(contents, places, told[places])

    def random_path(self, batch_size: int, num_frames: int, generator: torch.Generator) -> Tensor:
        """A camera that starts anywhere and moves one column left, right or not at all every two frames.

        The velocity is kept for a while: each step draws a new one of the three with `TURN_PROBABILITY`.

        Returns:
            int64 `(batch_size, num_frames)` in [0, columns).
        """
        _check_size(batch_size, num_frames)
        shape = (batch_size, -(-num_frames // FRAMES_PER_COLUMN))
        start = torch.randint(self.columns, (batch_size, 1), generator=generator)
        turns = torch.rand(shape, generator=generator) < TURN_PROBABILITY
        drawn = torch.randint(-1, 2, shape, generator=generator)
        latest = torch.where(turns, torch.arange(shape[1]), 0).cummax(dim=1).values
        # The first step is taken before the first frame, where it only shifts the uniform start.
        columns = start + drawn.gather(1, latest).cumsum(1)
        return columns.repeat_interleave(FRAMES_PER_COLUMN, dim=1)[:, :num_frames] % self.columns

    def sweep_path(self, right: int, pause: int, back: int) -> Tensor:
        """The test script: from column 0 sweep right, pause, sweep back, one column every two frames.

        The sweep back mirrors the sweep right, so with `back == right` the last frame shows what the first one showed.

        Args:
            right: frames of the sweep right, >= 1.
            pause: frames at its end, >= 0.
            back: frames of the sweep back, >= 0.

        Returns:
            int64 `(1, right + pause + back)` in [0, columns).

        Raises:
            VidgenError: when a length is out of range.
        """
        if right < 1 or pause < 0 or back < 0:
            raise VidgenError(
                f"right={right}, pause={pause}, back={back} frames; allowed: right >= 1, pause and back >= 0."
            )
        turn = right - 1
        steps = torch.cat([torch.arange(right), torch.full((pause,), turn), turn - torch.arange(back)])
        return (torch.div(steps, FRAMES_PER_COLUMN, rounding_mode="floor") % self.columns)[None]


@dataclass(frozen=True)
class RoomsWorld:
    """A video that visits rooms, each shown by four tokens that stand still.

    The place of token t in room r is 4 r + t. Seven channels tell the room (`ROOM_CODES`, the same words in every
    video), the eighth is the cut flag: 1 on the frames of the chunk that enters a room (the first chunk of the video
    too), 0 elsewhere.

    Args:
        rooms: 2 to 8.
        chunk: latent frames per chunk.
        max_visit: longest visit in chunks; lengths are uniform from 1.

    Raises:
        ConfigError: when a field is out of range.
    """

    rooms: int = 8
    chunk: int = 3
    max_visit: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.rooms <= len(ROOM_CODES):
            raise ConfigError(f"rooms={self.rooms}; allowed: 2 to {len(ROOM_CODES)}.")
        for name in ("chunk", "max_visit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; allowed: >= 1.")

    def sample(self, batch_size: int, num_frames: int, generator: torch.Generator) -> CodeVideos:
        """Draws videos; a last visit or chunk that doesn't fit is cut off.

        Args:
            batch_size: number of videos.
            num_frames: latent frames per video.
            generator: on the CPU.

        Raises:
            VidgenError: when there is nothing to draw.
        """
        _check_size(batch_size, num_frames)
        chunks = -(-num_frames // self.chunk)
        contents = torch.randint(len(CODEBOOK), (batch_size, self.rooms * ROOM_TOKENS), generator=generator)
        lengths = torch.randint(1, self.max_visit + 1, (batch_size, chunks), generator=generator)
        first = torch.randint(self.rooms, (batch_size, 1), generator=generator)
        # Going on by 1 to rooms - 1 reaches every other room equally often and never the same one.
        jumps = torch.randint(1, self.rooms, (batch_size, chunks - 1), generator=generator)
        visited = torch.cat([first, jumps], dim=1).cumsum(1) % self.rooms  # (B, visits)

        ends = lengths.cumsum(1)
        index = torch.arange(chunks).expand(batch_size, chunks).contiguous()
        visit = torch.searchsorted(ends, index, right=True)  # visits that ended before each chunk
        entered = index == (ends - lengths).gather(1, visit)
        chunk_of_frame = torch.arange(num_frames) // self.chunk
        room, cut = visited.gather(1, visit)[:, chunk_of_frame], entered[:, chunk_of_frame]  # (B, F)
        places = room[:, :, None] * ROOM_TOKENS + torch.arange(ROOM_TOKENS)  # (B, F, T)
        told = torch.cat([ROOM_CODES[room], cut[:, :, None].float()], dim=2)  # (B, F, 8)
        return _videos(contents, places, told[:, :, None].expand(-1, -1, ROOM_TOKENS, -1))


def _check_size(batch_size: int, num_frames: int) -> None:
    if batch_size < 1 or num_frames < 1:
        raise VidgenError(f"batch_size={batch_size}, num_frames={num_frames}; allowed: both >= 1.")


def _videos(contents: Tensor, places: Tensor, told: Tensor) -> CodeVideos:
    """Puts on patches what tokens show and are told: contents `(B, P)`, places `(B, F, T)`, told `(B, F, T, 8)`."""
    codes = contents.gather(1, places.flatten(1)).view_as(places)
    return CodeVideos(_to_patches(CODEBOOK[codes]), _to_patches(told), places, codes)


def _to_patches(tokens: Tensor) -> Tensor:
    """`(B, F, T, C)` to `(B, C, F, 2, 2T)`."""
    return tokens.movedim(-1, 1).repeat_interleave(2, dim=-1).unsqueeze(-2).repeat_interleave(2, dim=-2)
