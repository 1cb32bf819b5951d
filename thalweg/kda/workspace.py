"""What a prefill hands from its parallel stage to its serial one: how many bytes, and in how many pieces.

A pack of T tokens in N sequences has T // 32 + N + 2 chunk numbers (`chunks`). Each of them hands over, a value head,
factors 3 x 32 x BK, pairs 3 x 32 x 32 (2 of them in float32) and decays BK, BK being K rounded up to a power of two:
31 KB at K = 128 in bfloat16. They go through the workspace in pieces of consecutive chunk numbers. With more than one
piece there are two buffers, so that one is filled while the other is read, and the float32 state of the one sequence
that a cut may go through is carried in the workspace too, twice. No bit of a result depends on the pieces.

Everything here follows from shapes: host arithmetic, no tensor is looked at.
"""

from typing import NamedTuple

import torch

CHUNK = 32
LIMIT = 2**30  # bytes that a call takes by itself, at most; two chunks of all heads are always taken, however large
PIECES = 4  # of a pack whose stages run beside each other: 2.56 ms at 32,768 tokens and 32 heads, 2.81 in one piece


class Plan(NamedTuple):
    """total chunk numbers, `count` of them a buffer; entry: bytes that one chunk hands over."""

    total: int
    count: int
    buffers: int
    entry: int
    carry: int
    reason: str

    @property
    def bytes(self) -> int:
        return self.buffers * self.count * self.entry + self.carry


def width(K: int) -> int:
    """K as it lies in tiles: rounded up to a power of two, 16 at least."""
    return max(16, 1 << (K - 1).bit_length())


def entry_bytes(HV: int, K: int, dtype: torch.dtype) -> int:
    """Bytes that one chunk of all heads hands over."""
    size, pairs = (2, 3) if dtype == torch.bfloat16 else (4, 2)
    return HV * (size * CHUNK * (3 * width(K) + pairs * CHUNK) + 4 * width(K))


def pieces(total: int, N: int, HV: int, V: int) -> tuple[int, str]:
    """How many pieces a pack is cut in for speed, and why."""
    if total * HV < 4096:
        return 1, "short: launching pieces would take longer than they hide"
    # Pieces follow one another while sequences of one piece are scanned side by side. And where scan programs fill the
    # machine they take from the stage beside them what they give: 1.27 ms at 8,192 tokens and 64 heads, 1.33 in four.
    if N > 1 or HV * -(-V // 64) > 64:
        return 1, "the scan has programs for every multiprocessor: stages beside each other gain nothing"
    return PIECES, "the scan leaves half of the machine idle: a piece is prepared beside it"


def plan(
    T: int, N: int, HV: int, K: int, V: int, dtype: torch.dtype, given: int | None = None, cut: int | None = None
) -> Plan:
    """How a call goes through `given` bytes of workspace (None: as much as it likes, up to LIMIT).

    cut: into how many pieces at least, whatever `pieces` says. Raises ValueError where `given` is below `least_bytes`.
    """
    total, entry, carry = T // CHUNK + N + 2, entry_bytes(HV, K, dtype), 8 * HV * V * K
    limit = LIMIT if given is None else given
    most, reason = pieces(total, N, HV, V) if cut is None else (cut, "as asked")
    if most <= 1 and total * entry <= limit:
        return Plan(total, total, 1, entry, 0, reason)
    count = min(-(-total // max(most, 2)), max(0, limit - carry) // (2 * entry))
    if count < 1 and given is not None:
        if total * entry <= given:
            return Plan(total, total, 1, entry, 0, "one piece fits where two buffers and a carried state do not")
        raise ValueError(f"workspace of at least {least_bytes(T, N, HV, K, V, dtype)} bytes wanted, got {given}")
    if count < -(-total // max(most, 2)):
        reason = "as many pieces as the workspace asks for"
    launches = -(-total // max(1, count))
    return Plan(total, -(-total // launches), 2, entry, carry, reason)


def least_bytes(T: int, N: int, HV: int, K: int, V: int, dtype: torch.dtype) -> int:
    """The smallest workspace that a call can run in: two chunks and the carried state, or the whole pack."""
    entry = entry_bytes(HV, K, dtype)
    return min((T // CHUNK + N + 2) * entry, 2 * entry + 8 * HV * V * K)


def kda_prefill_workspace(
    T: int, N: int, HV: int, K: int, V: int, dtype: torch.dtype = torch.bfloat16, *, least: bool = False
) -> int:
    """Bytes of workspace of a `kda_prefill` of T tokens in N sequences, of v's dtype.

    What a call takes by itself, its outputs apart, and frees when it returns: at most 1 GiB, or two chunks of all
    heads where that is more. A caller who gives more gains nothing; one who gives less pays with launches, down to
    `least=True`, below which a call is refused. A workspace for the largest T and N of a serving engine does for all
    smaller ones.

    Example: 8192 tokens, 64 heads of K = V = 128, bfloat16: 518 MB, at least 12 MB.
    """
    for name, value in (("T", T), ("N", N), ("HV", HV), ("K", K), ("V", V)):
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if name == "K" else 0):
            raise ValueError(f"kda_prefill_workspace: {name} must be a count, got {value!r}")
    return least_bytes(T, N, HV, K, V, dtype) if least else plan(T, N, HV, K, V, dtype).bytes
