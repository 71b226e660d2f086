"""Where a bucket is: AWS's endpoints, and what users write as a source (origin/s3/config.py)."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.config
import botocore.session
import pytest

from cachefs.errors import UsageError
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3.client import ObjectStoreOrigin
from cachefs.origin.s3.config import S3Target, new_session, resolve_target


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def target(bucket: str = "data", **options: str) -> S3Target:
    return resolve_target(bucket, OriginOptions(**options), new_session(None))  # type: ignore[arg-type]


class _Asked(Exception):
    """The address of a request that is not sent."""

    @staticmethod
    def of(request: Any, **_: object) -> None:
        raise _Asked(request.url)


def botocores_host(region: str, bucket: str = "data") -> str:
    client = botocore.session.Session().create_client(
        "s3",
        region_name=region,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=botocore.config.Config(
            proxies={}, s3={"us_east_1_regional_endpoint": "regional"}, signature_version="s3v4"
        ),
    )
    client.meta.events.register("before-send", _Asked.of)
    with pytest.raises(_Asked) as asked:
        client.list_objects_v2(Bucket=bucket)
    return urlsplit(str(asked.value)).netloc


PARTITIONS = ["us-east-1", "us-gov-west-1", "cn-north-1", "eusc-de-east-1", "us-iso-east-1"]


@pytest.mark.parametrize("region", [*PARTITIONS, "us-isob-east-1"])
def test_each_partition_has_its_own_domain(region: str) -> None:
    assert urlsplit(target(region=region).base_url).netloc == botocores_host(region)


@pytest.mark.parametrize("region", ["us-east-1", "us-gov-west-1"])
@pytest.mark.parametrize(
    "names",
    [
        ("AWS_USE_FIPS_ENDPOINT",),
        ("AWS_USE_DUALSTACK_ENDPOINT",),
        ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"),
    ],
)
def test_fips_and_dual_stack(
    monkeypatch: pytest.MonkeyPatch, region: str, names: tuple[str, ...]
) -> None:
    for name in names:
        monkeypatch.setenv(name, "true")
    host = urlsplit(target(region=region).base_url).netloc
    assert host == botocores_host(region)
    assert ("fips" in host) is ("AWS_USE_FIPS_ENDPOINT" in names)


@pytest.mark.parametrize(
    "lines",
    ["use_fips_endpoint = true", "use_dualstack_endpoint = true", "s3 =\n  addressing_style = path"]
    + [f"s3 =\n  use_{what}_endpoint = true" for what in ("dualstack", "accelerate")],
)
def test_the_configuration_file_counts(tmp_path: Path, lines: str) -> None:
    (tmp_path / "config").write_text(f"[default]\n{lines}\n")
    assert urlsplit(target(region="us-west-2").base_url).netloc == botocores_host("us-west-2")


def test_a_given_endpoint_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    assert target(endpoint="http://127.0.0.1:9000").base_url == "http://127.0.0.1:9000/data"


def test_a_region_without_such_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    with pytest.raises(UsageError, match=r"no endpoint of S3 in region 'cn-north-1' with FIPS: "):
        target(region="cn-north-1")


@pytest.mark.parametrize("region", ["a b", "x/y", "@host"])
def test_an_odd_region(region: str) -> None:
    with pytest.raises(UsageError, match="no endpoint of S3 in region"):
        target(region=region)


def test_acceleration_needs_a_name_without_dots(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\ns3 =\n  use_accelerate_endpoint = true\n")
    with pytest.raises(UsageError, match="acceleration"):
        target("da.ta")


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("s3a://data/p", "s3://data/p"),
        ("s3n://data/p/", "s3://data/p"),
        ("S3://data/p", "s3://data/p"),
        (" s3://data/p ", "s3://data/p"),
        ("s3://data/a b", "s3://data/a b"),
        ("s3://my-ap-0123abcd-s3alias/p", "s3://my-ap-0123abcd-s3alias/p"),
    ],
)
async def test_other_spellings_are_the_same_source(written: str, url: str) -> None:
    origin = open_origin(written)
    assert isinstance(origin, ObjectStoreOrigin)
    assert (origin.url, origin.identity) == (url, url)
    await origin.aclose()


@pytest.mark.parametrize(
    ("endpoint", "identity"),
    [
        ("https://s3.eu-west-1.amazonaws.com", "s3://data"),
        ("https://s3.cn-north-1.amazonaws.com.cn/", "s3://data"),
        ("https://s3-accelerate.amazonaws.com", "s3://data"),
        ("https://s3.amazonaws.com.example.com", "s3+s3.amazonaws.com.example.com://data"),
        ("http://Store:80", "s3+store://data"),
        ("https://store:443/", "s3+store://data"),
        ("http://store:443", "s3+store:443://data"),
    ],
)
def test_an_endpoint_does_not_change_what_a_source_is(endpoint: str, identity: str) -> None:
    assert target(endpoint=endpoint).identity == identity


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("arn:aws:s3:::data/p/q", "write s3://data/p/q$"),
        ("arn:aws-cn:s3:::data/*", "write s3://data$"),
        ("s3://arn:aws:s3:::data", "write s3://data$"),
        ("s3://arn:aws:s3:us-east-1:123456789012:accesspoint/my-ap/p", "write the alias"),
        ("arn:aws:s3-outposts:us-east-1:1:outpost/op/accesspoint/ap", "write the alias"),
        ("s3://data.s3.eu-west-1.amazonaws.com/p", "write s3://data/p "),
        ("s3://data--use1-az4--x-s3/p", "directory bucket"),
        ("s3:///p", "names no bucket"),
        ("s3://da ta/p", "can't be a bucket"),
        ("s3://data?x=1", "can't be a bucket"),
        ("s3:/data/p", "is no URL; write s3://BUCKET/PREFIX"),
        ("data/p", "is no URL; write s3://BUCKET/PREFIX"),
    ],
)
def test_what_is_no_source_says_what_to_write(source: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        open_origin(source)
    assert "\n" not in str(caught.value)
