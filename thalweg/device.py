"""The accelerator of a torch device: its architecture by name, and launching on it.

Sizes of launches are counted here: `triton.cdiv` and `triton.next_power_of_2`, made for kernels too, take 3 to 5 us a
call on the host, and a `qsa_select` of two parts made 48 of them.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


@cache
def _arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch(device: torch.device) -> str:
    """The name, as "sm_90" or "gfx950"; the device type ("cpu", "meta") where there is no GPU."""
    if device.type != "cuda":
        return device.type
    return _arch(torch.cuda.current_device() if device.index is None else device.index)


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may begin before the one in front of it has ended (programmatic dependent launch)."""
    name = arch(device)
    return name.startswith("sm_") and int(name[3:]) >= 90


def current(device: torch.device) -> AbstractContextManager:
    """Makes `device` the current one for a launch, and the former one again after it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def cdiv(n: int, size: int) -> int:
    """Tiles of `size` that n things take."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n; 1 for n below 1."""
    return 1 << max(0, n - 1).bit_length()
