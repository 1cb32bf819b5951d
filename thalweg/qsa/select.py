"""The ids of each row's k best blocks: scores and their top-k, some rows at a time, under a cap of memory.

As many rows are scored together as fit `workspace_bytes`; at least one. Rows that see at most k blocks are not scored.
What a row holds while it is worked on: N float32 scores and the top-k's maxima and list. On Hopper the scorer makes the
maxima while it has the scores, so that the top-k reads 8,192 scores a row where k is 512, not all of them.

    index_q, block_keys, page_table, row_request, visible     as in `score`
    out                                                       [R, k] int32, as in `topk`
"""

import torch

from thalweg.device import arch
from thalweg.qsa import score as scores
from thalweg.qsa import topk

ALIGNED = 16  # scores: a row's first one, so that they are loaded and stored four at a time


def rows_at_once(R: int, N: int, k: int, workspace_bytes: int, config: topk.Config) -> int:
    """Rows that fit the workspace, in parts of one size; whole tiles of 64 where more than one does."""
    row = 4 * (N + topk.row_words(N, k, config))
    rows = max(1, min(R, workspace_bytes // row))
    if rows == R or rows < 64:
        return rows
    tiles = -(-R // 64)
    parts = -(-tiles // (rows // 64))
    return -(-tiles // parts) * 64


def select(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    workspace_bytes: int,
    hopper: bool = False,
) -> None:
    """Writes `out`; no sync. The workspace is allocated once for all parts. hopper: by the scorer in Gluon."""
    R, k = out.shape
    requests, columns = page_table.shape
    N = columns * block_keys.shape[1]
    if N == 0 or requests == 0:
        out.fill_(-1)
    if out.numel() == 0 or N == 0 or requests == 0:
        return
    width = -(-N // ALIGNED) * ALIGNED
    config = topk.choose(topk.Shape(R, N, k), arch(out.device))
    rows = rows_at_once(R, width, k, workspace_bytes, config)
    matrix = torch.empty(rows, width, dtype=torch.float32, device=out.device)
    words = topk.row_words(N, k, config)
    maxima = torch.empty(rows, words, dtype=torch.int32, device=out.device)
    run, given = scores.score, {}
    if hopper:
        from thalweg.qsa import score_gluon

        run = score_gluon.score
        if (config.fan, config.stored) == (4, 2) and 2 <= config.levels <= 3:  # groups of 16 and of 64 blocks
            given = {"maxima": maxima.view(torch.float32), "above": topk.above(N, config)}
    for lo in range(0, R, rows):
        part = slice(lo, min(lo + rows, R))
        values = matrix[: part.stop - lo, :N]
        owner, seen = row_request[part], visible[part]
        run(index_q[part], block_keys, page_table, owner, seen, values, least=k, fill=False, **given)
        topk.topk(values, seen, out[part], owner, requests, maxima.view(-1), config, bool(given))
