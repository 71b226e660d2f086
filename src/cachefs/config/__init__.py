"""Every option of a mount: name, default, check, help; file and command line merged."""

from cachefs.config.fields import Flag, Group
from cachefs.config.load import flags, load_mount_config
from cachefs.config.model import MountConfig

__all__ = ["Flag", "Group", "MountConfig", "flags", "load_mount_config"]
