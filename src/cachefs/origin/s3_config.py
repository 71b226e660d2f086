"""Where a bucket is: endpoint, region and addressing.

botocore's session answers for the environment, the shared files and profiles, so that cachefs
agrees with every other tool on the machine.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError, ProfileNotFound

from cachefs.errors import UsageError
from cachefs.origin.names import is_key_name
from cachefs.origin.options import OriginOptions

_DEFAULT_REGION = "us-east-1"
_VIRTUAL_ONLY = (".aliyuncs.com",)
"""Hosts that refuse path-style requests."""


@dataclass(frozen=True, slots=True)
class S3Target:
    """One prefix of one bucket. `prefix` is empty or ends with a slash; `base_url` is what
    keys are appended to after a slash; `endpoint` is for messages. `owns_names`: the names of
    buckets are the provider's own, whatever the endpoint."""

    bucket: str
    prefix: str
    endpoint: str
    base_url: str
    region: str
    owns_names: bool
    ca_file: str | None
    scheme: str = "s3"

    @property
    def url(self) -> str:
        return self.subject("").rstrip("/")

    def subject(self, path: str) -> str:
        """What an object or a prefix is called in messages. `path` is below the prefix."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}{path}"

    @property
    def identity(self) -> str:
        """AWS and OSS bucket names are global; elsewhere the endpoint is part of the name."""
        if self.owns_names:
            return self.url
        host = self.endpoint.partition("://")[2].lower()
        return f"{self.scheme}+{host}://{self.bucket}/{self.prefix}".rstrip("/")


def new_session(profile: str | None) -> Any:
    """A botocore session. Raises `UsageError` for a missing profile or an unreadable file."""
    session = botocore.session.Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound:
        name = profile or session.profile
        raise UsageError(f"AWS profile {name!r} does not exist: see ~/.aws/config") from None
    except BotoCoreError:
        raise UsageError("the AWS configuration file can't be parsed: see ~/.aws/config") from None
    # One second and one attempt are the defaults; a config file must not make a mount hang.
    session.set_config_variable("metadata_service_timeout", 1)
    session.set_config_variable("metadata_service_num_attempts", 1)
    return session


def resolve_target(location: str, options: OriginOptions, session: Any) -> S3Target:
    """The target for `BUCKET[/PREFIX]`. Raises `UsageError`."""
    bucket, prefix = split_location("s3", location)
    region = _region(options, session)
    custom = options.endpoint or _configured_endpoint(session)
    suffix = ".cn" if region.startswith("cn-") else ""
    endpoint = (custom or f"https://s3.{region}.amazonaws.com{suffix}").rstrip("/")
    return S3Target(
        bucket=bucket,
        prefix=prefix,
        endpoint=endpoint,
        base_url=base_url_of(endpoint, bucket, _is_virtual(options, session, endpoint, custom)),
        region=region,
        owns_names=not custom,
        ca_file=session.get_config_variable("ca_bundle"),
    )


def split_location(scheme: str, location: str) -> tuple[str, str]:
    """Bucket and prefix; the prefix is empty or ends with a slash. Raises `UsageError`."""
    bucket, _, prefix = location.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket:
        raise UsageError(f"the source names no bucket: write {scheme}://BUCKET/PREFIX")
    if prefix and not all(is_key_name(part) for part in prefix.split("/")):
        raise UsageError(f"prefix {prefix!r} has a part that can't be a name: write a/b/c")
    return bucket, prefix + "/" if prefix else ""


def read_ca_file(target: S3Target) -> bytes | None:
    """The PEM file that AWS_CA_BUNDLE or the configuration names. Raises `UsageError`."""
    if not target.ca_file:
        return None
    try:
        return Path(target.ca_file).read_bytes()
    except OSError:
        raise UsageError(f"AWS_CA_BUNDLE names {target.ca_file}, which can't be read") from None


def _region(options: OriginOptions, session: Any) -> str:
    # botocore itself looks at AWS_DEFAULT_REGION only; every other SDK at AWS_REGION first.
    configured = session.get_config_variable("region")
    return options.region or os.environ.get("AWS_REGION") or configured or _DEFAULT_REGION


def _configured_endpoint(session: Any) -> str | None:
    """AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then the configuration file."""
    provider = ConfiguredEndpointProvider(
        full_config=session.full_config,
        scoped_config=session.get_scoped_config(),
        client_name="s3",
    )
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    found: str | None = provider.provide()
    return found


def _is_virtual(options: OriginOptions, session: Any, endpoint: str, custom: str | None) -> bool:
    style: str = options.addressing
    if style == "auto":
        section = session.get_scoped_config().get("s3")
        style = section.get("addressing_style", "auto") if isinstance(section, dict) else "auto"
    if style != "auto":
        return style == "virtual"
    return not custom or endpoint.endswith(_VIRTUAL_ONLY)


def base_url_of(endpoint: str, bucket: str, virtual: bool) -> str:
    """What keys are appended to. Raises `UsageError`, which shows nothing that may be secret."""
    scheme, separator, host = endpoint.partition("://")
    if not separator or scheme not in ("http", "https") or not host or set(host) & set("@?#"):
        shown = re.split("[?#]", endpoint.rpartition("@")[2])[0]
        raise UsageError(f"endpoint {shown!r} is no address: write https://HOST[:PORT]")
    # The wildcard in a TLS certificate covers one label only.
    if virtual and not ("." in bucket and scheme == "https"):
        return f"{scheme}://{bucket}.{host}"
    return f"{endpoint}/{bucket}"
