"""Converts a mount's configuration to the options of its origin."""

from cachefs.config import MountConfig
from cachefs.errors import UsageError
from cachefs.origin.options import OriginOptions
from cachefs.origin.resilience import Resilience
from cachefs.trusted_path import read_secret

_MOST_THREADS = 4096
"""Maximum number of threads for requests to the origin. `ResilientOrigin` limits the concurrent
requests. A silent server also holds threads of abandoned requests: these must not use up the
threads of other requests."""
_LARGE_BODY_S = 10.0
"""Time that the largest body may take in addition to `read_timeout`."""
_MOST_SECRET_BYTES = 4096
_WRITE_REQUEST_S = 20.0
"""A store may take long to answer when it has received all bytes; but a second try needs time."""


def origin_options(config: MountConfig) -> OriginOptions:
    """Return the options for `open_origin`."""
    return OriginOptions(
        endpoint=config.endpoint,
        region=config.region,
        addressing=config.addressing,
        anonymous=config.anonymous,
        requester_pays=config.requester_pays,
        profile=config.profile,
        max_threads=_MOST_THREADS,
        connect_timeout_s=config.request_timeout,
        idle_timeout_s=config.request_timeout,
        total_timeout_s=config.read_timeout + _LARGE_BODY_S,
        follow_links=config.follow_links,
        hdfs_driver=config.hdfs_driver,
        oss_driver=config.oss_driver,
        credentials_dir=config.credentials_dir,
        ca_file=config.ca_file,
        verify_origin=config.verify_origin,
        sse=None if config.sse == "default" else config.sse,
        sse_kms_key=config.sse_kms_key,
        storage_class=config.storage_class,
        acl=None if config.acl == "default" else config.acl,
        tags=config.tags,
    )


def resilience(config: MountConfig) -> Resilience:
    """Return the options for `ResilientOrigin`."""
    return Resilience(
        read_timeout_s=config.read_timeout,
        request_timeout_s=config.request_timeout,
        write_timeout_s=config.write_timeout,
        write_request_s=min(_WRITE_REQUEST_S, config.write_timeout / 2),
        max_downloads=config.max_downloads,
        download_limit=config.download_limit or None,
        hedge=config.hedge,
    )


def shared_secret(config: MountConfig) -> bytes:
    """Return the secret of the shared tier without white space around it; empty if there is none.
    Blocks. Raises `UsageError`."""
    path = config.shared_secret_file
    if path is None:
        return b""
    try:
        secret = read_secret(path, 2 * _MOST_SECRET_BYTES).strip()
    except OSError as error:
        # Without the name: it may be the secret itself, given by mistake.
        raise UsageError(f"the --shared-secret-file can't be read: {error.strerror}") from None
    if not 0 < len(secret) <= _MOST_SECRET_BYTES:
        raise UsageError(
            f"the --shared-secret-file must have 1 to {_MOST_SECRET_BYTES} bytes, such as from "
            "openssl rand -hex 32"
        )
    return secret
