"""The store with dials, held against real servers: one script of requests, the same answers."""

import hashlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import botocore.session
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError, ResponseStreamingError

from tests.servers.s3_server import S3Server
from tests.servers.store import Store
from tests.servers.store_dials import OSS, PROFILES, SEAWEEDFS, Dials

MIB = 1 << 20
_SHOWN = {
    *("ETag", "ContentLength", "ContentRange", "ContentEncoding", "Metadata"),
    *("Key", "Size", "IsTruncated", "KeyCount", "Contents", "CommonPrefixes"),
    *("Parts", "PartNumber", "Uploads", "Deleted", "Errors", "Code", "CopyObjectResult"),
    *("CopyPartResult", "Body"),
}
"""What is compared of an answer. Ids, times, owners, hosts and the default type differ."""
_buckets = count(1)


def shown(answer: Any) -> Any:
    """What is compared."""
    if isinstance(answer, dict):
        found = {name: shown(value) for name, value in answer.items() if name in _SHOWN}
        return found | ({"Prefix": answer["Prefix"]} if set(answer) == {"Prefix"} else {})
    if isinstance(answer, list):
        return [shown(each) for each in answer]
    return answer.read() if hasattr(answer, "read") else answer


class Script:
    """Sends requests and writes down what comes."""

    def __init__(self, client: Any, bucket: str, skips: Callable[[str, Any], bool]) -> None:
        self._client = client
        self._bucket = bucket
        self._skips = skips
        self.told: list[Any] = []

    def __call__(self, operation: str, **parameters: Any) -> dict[str, Any]:
        if self._skips(operation, parameters):
            return {}
        if operation in ("copy_object", "upload_part_copy"):
            parameters["CopySource"] = {"Bucket": self._bucket, "Key": parameters["CopySource"]}
        try:
            answer = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        except ClientError as error:
            answer = error.response
            found: Any = answer["Error"]["Code"]
        else:
            found = shown(answer)
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        self.told.append((operation, parameters.get("Key"), status, found))
        return dict(answer)


