"""The ids of each row's k best blocks: scores and their top-k, some rows at a time, under a cap of memory.

As many rows are scored together as fit `workspace_bytes`; at least one. Rows that see at most k blocks are not scored.
What a row holds while it is worked on: N float32 scores and the top-k's maxima and list.

    index_q, block_keys, page_table, row_request, visible     as in `score`
    out                                                       [R, k] int32, as in `topk`
"""

import torch

from thalweg.device import arch
from thalweg.qsa import score as scores
from thalweg.qsa import topk

ALIGNED = 16  # scores: a row's first one, so that they are loaded and stored four at a time


def rows_at_once(R: int, N: int, k: int, workspace_bytes: int, config: topk.Config) -> int:
    """Rows that fit the workspace; whole tiles of 64 where more than one does."""
    row = 4 * (N + topk.row_words(N, k, config))
    rows = max(1, min(R, workspace_bytes // row))
    return rows if rows == R or rows < 64 else rows // 64 * 64


def select(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    workspace_bytes: int,
) -> None:
    """Writes `out`; no sync. The workspace is allocated once for all parts."""
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
    words = rows * topk.row_words(N, k, config)
    maxima = torch.empty(words, dtype=torch.int32, device=out.device)
    for lo in range(0, R, rows):
        part = slice(lo, min(lo + rows, R))
        values = matrix[: part.stop - lo, :N]
        owner, seen = row_request[part], visible[part]
        scores.score(index_q[part], block_keys, page_table, owner, seen, values, least=k, fill=False)
        topk.topk(values, seen, out[part], owner, requests, workspace=maxima, config=config)
