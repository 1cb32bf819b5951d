"""Qwen Sparse Attention: index keys, block scores, selection and attention over the selected blocks."""

from thalweg.qsa.api import qsa_append, qsa_attend, qsa_score, qsa_select, qsa_topk
from thalweg.qsa.reference import apply_rope, gemma_norm, rope_rows, rope_table, visible_blocks

__all__ = [
    "apply_rope",
    "gemma_norm",
    "qsa_append",
    "qsa_attend",
    "qsa_score",
    "qsa_select",
    "qsa_topk",
    "rope_rows",
    "rope_table",
    "visible_blocks",
]
