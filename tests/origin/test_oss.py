"""Where OSS is and who asks. What reading does is in the contract suite, over OSS addressing."""

import importlib
import os
import sys
import warnings

import pytest

from cachefs.errors import AccessDeniedError, CredentialsError, UsageError
from cachefs.origin.open_origin import OriginOptions, open_origin
from tests.servers.told_s3 import Answer, ToldS3

HANGZHOU = "https://data.oss-cn-hangzhou.aliyuncs.com"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("AWS_", "OSS_", "ALIBABA_"))]:
        monkeypatch.delenv(name)


def opened(url="oss://data/p", **options):
    return open_origin(url, OriginOptions(**options))


@pytest.mark.parametrize(
    ("options", "base_url", "region"),
    [
        ({"endpoint": "oss-cn-hangzhou.aliyuncs.com"}, HANGZHOU, "cn-hangzhou"),
        ({"endpoint": "https://oss-cn-hangzhou.aliyuncs.com/"}, HANGZHOU, "cn-hangzhou"),
        ({"region": "cn-hangzhou"}, HANGZHOU, "cn-hangzhou"),
        ({"region": "oss-cn-hangzhou"}, HANGZHOU, "cn-hangzhou"),
        (
            {"endpoint": "http://oss-cn-hangzhou-internal.aliyuncs.com"},
            "http://data.oss-cn-hangzhou-internal.aliyuncs.com",
            "cn-hangzhou",
        ),
        (
            {"region": "oss-cn-beijing-internal"},
            "https://data.oss-cn-beijing-internal.aliyuncs.com",
            "cn-beijing",
        ),
        (
            {"endpoint": "s3.oss-ap-southeast-1.aliyuncs.com", "region": "ap-southeast-1"},
            "https://data.s3.oss-ap-southeast-1.aliyuncs.com",
            "ap-southeast-1",
        ),
        (
            {"endpoint": "oss-accelerate.aliyuncs.com", "region": "cn-shanghai"},
            "https://data.oss-accelerate.aliyuncs.com",
            "cn-shanghai",
        ),
        (
            {"endpoint": "http://store.example:8000", "region": "x"},
            "http://data.store.example:8000",
            "x",
        ),
    ],
)
async def test_endpoint_and_region_from_either(options, base_url, region) -> None:
    target = opened(**options)._target
    assert (target.base_url, target.region) == (base_url, region)


async def test_endpoint_and_region_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("OSS_REGION", "cn-hangzhou")
    assert opened()._target.base_url == HANGZHOU
    monkeypatch.setenv("OSS_ENDPOINT", "oss-cn-beijing.aliyuncs.com")
    monkeypatch.delenv("OSS_REGION")
    assert opened()._target.region == "cn-beijing"


async def test_identity_does_not_tell_the_way_there() -> None:
    ways = [
        {"endpoint": "oss-cn-hangzhou.aliyuncs.com"},
        {"endpoint": "oss-cn-hangzhou-internal.aliyuncs.com"},
        {"region": "cn-hangzhou", "anonymous": True},
    ]
    assert {opened(**way).identity for way in ways} == {"oss://data/p"}
    elsewhere = opened(endpoint="http://store.example:8000")
    assert elsewhere.identity == "oss+store.example:8000://data/p"
    assert elsewhere.url == "oss://data/p"


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("oss://data", {}, "--endpoint"),
        ("oss://", {"region": "cn-hangzhou"}, "no bucket"),
        ("oss://da.ta", {"region": "cn-hangzhou"}, "no dots"),
        ("oss://data/a//b", {"region": "cn-hangzhou"}, "prefix"),
        ("oss://data", {"region": "cn-hangzhou", "addressing": "path"}, "in the host"),
        ("oss://data", {"endpoint": "http://u:hunter2@h", "region": "x"}, "no address"),
        (
            "oss://data",
            {"endpoint": "oss-cn-beijing.aliyuncs.com", "region": "cn-hangzhou"},
            "not in region",
        ),
    ],
)
async def test_contradictions(url, options, says) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        opened(url, **options)
    assert "hunter2" not in str(caught.value)


async def test_credentials(monkeypatch) -> None:
    def provider():
        return opened(region="cn-hangzhou")._provider

    with pytest.raises(CredentialsError, match="OSS_ACCESS_KEY_ID"):
        provider().current()
    for name in ("ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "SECURITY_TOKEN"):
        monkeypatch.setenv(f"ALIBABA_CLOUD_{name}", f"ali-{name}")
    assert provider().current().access_key == "ali-ACCESS_KEY_ID"
    assert provider().current().token == "ali-SECURITY_TOKEN"
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "hunter2\n")
    with pytest.raises(CredentialsError, match="line ends") as caught:
        provider().current()
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "s")
    assert provider().current()[:3] == ("id", "s", None)
    assert opened(region="cn-hangzhou", anonymous=True)._provider.current() is None


async def test_ossfs_that_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ossfs", None)
    monkeypatch.setitem(sys.modules, "oss2", None)
    with pytest.raises(UsageError, match=r"pip install 'cachefs\[ossfs\]'"):
        opened(region="cn-hangzhou", oss_driver="ossfs")


DENIED = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"


@pytest.mark.parametrize("url", ["oss://data", "oss://data/p"])
async def test_ossfs_says_that_a_listing_is_denied(monkeypatch, url) -> None:
    with warnings.catch_warnings():  # Python warns of escapes in oss2, whenever it compiles that
        warnings.simplefilter("ignore")
        importlib.import_module("ossfs")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "secret")
    with ToldS3(lambda asked: Answer(DENIED, 403, {"x-oss-request-id": "1"})) as server:
        origin = opened(url, endpoint=server.endpoint, oss_driver="ossfs")
        with pytest.raises(AccessDeniedError):
            async for _ in origin.list_dir(""):
                pass
        await origin.aclose()
