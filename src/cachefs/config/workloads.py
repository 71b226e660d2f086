"""What `--workload` sets: the defaults of other options, by their fields (docs/OPTIONS.md)."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

Workload = Literal["training", "serving", "checkpoint"]
"""What a mount is for."""

_HOUR_S = 3600.0

WORKLOADS: Mapping[Workload, Mapping[str, Any]] = {
    "training": {},  # the defaults that the fields declare
    "serving": {
        "kernel_readahead": 512 << 10,
        "attr_ttl": _HOUR_S,
        "entry_ttl": _HOUR_S,
        "list_ttl": _HOUR_S,
        "passthrough": "auto",
        # `epoch` learns from reads, which the daemon doesn't see when files are passed through.
        "cache_eviction": "lru",
    },
    "checkpoint": {
        "attr_ttl": 10.0,
        "entry_ttl": 10.0,
        "list_ttl": 10.0,
        "negative_ttl": 1.0,
        "publish_interval": 3600.0,
        "write_timeout": 300.0,
    },
}
assert set(WORKLOADS) == set(get_args(Workload))
