"""All options of a mount: names, defaults, checks, help, and the merge of file and command line."""

from cachefs.config.address import OFF, join_address, split_address
from cachefs.config.cache_options import TIER_RATIOS, TIER_SHORTHANDS
from cachefs.config.fields import (
    Flag,
    Group,
    absolute_path,
    nearest,
    user_cache_home,
    user_mem_home,
)
from cachefs.config.load import load_mount_config, load_table_in, load_tier, mountpoint_in
from cachefs.config.model import MountConfig, flags
from cachefs.config.record import FieldInfo
from cachefs.config.set_request import LIVE, load_changes
from cachefs.config.tiers import MIN_CACHE_DIR_BYTES, TierConfig
from cachefs.config.transport import from_json, to_json
from cachefs.config.view_key import view_key

__all__ = [
    "LIVE",
    "MIN_CACHE_DIR_BYTES",
    "OFF",
    "TIER_RATIOS",
    "TIER_SHORTHANDS",
    "FieldInfo",
    "Flag",
    "Group",
    "MountConfig",
    "TierConfig",
    "absolute_path",
    "flags",
    "from_json",
    "join_address",
    "load_changes",
    "load_mount_config",
    "load_table_in",
    "load_tier",
    "mountpoint_in",
    "nearest",
    "split_address",
    "to_json",
    "user_cache_home",
    "user_mem_home",
    "view_key",
]
