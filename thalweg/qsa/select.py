"""The ids of each row's k best blocks under a cap of memory: by score and top-k, or by lists of survivors.

Score and top-k, `exact`: as many rows are scored together as fit the memory; at least one. Rows that see at most k
blocks are not scored. What a row holds while it is worked on: N float32 scores and the top-k's maxima and list. On
Hopper the scorer makes the maxima while it has the scores, so that the top-k reads 8,192 scores a row where k is 512,
not all of them.

Lists, `survivors`, on Hopper where rows and blocks are many: what reaches a threshold is all that is stored. Rows for
which that was not enough are done by `exact`, in the memory that the lists leave. The ids are the same.

    index_q, block_keys, page_table, row_request, visible     as in `score`
    out                                                       [R, k] int32, as in `topk`
"""

import torch

from thalweg.device import arch
from thalweg.qsa import score as scores
from thalweg.qsa import topk

LISTED = 4096  # rows whose survivors are listed together: a row tile has four programs, the lists take 120 MB
# The fewest scores of rows listed together; us by lists and by a matrix on an H200: 4,096 rows of 24,576 blocks 370 and
# 374, of 32,768 427 and 457, of 63,744 672 and 806; 2,048 rows 234 and 230, 361 and 404; 1,024 138 and 125, 220
# and 203.
LISTED_SCORES = 100_000_000
LISTED_K = 1024  # the most: a program holds four times as many entries
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


def exact(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    memory: torch.Tensor,
    hopper: bool,
) -> None:
    """Writes `out` by score and top-k, as many rows at a time as fit `memory`, which is int32."""
    (R, k), requests = out.shape, page_table.shape[0]
    N = page_table.shape[1] * block_keys.shape[1]
    width = -(-N // ALIGNED) * ALIGNED
    config = topk.choose(topk.Shape(R, N, k), arch(out.device))
    words = topk.row_words(N, k, config)
    rows = rows_at_once(R, width, k, 4 * memory.numel(), config)
    matrix = memory[: rows * width].view(torch.float32).view(rows, width)
    maxima = memory[rows * width : rows * (width + words)].view(rows, words)
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


def exact_words(R: int, N: int, k: int, workspace_bytes: int, device: str) -> int:
    """int32 words of memory that `exact` takes: what the workspace allows, at least a row, not more than all rows."""
    config, width = topk.choose(topk.Shape(R, N, k), device), -(-N // ALIGNED) * ALIGNED
    rows = rows_at_once(R, width, k, workspace_bytes, config)
    return rows * (width + topk.row_words(N, k, config))


def lists_rows(R: int, N: int, k: int, requests: int, heads: int, dim: int, workspace_bytes: int, device: str) -> int:
    """Rows whose survivors are listed together; 0 where the matrix is better or lists would take most of the workspace.

    Of several requests rows see too unlike counts of blocks for programs of equal row tiles.
    """
    rows = min(R, LISTED)
    if rows * N < LISTED_SCORES or k > LISTED_K or requests > 1:
        return 0
    from thalweg.qsa import survivors

    config = survivors.choose(survivors.Shape(rows, N, k, heads, dim), device)
    taken = 4 * rows * config.row_words + survivors.rest_bytes(rows, requests, dim, config)
    return rows if 3 * taken <= 2 * workspace_bytes else 0


def select(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    workspace_bytes: int,
    hopper: bool = False,
) -> torch.Tensor | None:
    """Writes `out`; no sync. The workspace is allocated once for all parts. hopper: by the scorer in Gluon.

    Returns, where survivors were listed, what the rows of the last part that were done again see, else 0.
    """
    (R, k), (requests, columns), (_, heads, dim) = out.shape, page_table.shape, index_q.shape
    N, device = columns * block_keys.shape[1], arch(out.device)
    if N == 0 or requests == 0:
        out.fill_(-1)
    if out.numel() == 0 or N == 0 or requests == 0:
        return None
    rows = lists_rows(R, N, k, requests, heads, dim, workspace_bytes, device) if hopper else 0
    if rows == 0:
        words = exact_words(R, N, k, workspace_bytes, device)
        memory = torch.empty(words, dtype=torch.int32, device=out.device)
        exact(index_q, block_keys, page_table, row_request, visible, out, memory, hopper)
        return None
    from thalweg.qsa import survivors

    config = survivors.choose(survivors.Shape(rows, N, k, heads, dim), device)
    listed = -(-rows * config.row_words // 64) * 64
    words = exact_words(rows, N, k, workspace_bytes - 4 * listed, device)
    words = max(words, survivors.rest_bytes(rows, requests, dim, config) // 4)
    memory = torch.empty(listed + words, dtype=torch.int32, device=out.device)
    flags = None
    for lo in range(0, R, rows):
        part = slice(lo, min(lo + rows, R))
        call = (index_q[part], block_keys, page_table, row_request[part])

        def again(flags, call=call, part=part):
            exact(*call, flags, out[part], memory[listed:], True)

        flags = survivors.select(*call, visible[part], out[part], memory[:listed], memory[listed:], config, again)
    return flags
