"""Where a bucket is and who asks: endpoint, region, addressing and credentials.

botocore's session answers for the environment, the shared files, profiles, and container and
instance roles, so that cachefs agrees with every other tool on the machine.
"""

import os
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound

from cachefs.errors import AccessDeniedError, UsageError
from cachefs.origin.names import is_key_name
from cachefs.origin.options import OriginOptions

_DEFAULT_REGION = "us-east-1"
_VIRTUAL_ONLY = (".aliyuncs.com",)
"""Hosts that refuse path-style requests."""
_OBSTORE_ASKS_AGAIN = timedelta(minutes=10)
"""Credentials that botocore renews are handed to obstore for this long; botocore renews them
at the latest 10 minutes before they end."""


@dataclass(frozen=True, slots=True)
class S3Target:
    """One prefix of one bucket. `prefix` is empty or ends with a slash; `base_url` is what
    keys are appended to after a slash; `endpoint` is for messages."""

    bucket: str
    prefix: str
    endpoint: str
    base_url: str
    region: str
    is_aws: bool
    ca_file: str | None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def identity(self) -> str:
        """AWS bucket names are global; elsewhere the endpoint is part of the name."""
        if self.is_aws:
            return self.url
        host = self.endpoint.partition("://")[2].lower()
        return f"s3+{host}://{self.bucket}/{self.prefix}".rstrip("/")


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
    bucket, _, prefix = location.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket:
        raise UsageError("the S3 source names no bucket: write s3://BUCKET/PREFIX")
    if prefix and not all(is_key_name(part) for part in prefix.split("/")):
        raise UsageError(f"prefix {prefix!r} has a part that can't be a name: write a/b/c")
    region = _region(options, session)
    custom = options.endpoint or _configured_endpoint(session)
    suffix = ".cn" if region.startswith("cn-") else ""
    endpoint = (custom or f"https://s3.{region}.amazonaws.com{suffix}").rstrip("/")
    return S3Target(
        bucket=bucket,
        prefix=prefix + "/" if prefix else "",
        endpoint=endpoint,
        base_url=_base_url(endpoint, bucket, _is_virtual(options, session, endpoint, custom)),
        region=region,
        is_aws=not custom,
        ca_file=session.get_config_variable("ca_bundle"),
    )


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


def _base_url(endpoint: str, bucket: str, virtual: bool) -> str:
    scheme, separator, host = endpoint.partition("://")
    if not separator or scheme not in ("http", "https") or not host or "@" in host:
        shown = endpoint.rpartition("@")[2]
        raise UsageError(f"endpoint {shown!r} is no address: write https://HOST[:PORT]")
    # The wildcard in a TLS certificate covers one label only.
    if virtual and not ("." in bucket and scheme == "https"):
        return f"{scheme}://{bucket}.{host}"
    return f"{endpoint}/{bucket}"


class Credentials:
    """botocore's credential chain, for the signer of listings and for obstore alike."""

    def __init__(self, session: Any, anonymous: bool) -> None:
        self.anonymous = anonymous
        self._session = session
        self._lock = threading.Lock()
        self._found: Any = None

    def current(self) -> Any:
        """botocore's frozen credentials, or None for anonymous access.

        Blocks while a role is looked up or renewed: call it in a worker thread. Raises
        `AccessDeniedError` when there are none.
        """
        if self.anonymous:
            return None
        try:
            with self._lock:
                if self._found is None:
                    self._found = self._session.get_credentials()
            frozen = self._found and self._found.get_frozen_credentials()
        except (BotoCoreError, ClientError, OSError) as error:
            raise AccessDeniedError(
                f"AWS credentials can't be loaded ({type(error).__name__}): check the profile, "
                "the role and AWS_ACCESS_KEY_ID"
            ) from None
        if not frozen or not frozen.access_key or not frozen.secret_key:
            raise AccessDeniedError(
                "no AWS credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "give a profile, or ask for anonymous access"
            )
        return frozen

    def for_obstore(self) -> dict[str, Any]:
        """The callback that obstore asks for credentials."""
        frozen = self.current()
        renewed = hasattr(self._found, "refresh_needed")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _OBSTORE_ASKS_AGAIN if renewed else None,
        }
