"""The QSA oracle itself: against slow float64 code, torch's own attention, and the indexer of transformers."""

import pytest
import qsa_oracle as slow
import torch

from thalweg.qsa import reference


def config_of(budget, ratio=4, heads=4, dim=128, head_dim=64, rotary=64):
    """A `qwen4_exp` text config whose indexer has these sizes, and the modules of transformers."""
    modeling = pytest.importorskip(
        "transformers.models.qwen4_exp.modeling_qwen4_exp",
        reason="the independent oracle is the qwen4_exp model of transformers, which this version does not have",
    )
    lanes = rotary // 2
    config = modeling.Qwen4ExpTextConfig(
        hidden_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        indexer_n_heads=heads,
        indexer_kv_heads=1,
        indexer_head_dim=dim,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": rotary / head_dim,
            "mrope_section": [len(range(axis, lanes, 3)) for axis in range(3)],
            "mrope_interleaved": True,
        },
    )
    return modeling, config


def indexer_of(modeling, config, bias=1.0):
    """An indexer with random weights; queries and keys share a component, so that (see `states`) zeros are rare."""
    indexer = modeling.Qwen4ExpTextQSAIndexer(config, 0)
    with torch.no_grad():
        weight = torch.randn(config.indexer_n_heads + 1, config.indexer_head_dim, config.hidden_size)
        weight += bias * torch.randn(config.indexer_head_dim, config.hidden_size)
        indexer.index_qk_proj.weight.copy_(weight.flatten(0, 1) / config.hidden_size**0.5)
        for layernorm in (indexer.q_layernorm, indexer.k_layernorm):
            layernorm.weight.copy_(0.2 * torch.randn(config.indexer_head_dim))
    return indexer.requires_grad_(False)


def states(config, *shape):
    """Hidden states with a common mean: with the shared component of the weights, scores are hardly ever zero."""
    return torch.randn(*shape, config.hidden_size) + torch.randn(config.hidden_size)


