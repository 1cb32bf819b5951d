"""Qwen Sparse Attention: index keys, block scores, selection and attention over the selected blocks."""

from thalweg.qsa.api import qsa_append, qsa_attend, qsa_score, qsa_select, qsa_topk
from thalweg.qsa.reference import rope_table

__all__ = ["qsa_append", "qsa_attend", "qsa_score", "qsa_select", "qsa_topk", "rope_table"]