def objects(do: Script) -> None:
    """Puts, reads, conditions."""
    do("put_object", Key="a", Body=b"0123456789", Metadata={"x": "y"}, ContentType="text/plain")
    do("get_object", Key="a")
    do("get_object", Key="a", Range="bytes=2-4")
    do("get_object", Key="a", Range="bytes=8-100")
    do("get_object", Key="a", Range="bytes=-3")
    do("get_object", Key="a", Range="bytes=10-12")
    do("head_object", Key="a")
    do("head_object", Key="b")
    do("get_object", Key="b")
    tag = hashlib.md5(b"0123456789").hexdigest()
    do("get_object", Key="a", IfMatch=f'"{tag}"')
    do("get_object", Key="a", IfMatch='"another"')
    do("put_object", Key="a", Body=b"x", IfNoneMatch="*")
    do("put_object", Key="new", Body=b"x", IfNoneMatch="*")
    do("put_object", Key="a", Body=b"xy", IfMatch='"another"')
    do("put_object", Key="a", Body=b"xyz", IfMatch=f'"{tag}"')
    do("put_object", Key="gone", Body=b"xyz", IfMatch=f'"{tag}"')
    do("put_object", Key="a", Body=b"bad", ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg==")
    do("get_object", Key="a")


def copies(do: Script) -> None:
    """Copies with both directives, and conditions of the source."""
    tag = do("put_object", Key="old", Body=b"bytes", Metadata={"x": "y"})["ETag"]
    do("copy_object", Key="new", CopySource="old")
    do("head_object", Key="new")
    replaced = {"MetadataDirective": "REPLACE", "Metadata": {"z": "1"}}
    do("copy_object", Key="new", CopySource="old", **replaced)
    do("head_object", Key="new")
    do("copy_object", Key="new", CopySource="old", CopySourceIfMatch=tag)
    do("copy_object", Key="new", CopySource="old", CopySourceIfMatch='"other"')
    do("copy_object", Key="new", CopySource="never")


def uploads(do: Script) -> None:
    """Uploads in parts."""
    upload = {"Key": "u", "UploadId": do("create_multipart_upload", Key="u")["UploadId"]}
    tags = [
        do("upload_part", **upload, PartNumber=number, Body=body)["ETag"]
        for number, body in ((1, b"x" * 5 * MIB), (2, b"end"))
    ]
    do("list_parts", **upload)
    do("list_parts", **upload, MaxParts=1)
    do("list_multipart_uploads", Prefix="u")
    do("head_object", Key="u")
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    do("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
    do("head_object", Key="u")
    do("list_parts", **upload)
    small = {"Key": "u", "UploadId": do("create_multipart_upload", Key="u")["UploadId"]}
    do("put_object", Key="source", Body=b"0123456789")
    # SeaweedFS answers with the ETag of the whole source, so the whole is copied.
    span = {"CopySource": "source", "CopySourceRange": "bytes=0-9"}
    do("upload_part_copy", **small, PartNumber=1, **span)
    do("list_parts", **small)
    do("abort_multipart_upload", **small)
    do("list_parts", **small)
    do("upload_part", **small, PartNumber=1, Body=b"late")
    do("list_multipart_uploads")


def listings(do: Script) -> None:
    """Both versions, with all parameters that we send."""
    for key in ("a/b/c", "a/d", "a-", "b", "b c/é", "d/"):
        do("put_object", Key=key, Body=b"" if key.endswith("/") else key.encode())
    do("list_objects_v2")
    do("list_objects_v2", Delimiter="/")
    do("list_objects_v2", Delimiter="/", Prefix="a/")
    do("list_objects_v2", Prefix="nothing")
    do("list_objects_v2", StartAfter="a/d")
    do("list_objects_v2", StartAfter="b", Delimiter="/")
    do("list_objects", Delimiter="/")
    do("list_objects", Marker="a/d")
    for first, following, told in (
        ("list_objects_v2", "ContinuationToken", "NextContinuationToken"),
        ("list_objects", "Marker", "NextMarker"),
    ):
        page = do(first, MaxKeys=2, Delimiter="/")
        for _ in range(3):
            if not page.get(told):
                break
            page = do(first, MaxKeys=2, Delimiter="/", **{following: page[told]})


def deletions(do: Script) -> None:
    """One by one and together."""
    for key in ("a", "b", "c"):
        do("put_object", Key=key, Body=b"")
    do("delete_object", Key="a")
    do("delete_object", Key="a")
    names = [{"Key": each} for each in ("b", "c", "never")]
    do("delete_objects", Delete={"Objects": names})
    do("list_objects_v2")


SCRIPTS = [objects, copies, uploads, listings, deletions]


def client_of(server: S3Server, endpoint: str, **config: Any) -> Any:
    """A client whose requests meet the dials."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
        config=Config(
            s3={"addressing_style": "path"}, retries={"max_attempts": 0}, proxies={}, **config
        ),
    )


def told_by(
    server: S3Server,
    endpoint: str,
    script: Callable[[Script], None],
    skips: Callable[[str, Any], bool] = lambda *_: False,
) -> list[Any]:
    """What a server says to a script."""
    bucket = server.make_bucket(f"script-{next(_buckets)}")
    do = Script(client_of(server, endpoint), bucket, skips)
    script(do)
    return do.told


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_answers_as_seaweedfs(seaweedfs, script) -> None:
    with Store(SEAWEEDFS) as store:
        ours = told_by(store, store.endpoint, script)
    assert ours == told_by(seaweedfs, seaweedfs.endpoint, script)


def moto_differs(operation: str, parameters: dict[str, Any]) -> bool:
    """moto looks at no digest and no condition of a source, answers 500 to a part of no upload, and
    takes no `max-keys` in the first version of LIST."""
    return (
        "ContentMD5" in parameters
        or parameters.get("CopySourceIfMatch") == '"other"'
        or parameters.get("Body") == b"late"
        or (operation == "list_objects" and "MaxKeys" in parameters)
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_answers_as_moto(moto_s3, script) -> None:
    with Store() as store:
        ours = told_by(store, store.endpoint, script, moto_differs)
    assert ours == told_by(moto_s3, moto_s3.endpoint, script, moto_differs)


# -- signatures ---------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as running:
        running.make_bucket("b")
        running.put("b", "a", b"data")
        yield running


def code_of(call: Callable[..., Any], **parameters: Any) -> str:
    """The code of the refusal of a request, or ""."""
    try:
        call(Bucket="b", **parameters)
    except ClientError as error:
        code: str = error.response["Error"]["Code"]
        return code
    return ""


def test_a_wrong_secret_is_refused(store) -> None:
    store.secret_key = "another"
    client = client_of(store, store.endpoint)
    assert code_of(client.get_object, Key="a") == "SignatureDoesNotMatch"
    assert code_of(client.list_objects_v2, Prefix="é +/") == "SignatureDoesNotMatch"
    store.turn(checks_signatures=False)
    assert code_of(client.get_object, Key="a") == ""


def test_odd_keys_and_queries_are_signed(store) -> None:
    client = client_of(store, store.endpoint)
    for key in ("sp ace+plus/é%41", "a//b", "~!*'()", "x" * 1024):
        assert code_of(client.put_object, Key=key, Body=b"x") == ""
        assert store.read("b", key) == b"x"
        assert code_of(client.list_objects_v2, Prefix=key, StartAfter="é&=") == ""


def test_who_is_not_signed_or_unknown_is_refused(store) -> None:
    client = client_of(store, store.endpoint, signature_version=UNSIGNED)
    assert code_of(client.get_object, Key="a") == "AccessDenied"
    store.access_key = "AKIDOTHER"
    assert code_of(client_of(store, store.endpoint).get_object, Key="a") == "InvalidAccessKeyId"
    store.turn(expired=frozenset(["AKIDOTHER"]))
    assert code_of(client_of(store, store.endpoint).get_object, Key="a") == "ExpiredToken"


@pytest.mark.parametrize("where", ["both", "header", "body", "no"])
def test_the_region_is_named_where_the_dial_says(store, where) -> None:
    """botocore signs for the region that a body tells it."""
    client = client_of(store, store.endpoint)
    store.turn(region="eu-west-9", names_region=where)
    is_in_body = where in ("both", "body")
    expected = "" if is_in_body else "AuthorizationHeaderMalformed"
    assert code_of(client.get_object, Key="a") == expected
    last = store.requests[-1].asked.headers["authorization"]
    assert ("/eu-west-9/" in last) == is_in_body


def test_signatures_of_oss_are_checked() -> None:
    with warnings.catch_warnings():  # of escapes in oss2, whenever Python compiles that
        warnings.simplefilter("ignore")
        oss2 = importlib.import_module("oss2")
    with Store(replace(OSS, path_style=True)) as store:
        store.make_bucket("bucket")
        store.put("bucket", "sp ace+é", b"data")
        good = oss2.Bucket(oss2.Auth(store.access_key, store.secret_key), store.endpoint, "bucket")
        assert good.get_object("sp ace+é").read() == b"data"
        assert [each.key for each in good.list_objects_v2("s").object_list] == ["sp ace+é"]
        bad = oss2.Bucket(oss2.Auth(store.access_key, "another"), store.endpoint, "bucket")
        with pytest.raises(oss2.exceptions.SignatureDoesNotMatch):
            bad.get_object("sp ace+é")


def test_a_clock_that_is_far_off_is_refused(store) -> None:
    store.turn(clock_offset_s=1000.0)
    client = client_of(store, store.endpoint)
    assert code_of(client.list_objects_v2) == "RequestTimeTooSkewed"


# -- dials --------------------------------------------------------------------------------------


def test_what_is_denied_lacking_or_demanded(store) -> None:
    client = client_of(store, store.endpoint)
    store.turn(forbids=frozenset(["DeleteObject"]), lacks={"DeleteObjects": (501, "Lacking")})
    assert code_of(client.delete_object, Key="a") == "AccessDenied"
    assert code_of(client.delete_objects, Delete={"Objects": [{"Key": "a"}]}) == "Lacking"
    store.turn(needs_sse=True)
    assert code_of(client.put_object, Key="a") == "AccessDenied"
    assert code_of(client.put_object, Key="a", ServerSideEncryption="AES256") == ""
    store.turn(needs_sse=False, quota_bytes=5)
    assert code_of(client.put_object, Key="q", Body=b"x" * 9) == "QuotaExceeded"
    store.turn(user_folder="home/me/")
    assert code_of(client.list_objects_v2, Prefix="home/") == "AccessDenied"
    assert code_of(client.list_objects_v2, Prefix="home/", Delimiter="/") == ""
    assert code_of(client.list_objects_v2, Prefix="home/me/x") == ""
    assert code_of(client.get_object, Key="a") == "AccessDenied"


def test_faults_come_as_often_as_told(store) -> None:
    client = client_of(store, store.endpoint)
    store.fail("GetObject", times=2)
    assert [code_of(client.get_object, Key="a") for _ in range(3)] == ["SlowDown", "SlowDown", ""]
    store.fail("PutObject", status=500, code="InternalError", is_done=True)
    assert code_of(client.put_object, Key="lost", Body=b"x") == "InternalError"
    assert store.read("b", "lost") == b"x"
    store.fail("GetObject", status=None, breaks_after_bytes=2)
    with pytest.raises(ResponseStreamingError):
        client.get_object(Bucket="b", Key="a")["Body"].read()
    assert store.count("GetObject") == 4
    assert store.count("PutObject", key="lost") == 1


def test_equal_parts_are_checked_at_the_end(store) -> None:
    store.turn(equal_parts=True, least_part_bytes=0)
    client = client_of(store, store.endpoint)
    for sizes, code in (((5, 5, 3), ""), ((5, 4, 3), "InvalidPart"), ((5, 6), "InvalidPart")):
        upload = client.create_multipart_upload(Bucket="b", Key="u")["UploadId"]
        parts = [
            {
                "PartNumber": number,
                "ETag": client.upload_part(
                    Bucket="b", Key="u", UploadId=upload, PartNumber=number, Body=b"x" * size
                )["ETag"],
            }
            for number, size in enumerate(sizes, 1)
        ]
        done = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        assert code_of(client.complete_multipart_upload, Key="u", **done) == code
    assert store.uploads("b") == ["u", "u"]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_its_own_client_meets_no_dials(profile: Dials) -> None:
    with Store(replace(profile, forbids=frozenset(["PutObject"]))) as store:
        store.make_bucket("b")
        store.client.put_object(Bucket="b", Key="a", Body=b"data")
        assert store.client.get_object(Bucket="b", Key="a")["Body"].read() == b"data"
        assert store.objects("b") == {"a": b"data"}
        assert store.requests == []