def ours(indexer, config, hidden, axes):
    """Token sets of every row of one unpadded sequence `[T, hidden]` at positions `[T]` or `[T, 3]`, and the scores."""
    ratio, T = config.indexer_compress_ratio, hidden.shape[0]
    rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    table = reference.rope_table(int(axes.max()) + 1, rotary, config.rope_parameters["rope_theta"])
    raw = (hidden @ indexer.index_qk_proj.weight.T).unflatten(-1, (-1, config.indexer_head_dim))
    rows, eps = reference.rope_rows(table, axes), config.rms_norm_eps
    q = reference.index_query(raw[:, :-1], indexer.q_layernorm.weight, rows, torch.float32, eps)
    groups = raw[: T // ratio * ratio, -1].unflatten(0, (-1, ratio))
    first = rows[: T // ratio * ratio : ratio]
    keys = reference.block_key(groups, indexer.k_layernorm.weight, first, torch.float32, eps)
    scores, position = reference.score(q, keys), torch.arange(T)
    visible = reference.visible_blocks(position, ratio)
    ids = reference.topk_blocks(scores, visible, config.indexer_budget // ratio)
    tokens = reference.expand_blocks(ids, position, ratio)
    assert tokens.shape[1] == config.indexer_budget + ratio - 1
    return [{t for t in row if t >= 0} for row in tokens.tolist()], scores


def theirs(modeling, indexer, config, hidden, pads, axes):
    """Token sets of transformers: hidden `[B, S, hidden]`, left padding of each row, positions `[3, B, S]`."""
    B, S, _ = hidden.shape
    rope = modeling.Qwen4ExpTextRotaryEmbedding(config)(hidden, axes)
    real = torch.arange(S) >= torch.tensor(pads)[:, None]
    mask = (torch.ones(S, S, dtype=torch.bool).tril() & real[:, None, :])[:, None]
    chosen = indexer(hidden, rope, mask, None)[:, 0]
    return [[set(row.nonzero().flatten().tolist()) for row in batch] for batch in chosen]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length, budget, ratio", [(3, 16, 4), (61, 16, 4), (64, 32, 4), (50, 12, 3), (64, 64, 4)])
def test_index_sets_equal_those_of_transformers(seed, length, budget, ratio):
    torch.manual_seed(seed)
    modeling, config = config_of(budget, ratio)
    indexer = indexer_of(modeling, config)
    hidden = states(config, 2, length)
    axes = torch.arange(length).expand(3, 2, length)
    want = theirs(modeling, indexer, config, hidden, [0, 0], axes)
    for b in range(2):
        got, _ = ours(indexer, config, hidden[b], torch.arange(length))
        assert got == want[b]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("rotary, dim", [(64, 128), (32, 48)])
def test_index_sets_equal_those_of_transformers_left_padded_and_mrope(seed, mrope, rotary, dim):
    torch.manual_seed(100 + seed)
    modeling, config = config_of(16, dim=dim, rotary=rotary)
    indexer = indexer_of(modeling, config)
    pads, S = [0, 5, 42], 48
    hidden = states(config, 3, S)
    axes = torch.randint(0, 90, (3, 3, S)) if mrope else (torch.arange(S) - torch.tensor(pads)[:, None]).clamp(min=0)
    axes = axes.expand(3, 3, S)
    want = theirs(modeling, indexer, config, hidden, pads, axes)
    for b, pad in enumerate(pads):
        got, _ = ours(indexer, config, hidden[b, pad:], axes[:, b, pad:].T if mrope else axes[0, b, pad:])
        assert [{t + pad for t in row} for row in got] == want[b][pad:]


def test_index_sets_equal_those_of_transformers_one_token_at_a_time():
    """Against their cached decoding: raw keys are kept, queries arrive one by one."""

    class Cache:
        keys = None

        def update_indexer(self, keys, layer):
            self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
            return self.keys

    modeling, config = config_of(16)
    indexer, S, cache = indexer_of(modeling, config), 40, Cache()
    hidden = states(config, 1, S)
    rotary = modeling.Qwen4ExpTextRotaryEmbedding(config)
    got, _ = ours(indexer, config, hidden[0], torch.arange(S))
    for t in range(S):
        rope = rotary(hidden, torch.arange(t + 1).expand(3, 1, t + 1))
        chosen = indexer(hidden[:, t : t + 1], rope, torch.ones(1, 1, 1, t + 1, dtype=torch.bool), cache)
        assert set(chosen.flatten().nonzero().flatten().tolist()) == got[t]


def test_scores_of_tied_sets_equal_those_of_transformers():
    """Without the shared component zeros tie often, and any of them may be taken: then the scores must agree."""
    modeling, config = config_of(24, heads=1)
    indexer = indexer_of(modeling, config, bias=0.0)
    hidden, S, ties = torch.randn(1, 64, config.hidden_size), 64, 0
    want = theirs(modeling, indexer, config, hidden, [0], torch.arange(S).expand(3, 1, S))[0]
    got, scores = ours(indexer, config, hidden[0], torch.arange(S))
    for row in range(S):
        gained = [sorted(scores[row, t // 4] for t in s if t < (row + 1) // 4 * 4) for s in (got[row], want[row])]
        assert gained[0] == gained[1]
        ties += got[row] != want[row]
    assert ties < S


def test_attention_equals_that_of_transformers():
    modeling, config = config_of(16)
    config.num_attention_heads, config.num_key_value_heads = 6, 2
    attention, T, D = modeling.Qwen4ExpTextAttention(config, 0), 40, config.head_dim
    q, k, v = torch.randn(T, 6, D), torch.randn(T, 2, D), torch.randn(T, 2, D)
    ids = torch.stack([torch.tensor(slow.best(torch.randn(10), (p + 1) // 4, 4)) for p in range(T)])
    allowed = torch.zeros(T, T, dtype=torch.bool)
    for p in range(T):
        allowed[p, slow.tokens(ids[p].tolist(), p, 4)] = True
    mask = torch.zeros(1, 1, T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    want, _ = modeling.eager_attention_forward(attention.eval(), *heads_first, mask, D**-0.5)
    got = reference.attend(q, k, v, reference.expand_blocks(ids, torch.arange(T), 4), D**-0.5)
    torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-6)


def test_rope_norm_and_block_key_equal_the_slow_ones():
    T, Hi, Di, R, theta, ratio = 24, 2, 40, 20, 1e4, 4
    raw, weight = torch.randn(T, Hi, Di, dtype=torch.float64), torch.randn(Di, dtype=torch.float64)
    axes = torch.randint(0, 300, (T, 3))
    table = reference.rope_table(300, R, theta)
    for positions in (torch.arange(T), axes):
        rows = reference.rope_rows(table, positions)
        got = reference.index_query(raw, weight, rows, torch.float64)
        want = slow.queries(raw, weight, positions.tolist(), R, theta)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # angles of up to 300 rad in float32
        got = reference.block_key(raw[:, 0].unflatten(0, (-1, ratio)), weight, rows[::ratio], torch.float64)
        want = slow.block_keys(raw[:, 0], weight, positions.tolist(), R, theta, ratio)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_score_equals_the_slow_one_with_leading_dimensions():
    q, keys = torch.randn(2, 3, 5, 4, 32, dtype=torch.float64), torch.randn(2, 3, 7, 32, dtype=torch.float64)
    got = reference.score(q, keys)
    want = torch.einsum("abrhd,abnd->abrhn", q, keys).clamp(min=0).sum(-2)
    torch.testing.assert_close(got, want)
    assert reference.score(q.float(), keys.float()).dtype == torch.float32
    rough = reference.score(q.float(), keys.float(), torch.float32)
    torch.testing.assert_close(rough.double(), want, rtol=1e-4, atol=1e-4)


def test_training_gradients_flow_through_score_and_attend():
    q, keys = torch.randn(4, 2, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(reference.score, (q.requires_grad_(), keys.requires_grad_()))
    q, k, v = (torch.randn(4, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    tokens = torch.tensor([[0, -1, -1], [0, 1, -1], [2, 0, -1], [1, 3, 2]])
    assert torch.autograd.gradcheck(lambda q, k, v: reference.attend(q, k, v, tokens, 0.3), (q, k, v))


def test_expand_blocks_worked_example():
    ids, positions = torch.tensor([[0, -1], [1, 2], [-1, -1], [0, 1]]), torch.tensor([9, 11, -1, 7])
    assert reference.expand_blocks(ids, positions, 4).tolist() == [
        [0, 1, 2, 3, -1, -1, -1, -1, 8, 9, -1],
        [4, 5, 6, 7, 8, 9, 10, 11, -1, -1, -1],
        [-1] * 11,
        [0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1],
    ]


def test_visible_blocks_counts_complete_blocks():
    assert reference.visible_blocks(torch.tensor([-1, 0, 2, 3, 6, 7, 8, -9]), 4).tolist() == [0, 0, 0, 1, 1, 2, 2, 0]


def test_dense_equivalent_is_causal_attention():
    T, D = 30, 16
    q, k, v = (torch.randn(T, heads, D, dtype=torch.float64) for heads in (6, 2, 2))
    wide = [x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.2)[0].transpose(0, 1)
    torch.testing.assert_close(reference.dense_attend(q, k, v, torch.arange(T), 0.2), want)


def test_attend_ignores_what_is_not_listed():
    q, k, v = torch.randn(2, 2, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    tokens = torch.tensor([[1, 4, -1], [-1, -1, -1]])
    for x in (k, v):
        x[[0, 2, 3, 5]] = torch.nan
    got = reference.attend(q, k, v, tokens, 0.5)
    torch.testing.assert_close(got[0].double(), slow.attend(q[0], k, v, [1, 4], 0.5), rtol=1e-5, atol=1e-6)
    assert got[1].count_nonzero() == 0
    assert reference.attend(q, k[:0], v[:0], tokens, 0.5).count_nonzero() == 0
