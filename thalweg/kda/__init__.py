"""KDA (Kimi Delta Attention): a delta-rule recurrence with one decay per key channel."""

from thalweg.kda.api import (
    gated_rms_norm,
    kda_commit,
    kda_conv,
    kda_decode,
    kda_prefill,
    kda_verify,
    solve_unit_lower,
)
from thalweg.kda.workspace import kda_prefill_workspace

__all__ = [
    "gated_rms_norm",
    "kda_commit",
    "kda_conv",
    "kda_decode",
    "kda_prefill",
    "kda_prefill_workspace",
    "kda_verify",
    "solve_unit_lower",
]
