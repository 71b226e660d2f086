"""How slow a disk may be before the cache goes around it."""

import pytest

from cachefs.cache_dir import health
from cachefs.types import Medium


def set_disk_limits(
    patch: pytest.MonkeyPatch, patience_s: float, hung_s: float, most_patience_s: float
) -> None:
    """Let every medium be a disk whose readers wait for `patience_s` at first and for
    `most_patience_s` at most, and which hangs after `hung_s`."""
    limits = health._Limits(500e-6, 256 << 10, patience_s, hung_s)
    patch.setattr(health, "_LIMITS", dict.fromkeys(Medium, limits))
    patch.setattr(health, "_MAX_PATIENCE_S", most_patience_s)
