"""Alibaba Cloud OSS: finds a bucket's endpoint and the credentials.

OSS uses S3's protocol, so `client.py` does the rest. There are three differences: requests name
the bucket in the host and never in the path; a region has a public and an internal endpoint; the
credentials have their own environment variables.
"""

import os
import re
from functools import partial

from cachefs.errors import UsageError
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import (
    S3Target,
    base_url_of,
    chosen_ca_file,
    new_session,
    split_location,
)
from cachefs.origin.s3.credential_files import choose_source
from cachefs.origin.s3.credentials import (
    BotocoreSource,
    CredentialProvider,
    CredentialSource,
    VariableSource,
)

_PROVIDER = ".aliyuncs.com"
_REGION = re.compile(r"^(?:s3\.)?oss-(?!accelerate)([a-z0-9-]+?)(?:-internal)?\.aliyuncs\.com$")
_ANY_REGION = "cn-hangzhou"
"""The region for an endpoint that names none. Signatures contain the region, but OSS does not check
it for S3 clients."""
_VARIABLES = (
    ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN"),
    (
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
        "ALIBABA_CLOUD_SECURITY_TOKEN",
    ),
)


def resolve_oss(location: str, options: OriginOptions) -> S3Target:
    """Return the target for `BUCKET[/PREFIX]`. Uses `OSS_ENDPOINT` and `OSS_REGION` for values that
    `options` lack. Raises `UsageError`."""
    if options.addressing == "path":
        raise UsageError("OSS takes requests with the bucket in the host only: leave out path")
    bucket, prefix = split_location("oss", location)
    given = options.region or os.environ.get("OSS_REGION")
    region = given.removeprefix("oss-") if given else None
    endpoint = _endpoint(options.endpoint or os.environ.get("OSS_ENDPOINT"), region)
    host = endpoint.partition("://")[2]
    found = _REGION.match(host)
    if found and region and region.removesuffix("-internal") != found[1]:
        raise UsageError(f"endpoint {host} is not in region {region}: leave one of them out")
    base_url = base_url_of(endpoint, bucket, virtual=True)
    if not base_url.partition("://")[2].startswith(f"{bucket}.") or base_url.endswith(f"/{bucket}"):
        raise UsageError(f"{bucket!r} can't be a bucket of OSS: its names have no dots")
    return S3Target(
        bucket=bucket,
        prefix=prefix,
        endpoint=endpoint,
        base_url=base_url,
        region=found[1] if found else region or _ANY_REGION,
        owns_names=host.endswith(_PROVIDER),
        ca_file=chosen_ca_file(options, os.environ.get("AWS_CA_BUNDLE")),
        scheme="oss",
    )


def oss_credential_provider(options: OriginOptions) -> CredentialProvider:
    """Return credentials from `--credentials-dir`, a named profile, or the variables of OSS. Raises
    `UsageError`."""
    return CredentialProvider(choose_source(options, _default_source))


def _default_source(options: OriginOptions) -> CredentialSource:
    if options.profile:
        new_session(options.profile)  # refuses a profile that is missing
        return BotocoreSource(partial(new_session, options.profile))
    return VariableSource(_VARIABLES)


def _endpoint(given: str | None, region: str | None) -> str:
    if given:
        return (given if "://" in given else f"https://{given}").rstrip("/")
    if not region:
        raise UsageError(
            "oss:// needs to know where: --endpoint oss-cn-hangzhou.aliyuncs.com, or "
            "--region cn-hangzhou"
        )
    return f"https://oss-{region}{_PROVIDER}"
