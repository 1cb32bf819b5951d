"""Thalweg: attention kernels of KDA and QSA for inference of hybrid language models. Public names only.

Names are imported when they are first used, so that `import thalweg` and the command line start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thalweg.kda import (
        gated_rms_norm,
        kda_commit,
        kda_conv,
        kda_decode,
        kda_prefill,
        kda_prefill_workspace,
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
    "kda_prefill_workspace",
    "kda_verify",
    "qsa_append",
    "qsa_attend",
    "qsa_score",
    "qsa_select",
    "qsa_topk",
    "rope_table",
    "solve_unit_lower",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = "qsa" if name.startswith("qsa") or name == "rope_table" else "kda"
    value = getattr(import_module(f"{__name__}.{family}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
