"""What all tiers of a mount share: options and the objects that concern several tiers."""

from dataclasses import dataclass, field

from cachefs.cache.policies import DEFAULT_POLICY, History
from cachefs.cache.tier.admission_filter import AdmissionFilter
from cachefs.cache.tier.cooldown import Cooldown
from cachefs.cache.tier.partial_checksums import PartialChecksums
from cachefs.cache_dir.open_slabs import OpenSlabs


@dataclass(frozen=True)
class CacheOptions:
    """The options that all tiers of a mount share."""

    policy: str = DEFAULT_POLICY
    """A name of `policies.POLICIES`."""
    verify_full: bool = False
    """On every read also verify blocks in memory, and that the slot belongs to the block."""
    scrub_interval_s: float = 0.0
    """Interval in which the scrubber verifies every block once; 0 or infinity: never."""
    tolerant: bool = False
    """Log an error and continue without a tier if its index can't be opened."""
    open_slabs: OpenSlabs = field(default_factory=OpenSlabs)


@dataclass(frozen=True)
class Common:
    """What a `TierSet` gives to each of its tiers."""

    options: CacheOptions
    history: History
    admission_filter: AdmissionFilter
    partial_checksums: PartialChecksums = field(default_factory=PartialChecksums)
    cooldown: Cooldown = field(default_factory=Cooldown)
