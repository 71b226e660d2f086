"""The arguments of s3fs for `fsspec+s3://`, from the same settings as those of `s3://`."""

from typing import Any

from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import S3Target, new_session, resolve_target


def s3_settings(bucket_and_prefix: str, options: OriginOptions) -> tuple[str, dict[str, Any]]:
    """Return the source's identity and the arguments of s3fs. Raises `UsageError`."""
    target = resolve_target(bucket_and_prefix, options, new_session(options.profile))
    return target.identity, _arguments(target, options)


def _arguments(target: S3Target, options: OriginOptions) -> dict[str, Any]:
    """Return `OriginOptions` as arguments of s3fs."""
    config: dict[str, Any] = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.idle_timeout_s,
        "retries": {"max_attempts": 0},
    }
    if options.addressing != "auto":
        config["s3"] = {"addressing_style": options.addressing}
    settings: dict[str, Any] = {
        "anon": options.anonymous,
        "requester_pays": options.requester_pays,
        "config_kwargs": config,
        "client_kwargs": {"region_name": target.region},
    }
    if options.endpoint:
        settings["endpoint_url"] = target.endpoint
    if options.profile:
        settings["profile"] = options.profile
    return settings
