"""The key of what a kernel may have cached of a mount."""

import hashlib
import json

from cachefs.config.model import MountConfig
from cachefs.types import Medium


def view_key(config: MountConfig) -> str:
    """Return a key that differs if another daemon can't continue a mount of this configuration.

    The kernel has inode numbers, which come from the database of names in the first cache
    directory, and flags that are fixed when it mounts. All other options may change.
    """
    homes = [tier for tier in config.tiers if tier.medium is not Medium.MEM] or config.tiers
    fixed = [config.source, str(homes[0].paths[0]), config.read_only, config.allow_other]
    return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:32]
