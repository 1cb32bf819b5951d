"""QSA spelled out row by row in float64, sharing no code with the package: what its tests expect."""

import torch


def norm(x, weight, eps=1e-6):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())


def rotate(x, axes, rotary, theta):
    """NeoX rotation as complex numbers: x `[..., D]` at one position (int), or at three (one an axis)."""
    half = rotary // 2
    axes = [axes] * 3 if isinstance(axes, int) else [int(a) for a in axes]
    lane = torch.arange(half, dtype=torch.float64)
    where = torch.tensor([axes[f % 3] for f in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), where * theta ** (-2 * lane / rotary))
    z = torch.complex(x[..., :half].double(), x[..., half:rotary].double()) * turn
    return torch.cat([z.real, z.imag, x[..., rotary:].double()], -1)


def queries(raw, weight, positions, rotary, theta, dtype=torch.float64):
    """raw `[T, Hi, Di]` -> `[T, Hi, Di]`, rounded to dtype after the norm and after the rotation."""
    rows = [rotate(norm(x, weight).to(dtype), p, rotary, theta).to(dtype) for x, p in zip(raw, positions)]
    return torch.stack(rows) if rows else raw.to(dtype)


def block_keys(raw, weight, positions, rotary, theta, ratio, dtype=torch.float64):
    """raw `[N, Di]` of one sequence from its token 0 -> its complete blocks; also rounded after the mean."""
    means, starts = [], range(0, raw.shape[0] - ratio + 1, ratio)
    for start in starts:
        means.append(raw[start : start + ratio].double().mean(0).to(dtype)[None])
    first = [positions[start] for start in starts]
    keys = queries(torch.stack(means), weight, first, rotary, theta, dtype)[:, 0] if means else raw.to(dtype)[:0]
    return keys


def scores(q, keys, order=None):
    """q `[Hi, Di]`, keys `[N, Di]` -> `[N]` float32: each dot rounded once, then relu, then heads added in `order`."""
    total = torch.zeros(keys.shape[0], dtype=torch.float32)
    for head in order or range(q.shape[0]):
        dots = (q[head].double() * keys.double()).sum(-1).float()
        total = total + dots.clamp(min=0)
    return total


def best(values, visible, k):
    """Ids of the k best of values[:visible], ascending, then -1: by a plain sort on (is NaN, -value, id)."""
    values = [float(v) for v in values]
    ids = range(max(0, min(int(visible), len(values))))
    ranked = sorted(ids, key=lambda i: (values[i] != values[i], 0.0 if values[i] != values[i] else -values[i], i))
    chosen = sorted(ranked[:k])
    return chosen + [-1] * (k - len(chosen))


def tokens(ids, position, ratio):
    """Token positions of the selected blocks and the open tail of a row, as a list."""
    blocks = [b * ratio + j for b in ids if b >= 0 for j in range(ratio)]
    return blocks + list(range((position + 1) // ratio * ratio, position + 1))


def attend(q, k, v, where, scale):
    """q `[Hq, D]`, k, v `[N, Hkv, D]`, token list -> `[Hq, D]` float64."""
    if not where:
        return torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[0] // k.shape[1]
    heads = []
    for h in range(q.shape[0]):
        keys, values = k[where, h // group].double(), v[where, h // group].double()
        heads.append(torch.softmax(scale * (keys @ q[h].double()), 0) @ values)
    return torch.stack(heads)


def paged(sequences, rows, spare=2, holes=()):
    """Puts each sequence `[N, ...]` into pages of `rows`, in shuffled order, everything else NaN.

    Returns the pool and the page table; (request, page) pairs in `holes` are left out of the table.
    """
    need = [-(-len(s) // rows) for s in sequences]
    pages = torch.randperm(sum(need) + spare).tolist()
    shape = (len(pages), rows, *sequences[0].shape[1:])
    pool = torch.full(shape, torch.nan, dtype=torch.float32).to(sequences[0].dtype)
    table = torch.full((len(sequences), max(need, default=0) + 1), -1, dtype=torch.int32)
    for r, sequence in enumerate(sequences):
        for i in range(need[r]):
            page, piece = pages.pop(), sequence[i * rows : (i + 1) * rows]
            if (r, i) not in holes:
                table[r, i] = page
                pool[page, : len(piece)] = piece
    return pool, table
