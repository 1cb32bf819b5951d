"""`qsa_attend` row by row in Gluon, emulated on the CPU, against the slow one: poison, holes, gates, strides."""

import gluon_emulator
import pytest
import torch
from test_qsa_attend import Cache

pytest.importorskip("triton")

from thalweg.qsa import gather

HOPPER = gluon_emulator.load("qsa", "attention_gluon")


def slots_of(cache, owner, positions, ids, ratio=4):
    """Places in the pool of the tokens of every row, as `attention` lists them: `[R, width]` int32, -1 masked."""
    R, k = ids.shape
    width = -(-(k * ratio + ratio - 1) // HOPPER.UNIT) * HOPPER.UNIT
    slots = torch.full((R, width), -1, dtype=torch.int32)
    for row, (r, p) in enumerate(zip(owner.tolist(), positions.tolist())):
        if not 0 <= r < len(cache.table) or p < 0:
            continue
        visible = (p + 1) // ratio
        listed = [[b * ratio + i if 0 <= b < visible else -1 for i in range(ratio)] for b in ids[row].tolist()]
        tail = [t if t <= p else -1 for t in range(visible * ratio, visible * ratio + ratio - 1)]
        for at, t in enumerate(sum(listed, []) + tail):
            page = int(cache.table[r, t // cache.page]) if 0 <= t < cache.table.shape[1] * cache.page else -1
            if page >= 0:
                slots[row, at] = page * cache.page + t % cache.page
    return slots


def run(cache, q, owner, positions, ids, gate=None, out=None, taken=None, tile=1, first=0, scale=None, v_scale=1.0,
        done=None, **turns):  # fmt: skip
    slots = slots_of(cache, owner, positions, ids)[first:]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype) if out is None else out
    scales = (scale or q.shape[-1] ** -0.5) * 1.4426950408889634, v_scale
    heavy, part = (q, *cache.pool.unbind(3)), len(q) - first
    HOPPER.rows(heavy, owner, positions, slots, gate, out, first, part, len(cache.table), slots.shape[1], scales, taken,
                tile, done, **turns)  # fmt: skip
    return out


def near(got, want, worst=4e-3):
    assert (got.double() - want).norm() <= worst * want.norm()


@pytest.mark.parametrize("heads,kv_heads,D,page,dtype", (
    (6, 2, 64, 7, torch.bfloat16), (24, 2, 256, 64, torch.bfloat16), (16, 1, 128, 64, torch.float16)
))  # fmt: skip
def test_equals_the_slow_one_over_poisoned_pages(heads, kv_heads, D, page, dtype):
    """One unit and several, lists in any order, no list; outputs and queries of any strides; a gate."""
    cache = Cache([261, 7, 200], page, heads, kv_heads, D, dtype)
    call = cache.rows([0, 2, 1, 0, 2], [260, 199, 6, 0, 130], 40)
    want = cache.want(*call)
    cache.poison(*call[1:])
    near(run(cache, *call), want)
    done = torch.zeros(1, dtype=torch.int32)
    near(run(cache, *call, done=done), want)
    assert done == 5 * kv_heads  # every program says so
    near(run(cache, *call, done=done.fill_(-9), wave=1, slack=0), want)  # the one before it is never done
    gate = torch.randn(D, 5, heads).permute(1, 2, 0)
    out = torch.full((heads, D, 5), torch.nan, dtype=dtype).permute(2, 0, 1)
    wide = torch.full((5, heads, 2 * D), torch.nan, dtype=dtype)
    wide[:, :, ::2] = call[0]
    near(run(cache, wide[:, :, ::2], *call[1:], gate=gate, out=out, v_scale=0.5), want * torch.sigmoid(gate) / 2)


def test_padding_holes_and_rows_with_nothing_to_attend_to_are_zeros():
    cache = Cache([300, 5], 10, 12, 1, 64, holes={(0, 0), (0, 1)})
    q, owner, positions, ids = cache.rows([0, 0, 0, 1, 1, 0], [299, 18, 39, 4, 4, 299], 40)
    want = cache.want(q, owner, positions, ids, holes={(0, 0), (0, 1)})
    owner[3], owner[4], positions[2] = 2, -1, -1
    gate = torch.full_like(q, torch.nan)
    gate[[0, 5]] = 40.0  # sigmoid(40) is 1
    got = run(cache, q, owner, positions, ids, gate=gate)
    near(got[[0, 5]], want[[0, 5]])
    assert got[1:5].count_nonzero() == 0 and not got.isnan().any()


def test_rows_of_shared_tiles_and_before_the_first_are_left_as_they_are():
    cache = Cache([90], 7, 4, 2, 64)
    call = cache.rows([0] * 7, range(80, 87), 20)
    got = run(cache, *call, taken=torch.tensor([0, 3, 0, 0], dtype=torch.int32), tile=2, first=1)
    assert got[[0, 2, 3]].isnan().all()
    near(got[[1, 4, 5, 6]], cache.want(*call)[[1, 4, 5, 6]])


def test_what_it_cannot_take_is_said():
    q, cache = torch.zeros(100, 12, 256).bfloat16(), torch.zeros(3, 8, 2, 2, 256).bfloat16()
    k, v = cache.unbind(3)
    assert gather.why_not_gluon(q, k, v, 16) is None
    for changed, reason in (
        ((q[:, :, :96], k[..., :96], v[..., :96]), "takes heads of 64, 128 or 256, up to 16 a KV head"),
        ((torch.zeros(1, 34, 256).bfloat16(), k, v), "takes heads of 64, 128 or 256, up to 16 a KV head"),
        ((q.half(), k, v), "takes queries and cache of one 16-bit dtype, got torch.float16 and torch.bfloat16"),
        ((q.float(), k.float(), v.float()), "takes queries and cache of one 16-bit dtype"),
        ((q[:, :, :64], cache[:, :, :, 0, 4:68], v[..., :64]), "contiguous in D and aligned to 16 bytes"),
        ((q[:, :, ::4], k[..., ::4], v[..., ::4]), "contiguous in D and aligned to 16 bytes"),
        ((q, k, torch.stack([v, v], 1)[:, 0]), "takes evenly spaced pages"),
    ):
        assert reason in gather.why_not_gluon(*changed, 16)
