"""Finds a bucket's endpoint, region and addressing style.

botocore's session reads the environment, the shared files and profiles, so that cachefs uses the
same settings as every other tool on the machine.
"""

import logging
import os
import re
import ssl
from dataclasses import dataclass
from typing import Any

import botocore.session
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError, ProfileNotFound

from cachefs.errors import UsageError, reason_of
from cachefs.origin.names import is_key_name
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.endpoints import aws_endpoint, is_aws
from cachefs.trusted_path import read_file

for _name in ("botocore", "urllib3"):
    # Their texts have tracebacks and answers of others; what fails is said by an exception, too.
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

_DEFAULT_REGION = "us-east-1"
_MOST_CA_BYTES = 16 << 20
_BUCKET = re.compile(r"[A-Za-z0-9._:-]{1,255}")
"""Names of all stores; Ceph puts a tenant and a colon in front."""
_DIRECTORY_BUCKET = "--x-s3"
"""The end of the names of S3's directory buckets. They need a session for each few minutes, their
own endpoints, and their listings have no order:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-high-performance.html"""
_VIRTUAL_ONLY = (".aliyuncs.com",)
"""Hosts that refuse path-style requests."""


@dataclass(frozen=True, slots=True)
class S3Target:
    """One prefix of one bucket. `prefix` is empty or ends with a slash. A key's URL is `base_url`,
    a slash and the key. `endpoint` is for messages. `owns_names`: bucket names are unique at this
    provider, so the endpoint is no part of the identity."""

    bucket: str
    prefix: str
    endpoint: str
    base_url: str
    region: str
    owns_names: bool
    ca_file: str | None
    scheme: str = "s3"
    headers: tuple[tuple[str, str], ...] = ()
    """What all requests have, by lower-case names beginning with `x-amz-`. Signatures cover it."""

    @property
    def unpacks(self) -> bool:
        """Whether the store unpacks objects that are stored with Content-Encoding gzip, unless the
        client accepts gzip (cloud.google.com/storage/docs/transcoding)."""
        return self.endpoint.endswith(".googleapis.com")

    @property
    def url(self) -> str:
        return self.subject("").rstrip("/")

    def subject(self, path: str) -> str:
        """Return the name of an object or a prefix in messages. `path` is below the prefix."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}{path}"

    @property
    def identity(self) -> str:
        """AWS and OSS bucket names are global; elsewhere the endpoint is part of the name."""
        if self.owns_names:
            return self.url
        scheme, _, host = self.endpoint.lower().partition("://")
        host = host.removesuffix(":443" if scheme == "https" else ":80")
        return f"{self.scheme}+{host}://{self.bucket}/{self.prefix}".rstrip("/")


def new_session(profile: str | None) -> Any:
    """Return a botocore session. Raises `UsageError` for a missing profile or an invalid file."""
    session = botocore.session.Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound:
        name = profile or session.profile
        raise UsageError(f"AWS profile {name!r} does not exist: see ~/.aws/config") from None
    except BotoCoreError:
        raise UsageError("the AWS configuration file can't be parsed: see ~/.aws/config") from None
    # These are botocore's defaults. A configuration file must not make a mount hang.
    session.set_config_variable("metadata_service_timeout", 1)
    session.set_config_variable("metadata_service_num_attempts", 1)
    return session


def resolve_target(location: str, options: OriginOptions, session: Any) -> S3Target:
    """Return the target for `BUCKET[/PREFIX]`. Raises `UsageError`."""
    bucket, prefix = split_location("s3", location)
    region = _region(options, session)
    custom = options.endpoint or _configured_endpoint(session)
    if custom:
        endpoint, virtual = custom.rstrip("/"), _is_virtual(options, session, custom, True)
    else:
        endpoint, region, virtual = aws_endpoint(region, session)
        if virtual and "." in bucket:
            raise UsageError(f"{bucket} can't be reached with acceleration: its name has dots")
        virtual = virtual or _is_virtual(options, session, endpoint, False)
    return S3Target(
        bucket=bucket,
        prefix=prefix,
        endpoint=endpoint,
        base_url=base_url_of(endpoint, bucket, virtual),
        region=region,
        owns_names=not custom or is_aws(endpoint),
        ca_file=chosen_ca_file(options, session.get_config_variable("ca_bundle")),
        headers=(("x-amz-request-payer", "requester"),) if options.requester_pays else (),
    )


def split_location(scheme: str, location: str) -> tuple[str, str]:
    """Return bucket and prefix; the prefix is empty or ends with a slash. Raises `UsageError`."""
    bucket, _, prefix = location.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket:
        raise UsageError(f"the source names no bucket: write {scheme}://BUCKET/PREFIX")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{bucket!r} can't be a bucket: write {scheme}://BUCKET/PREFIX")
    if bucket.endswith(_DIRECTORY_BUCKET):
        raise UsageError(
            f"{bucket} is a directory bucket (S3 Express One Zone), which cachefs can't read: use "
            "a general purpose bucket"
        )
    if prefix and not all(is_key_name(part) for part in prefix.split("/")):
        raise UsageError(f"prefix {prefix!r} has a part that can't be a name: write a/b/c")
    return bucket, prefix + "/" if prefix else ""


def chosen_ca_file(options: OriginOptions, configured: str | None) -> str | None:
    """Return the file of `--ca-file`, else the `configured` one, else None."""
    return str(options.ca_file) if options.ca_file else configured or None


def check_ca_file(target: S3Target) -> None:
    """Read the PEM file that `--ca-file`, AWS_CA_BUNDLE or the configuration names, if there is
    one. Raises `UsageError` if it can't be used."""
    if not target.ca_file:
        return
    try:
        pem = read_file(target.ca_file, _MOST_CA_BYTES)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except (ValueError, ssl.SSLError):
        raise UsageError(
            f"the CA file {target.ca_file} has no usable certificate: write it in PEM form"
        ) from None
    except OSError as error:
        raise UsageError(
            f"the CA file {target.ca_file} can't be read ({reason_of(error)}): correct --ca-file "
            "or AWS_CA_BUNDLE"
        ) from None


