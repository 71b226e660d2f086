"""What an origin is opened and guarded with, from a mount's configuration."""

from cachefs.config import MountConfig
from cachefs.origin.options import OriginOptions
from cachefs.origin.resilience import Resilience

_MOST_THREADS = 4096
"""For requests to the origin. `ResilientOrigin` says how many are wanted at a time; a silent server
holds threads that nobody waits for any more, and they must not be missing elsewhere."""
_LARGE_BODY_S = 10.0
"""What the largest body may take on top of everything else."""


def origin_options(config: MountConfig) -> OriginOptions:
    """For `open_origin`."""
    return OriginOptions(
        endpoint=config.endpoint,
        region=config.region,
        addressing=config.addressing,
        anonymous=config.anonymous,
        profile=config.profile,
        max_downloads=_MOST_THREADS,
        connect_timeout_s=config.request_timeout,
        idle_timeout_s=config.request_timeout,
        request_timeout_s=config.read_timeout + _LARGE_BODY_S,
        hdfs_driver=config.hdfs_driver,
        oss_driver=config.oss_driver,
        credentials_dir=config.credentials_dir,
        verify_origin=config.verify_origin,
    )


def resilience(config: MountConfig) -> Resilience:
    """For `ResilientOrigin`."""
    return Resilience(
        read_timeout_s=config.read_timeout,
        request_timeout_s=config.request_timeout,
        max_downloads=config.max_downloads,
        download_limit=config.download_limit or None,
        hedge=config.hedge,
    )
