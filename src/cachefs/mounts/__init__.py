"""Mountpoints: the kernel's table, checks before mounting, unmounting, and runtime files."""

from cachefs.mounts.inside import (
    checked_mountpoint,
    entry_of,
    locate,
    not_mounted,
    nothing_mounted,
    served_on,
    why_out_of_reach,
)
from cachefs.mounts.prepare import prepare_mountpoint
from cachefs.mounts.runtime import (
    RuntimeEntry,
    RuntimeFile,
    default_log_file,
    find_entry,
    keeper_path,
    mountpoint_of,
    open_owner,
    read_entries,
    remove_leftovers,
    socket_path,
    spare_path,
)
from cachefs.mounts.table import (
    FSTYPE,
    MountEntry,
    MountHealth,
    all_mounts,
    cachefs_mounts,
    canonical,
    check_answers,
    find_mount,
)
from cachefs.mounts.unmount import holders, unmount, unmount_from

__all__ = [
    "FSTYPE",
    "MountEntry",
    "MountHealth",
    "RuntimeEntry",
    "RuntimeFile",
    "all_mounts",
    "cachefs_mounts",
    "canonical",
    "check_answers",
    "checked_mountpoint",
    "default_log_file",
    "entry_of",
    "find_entry",
    "find_mount",
    "holders",
    "keeper_path",
    "locate",
    "mountpoint_of",
    "not_mounted",
    "nothing_mounted",
    "open_owner",
    "prepare_mountpoint",
    "read_entries",
    "remove_leftovers",
    "served_on",
    "socket_path",
    "spare_path",
    "unmount",
    "unmount_from",
    "why_out_of_reach",
]
