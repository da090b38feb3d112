"""Sudoku as a language: every cell is a token, and a puzzle is a row of them with masks.

Filling many cells at once goes wrong unless their predictions agree with each other, which is what a denoising step
can't see of its neighbors; so few steps are hard, and one cell per step is easy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vidgen.runtime.checks import check_whole
from vidgen.runtime.device import generator_for


@dataclass(frozen=True)
class SudokuData:
    """Random grids, as `fit` asks for them. Tokens are the digits from 0; the mask is the token after them.

    Args:
        box_rows: rows of a box; 2 x 2 boxes make a 4 x 4 grid, of which there are 288, 2 x 3 boxes a 6 x 6 grid.
        box_columns: columns of a box.
        grids: different grids that are drawn from, before their digits are renamed at random.
        seed: fixes grids and batches.
    """

    box_rows: int = 2
    box_columns: int = 2
    grids: int = 6000
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(2, 4, box_rows=self.box_rows, box_columns=self.box_columns)
        check_whole(1, grids=self.grids)

    @property
    def side(self) -> int:
        """Digits, and cells of a row."""
        return self.box_rows * self.box_columns

    @property
    def mask_token_id(self) -> int:
        return self.side

    @property
    def vocab_size(self) -> int:
        return self.side + 1

    @property
    def cells(self) -> int:
        return self.side**2

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.draw(batch_size, generator_for(self.seed, 1, step, rank))}

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Finished grids `(count, cells)`."""
        grids = _grids(self.box_rows, self.box_columns, self.grids, self.seed)
        chosen = grids[torch.randint(len(grids), (count,), generator=generator)]
        names = torch.rand(count, self.side, generator=generator).argsort(1)
        return names.gather(1, chosen)

    def puzzles(self, count: int, clues: int, seed: int) -> torch.Tensor:
        """Puzzles `(count, cells)` with a number of clues; they may have several solutions."""
        check_whole(0, self.cells, clues=clues)
        generator = generator_for(self.seed, 2, seed, clues)
        solved = self.draw(count, generator)
        order = torch.rand(count, self.cells, generator=generator).argsort(1)
        return solved.masked_fill(order >= clues, self.mask_token_id)

    def solved(self, puzzles: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Which answers keep all clues and have every digit once in each row, column and box; bool `(count,)`."""
        kept = ((puzzles == self.mask_token_id) | (puzzles == answers)).all(1)
        digits = torch.arange(self.side, device=answers.device)
        units = answers[:, _units(self.box_rows, self.box_columns).to(answers.device)]  # (count, units, side)
        return kept & (units.sort(-1).values == digits).all(-1).all(-1)


@functools.cache
def _units(box_rows: int, box_columns: int) -> torch.Tensor:
    """Cells of the rows, columns and boxes, `(3 * side, side)`."""
    side = box_rows * box_columns
    cells = torch.arange(side**2).view(side, side)
    boxes = cells.view(box_columns, box_rows, box_rows, box_columns).permute(0, 2, 1, 3).reshape(side, side)
    return torch.cat([cells, cells.T, boxes])


@functools.cache
def _grids(box_rows: int, box_columns: int, count: int, seed: int) -> torch.Tensor:
    """Random finished grids `(count, cells)`, each found by a search that tries digits in random order."""
    side = box_rows * box_columns
    generator = generator_for(seed, 0)
    units = _units(box_rows, box_columns)
    of_cell = [(units == cell).any(1).nonzero().flatten().tolist() for cell in range(side**2)]
    grids = []
    for _ in range(count):
        orders = torch.rand(side**2, side, generator=generator).argsort(1).tolist()
        used = [set() for _ in units]
        grids.append(_search([], orders, used, of_cell))
    return torch.tensor(grids)


def _search(
    grid: list[int], orders: list[list[int]], used: list[set[int]], of_cell: list[list[int]]
) -> list[int] | None:
    if len(grid) == len(orders):
        return grid
    groups = [used[unit] for unit in of_cell[len(grid)]]
    for digit in orders[len(grid)]:
        if any(digit in group for group in groups):
            continue
        for group in groups:
            group.add(digit)
        found = _search([*grid, digit], orders, used, of_cell)
        if found is not None:
            return found
        for group in groups:
            group.remove(digit)
    return None
