"""Thalweg: attention kernels of KDA and QSA for inference of hybrid language models. Public names only."""

from thalweg.kda import (
    gated_rms_norm,
    kda_commit,
    kda_conv,
    kda_decode,
    kda_prefill,
    kda_verify,
    solve_unit_lower,
)
from thalweg.qsa import qsa_append, qsa_attend, qsa_score, qsa_select, qsa_topk, rope_table

__all__ = [
    "gated_rms_norm",
    "kda_commit",
    "kda_conv",
    "kda_decode",
    "kda_prefill",
    "kda_verify",
    "qsa_append",
    "qsa_attend",
    "qsa_score",
    "qsa_select",
    "qsa_topk",
    "rope_table",
    "solve_unit_lower",
]