def _region(options: OriginOptions, session: Any) -> str:
    # botocore itself reads only AWS_DEFAULT_REGION; every other SDK reads AWS_REGION first.
    configured = session.get_config_variable("region")
    return options.region or os.environ.get("AWS_REGION") or configured or _DEFAULT_REGION


def _configured_endpoint(session: Any) -> str | None:
    """Return the first that is set: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the configuration
    file. Return None if there is none."""
    provider = ConfiguredEndpointProvider(
        full_config=session.full_config,
        scoped_config=session.get_scoped_config(),
        client_name="s3",
    )
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    found: str | None = provider.provide()
    return found


def _is_virtual(options: OriginOptions, session: Any, endpoint: str, custom: bool) -> bool:
    style: str = options.addressing
    if style == "auto":
        section = session.get_scoped_config().get("s3")
        style = section.get("addressing_style", "auto") if isinstance(section, dict) else "auto"
    if style != "auto":
        return style == "virtual"
    return not custom or endpoint.rstrip("/").endswith(_VIRTUAL_ONLY)


def base_url_of(endpoint: str, bucket: str, virtual: bool) -> str:
    """Return the URL for `S3Target.base_url`. Raises `UsageError` without any secret in it."""
    scheme, separator, host = endpoint.partition("://")
    if not separator or scheme not in ("http", "https") or not host or set(host) & set("@?#"):
        shown = re.split("[?#]", endpoint.rpartition("@")[2])[0]
        raise UsageError(f"endpoint {shown!r} is no address: write https://HOST[:PORT]")
    # The wildcard in a TLS certificate covers only one label.
    if virtual and not ("." in bucket and scheme == "https"):
        return f"{scheme}://{bucket}.{host}"
    return f"{endpoint}/{bucket}"
