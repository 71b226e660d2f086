"""How far an origin is, by the time that its answers take.

There are two thresholds, because an error costs differently. A reader of an origin that is wrongly
taken for far sends more and smaller GETs, which cost CPU and money. A load job that wrongly takes
an origin for near has 2 requests under way instead of 24 while a reader waits.
"""

FAR_S = 0.02
"""From here on, read-ahead and loads use more requests at a time. An object store in the same
network answers sooner, even on a busy machine. With less latency read-ahead in GETs of 8 MiB fills
the connections."""
NETWORK_BOUND_S = 0.012
"""From here on, a small read waits for the network, not for other requests."""


def is_far(quickest_s: float) -> bool:
    """Whether an origin is far whose quickest answer of all has taken `quickest_s` (0: unknown).
    A busy machine makes single answers slow, never the quickest one."""
    return quickest_s >= FAR_S


def is_network_bound(unhindered_s: float | None) -> bool:
    """Whether a read waits for the network alone: `unhindered_s` is what a small read takes without
    contention (`ResilientOrigin.unhindered_s`), None if that is unknown."""
    return unhindered_s is not None and unhindered_s >= NETWORK_BOUND_S
