"""What would be wrong: grids that break the rules, puzzles that leak, wrong answers that count."""

from __future__ import annotations

import pytest
import torch

from vidgen.language.dllm.sudoku import SudokuData


@pytest.mark.parametrize("rows, columns", [(2, 2), (2, 3)])
def test_grids_keep_the_rules(rows, columns):
    data = SudokuData(rows, columns, grids=30)
    grids = data.draw(50, torch.Generator().manual_seed(0))
    assert data.solved(torch.full_like(grids, data.mask_token_id), grids).all()
    for grid in grids.view(-1, data.side, data.side).tolist():
        boxes = [
            [grid[r + i][c + j] for i in range(rows) for j in range(columns)]
            for r in range(0, data.side, rows)
            for c in range(0, data.side, columns)
        ]
        for unit in [*grid, *zip(*grid, strict=True), *boxes]:
            assert sorted(unit) == list(range(data.side))


def test_puzzles_show_the_clues_that_were_asked_for_and_are_reproducible():
    data = SudokuData(grids=30)
    puzzles = data.puzzles(20, 5, seed=1)
    assert ((puzzles != 4).sum(1) == 5).all()
    assert torch.equal(puzzles, data.puzzles(20, 5, seed=1)) and not torch.equal(puzzles, data.puzzles(20, 5, seed=2))
    first, second = data.batch(0, 0, 1, 8)["input_ids"], data.batch(1, 0, 1, 8)["input_ids"]
    assert not torch.equal(first, second) and torch.equal(first, data.batch(0, 0, 1, 8)["input_ids"])


def test_wrong_answers_do_not_count():
    data = SudokuData(grids=30)
    grid = data.draw(1, torch.Generator().manual_seed(0))
    puzzle = grid.clone()
    puzzle[:, 4:] = 4
    other = (grid + 1) % 4  # a valid grid that ignores the clues
    twice = grid.clone()
    twice[0, 15] = (twice[0, 15] + 1) % 4
    answers = torch.cat([grid, other, twice])
    assert data.solved(puzzle.expand(3, -1), answers).tolist() == [True, False, False]
