"""AWS's endpoints for S3, as botocore's own rules give them: all partitions, FIPS, dual stack and
acceleration. Nothing is asked: the rules and the partitions come with botocore.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from botocore.endpoint_provider import EndpointProvider
from botocore.exceptions import BotoCoreError
from botocore.loaders import Loader, create_loader
from botocore.utils import ensure_boolean

from cachefs.errors import UsageError

_ANY_BUCKET = "bucket"


class AwsEndpoint(NamedTuple):
    """`url` has no bucket. `region` is that of signatures. `is_accelerated`: only a host that
    begins with the bucket works."""

    url: str
    region: str
    is_accelerated: bool


def aws_endpoint(region: str, session: Any) -> AwsEndpoint:
    """Return the endpoint of a region with the settings of the environment and the configuration
    file: AWS_USE_FIPS_ENDPOINT, AWS_USE_DUALSTACK_ENDPOINT, `use_accelerate_endpoint`. Raises
    `UsageError` if there is none."""
    fips = _is_set(session, "use_fips_endpoint")
    dual = _is_set(session, "use_dualstack_endpoint") or _in_section(
        session, "use_dualstack_endpoint"
    )
    accelerated = _in_section(session, "use_accelerate_endpoint")
    loader = session.get_component("data_loader")
    rules = loader.load_service_model("s3", "endpoint-rule-set-1")
    wanted = {"Bucket": _ANY_BUCKET} if accelerated else {}
    try:
        found = EndpointProvider(rules, loader.load_data("partitions")).resolve_endpoint(
            Region=region,
            UseFIPS=fips,
            UseDualStack=dual,
            Accelerate=accelerated,
            ForcePathStyle=False,
            UseGlobalEndpoint=False,
            **wanted,
        )
    except BotoCoreError:
        words = [
            word
            for word, is_on in (("FIPS", fips), ("dual stack", dual), ("acceleration", accelerated))
            if is_on
        ]
        how = f" with {' and '.join(words)}" if words else ""
        raise UsageError(
            f"AWS has no endpoint of S3 in region {region!r}{how}: set another --region, or change "
            "AWS_USE_FIPS_ENDPOINT, AWS_USE_DUALSTACK_ENDPOINT or ~/.aws/config"
        ) from None
    url = str(found.url).replace(f"://{_ANY_BUCKET}.", "://") if accelerated else str(found.url)
    schemes = found.properties.get("authSchemes", [{}])
    return AwsEndpoint(url, schemes[0].get("signingRegion", region), accelerated)


def _is_set(session: Any, name: str) -> bool:
    return bool(ensure_boolean(session.get_config_variable(name)))


def _in_section(session: Any, name: str) -> bool:
    """Whether the section `s3` of the profile switches something on."""
    section = session.get_scoped_config().get("s3")
    return isinstance(section, dict) and bool(ensure_boolean(section.get(name, False)))


@lru_cache(maxsize=1)
def aws_hosts() -> re.Pattern[str]:
    """Return the pattern of S3's hosts at AWS, without the bucket. The groups are the region (may
    be None) and the domain, which each partition has for itself."""
    loader: Loader = create_loader()
    domains = {
        str(partition["outputs"][name])
        for partition in loader.load_data("partitions")["partitions"]
        for name in ("dnsSuffix", "dualStackDnsSuffix")
    }
    return re.compile(
        r"s3(?:[.-](?:dualstack|fips|accelerate))*(?:[.-]([a-z]{2,4}(?:-[a-z0-9]+)+))?"
        rf"\.({'|'.join(re.escape(each) for each in sorted(domains))})"
    )


def is_aws(endpoint: str) -> bool:
    """Whether an endpoint is one of AWS, where names of buckets are unique."""
    host = urlsplit(endpoint).hostname or ""
    return aws_hosts().fullmatch(host.lower()) is not None
