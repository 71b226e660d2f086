"""A store that speaks S3, in memory, whose behaviour is set by dials (`store_dials.py`).

`with Store(GCS) as store: ...`. It stands wherever an `S3Server` stands, costs milliseconds, checks
signatures, keeps a record of all requests, and can be told to fail. It runs in the test's process.
`test_store.py` compares it with real servers. No pytest here.

`client`, `put`, `delete` and `put_many` go around the dials and leave no record: they see and
change what is there.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

from tests.servers import (
    store_lists,
    store_objects,
    store_signature,
    store_uploads,
)
from tests.servers.s3_server import S3Server
from tests.servers.store_content import Bucket, Refusal, StoredObject, md5
from tests.servers.store_dials import AWS, Dials
from tests.servers.store_lists import element, xml_answer
from tests.servers.store_objects import Call
from tests.servers.told_s3 import Answer, Asked, ToldS3

Operation = Callable[[Call], Answer]
_READS = {"GetObject": store_objects.get, "HeadObject": store_objects.get}
_WRITES: dict[str, Operation] = {
    "PutObject": store_objects.put,
    "CopyObject": store_objects.copy,
    "DeleteObject": store_objects.delete,
    "DeleteObjects": store_objects.delete_many,
    "CreateMultipartUpload": store_uploads.create,
    "UploadPart": store_uploads.put_part,
    "UploadPartCopy": store_uploads.copy_part,
    "CompleteMultipartUpload": store_uploads.complete,
    "AbortMultipartUpload": store_uploads.abort,
    "ListParts": store_uploads.list_parts,
    "ListMultipartUploads": store_uploads.list_uploads,
}
_OBJECTS = {*_READS, *_WRITES} - {"DeleteObjects", "ListMultipartUploads"}
_LISTS = {"ListObjects", "ListObjectsV2"}
_DOMAIN = ".localhost"
_NO_DIALS = replace(AWS, other_regions=None)


class Request(NamedTuple):
    """A request that came, without its body."""

    operation: str
    """As S3's documents name it, such as `ListObjectsV2`."""
    bucket: str
    key: str
    asked: Asked


@dataclass
class Fault:
    """What is wrong with the next requests. `status` and `code` are those of the error answer;
    without a status the answer is the right one, perhaps late or broken."""

    status: int | None = 503
    code: str = "SlowDown"
    times: int | None = 1
    """How many requests; None: all of them."""
    share: float = 1.0
    """Of those that fit, by chance."""
    operations: frozenset[str] = frozenset()
    """None: all."""
    key: str = ""
    """A part of the key."""
    is_done: bool = False
    """The request is done before the error is sent: its answer is lost."""
    breaks_after_bytes: int | None = None
    """The connection breaks after so many bytes of the answer; -1: there is no answer."""
    delay_s: float = 0.0
    """Before anything else."""
    headers: tuple[tuple[str, str], ...] = ()


class Store(S3Server):
    """Started by `with`, gone after it. `dials` may be changed at any time; see `turn`."""

    access_key = "AKIDSTORE"
    secret_key = "store/secret+key"

    def __init__(self, dials: Dials = AWS, seed: int = 1) -> None:
        super().__init__()
        self.dials = dials
        self.region = dials.region
        self.keys: dict[str, tuple[str, str]] = {self.access_key: (self.secret_key, "")}
        """Secret and session token by access key."""
        self.buckets: dict[str, Bucket] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.rule: Callable[[Request], Answer | None] = lambda request: None
        """May answer a request itself."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._front = ToldS3(self._answer, keeps_bodies=False)
        self._back = ToldS3(self._answer_without_dials, keeps_bodies=False)

    def __enter__(self) -> Self:
        self._front.__enter__()
        self.endpoint = self._front.endpoint + self.dials.path
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.close_client()
        self._front.__exit__()
        if self._back.endpoint:
            self._back.__exit__()

    # -- what S3Server offers -------------------------------------------------------------------

    @property
    def client(self) -> Any:
        """A botocore client that meets no dials."""
        if not self._back.endpoint:
            self._back.__enter__()
            endpoint, self.endpoint = self.endpoint, self._back.endpoint
            try:
                return super().client
            finally:
                self.endpoint = endpoint
        return super().client

    @property
    def environment(self) -> dict[str, str]:
        """With which any S3 client finds the store; a store that takes no bucket in the path is its
        own proxy, which needs no names to be resolved."""
        if self.dials.path_style:
            return super().environment
        port = self.endpoint.rpartition(":")[2]
        return {
            "OSS_ACCESS_KEY_ID": self.access_key,
            "OSS_ACCESS_KEY_SECRET": self.secret_key,
            "OSS_ENDPOINT": f"http://localhost:{port}",
            "http_proxy": self.endpoint,
            "no_proxy": "127.0.0.1",
        }

    @property
    def scheme(self) -> str:
        """Of sources."""
        return "s3" if self.dials.path_style else "oss"

    def make_bucket(self, name: str) -> str:
        self.buckets[name] = Bucket(name, self.dials)
        return name

    def put(self, bucket: str, key: str, data: Any, **changes: Any) -> str:
        """Write one object. `changes` are attributes of `StoredObject`, see there."""
        stored = StoredObject(data, changes.pop("e_tag", None) or md5(data))
        for name, value in changes.items():
            assert hasattr(stored, name), name
            setattr(stored, name, value)
        with self._lock:
            self.buckets[bucket].put(self._named(key), stored)
        return stored.e_tag

    def put_many(self, bucket: str, objects: dict[str, bytes]) -> None:
        for key, data in objects.items():
            self.put(bucket, key, data)

    def delete(self, bucket: str, key: str) -> None:
        with self._lock:
            self.buckets[bucket].delete(self._named(key))

    # -- what a test sets and sees -----------------------------------------------------------------

    def turn(self, **changes: Any) -> None:
        """Turn some dials."""
        self.dials = replace(self.dials, **changes)

    def fail(self, *operations: str, **fault: Any) -> Fault:
        """Let the next requests of these operations fail, see `Fault`; all, if none is named."""
        found = Fault(operations=frozenset(operations), **fault)
        self.faults.append(found)
        return found

    def count(self, *operations: str, key: str | None = None) -> int:
        """How many requests of these operations came; of all, if none is named."""
        return sum(
            (not operations or each.operation in operations) and key in (None, each.key)
            for each in list(self.requests)
        )

    def read(self, bucket: str, key: str) -> bytes:
        """What an object has. Raises `KeyError`."""
        with self._lock:
            data: bytes = self.buckets[bucket].objects[self._named(key)].data
        return data

    def objects(self, bucket: str) -> dict[str, bytes]:
        """All that is there."""
        with self._lock:
            return {key: each.data for key, each in self.buckets[bucket].objects.items()}

    def uploads(self, bucket: str) -> list[str]:
        """The keys of the uploads that are open."""
        with self._lock:
            return sorted(each.key for each in self.buckets[bucket].uploads.values())

    # -- answering ------------------------------------------------------------------------------

    def _answer_without_dials(self, asked: Asked) -> Answer:
        request = self._request(asked, _NO_DIALS)
        try:
            with self._lock:
                return self._done(request, asked, _NO_DIALS)
        except Refusal as refusal:
            return _error(refusal, asked, _NO_DIALS)

    def _answer(self, asked: Asked) -> Answer:
        dials = self.dials
        request = self._request(asked, dials)
        self.requests.append(request._replace(asked=asked._replace(body=b"")))
        answer = self.rule(request._replace(asked=asked))
        if answer is None:
            answer = self._answer_with(request, asked, dials)
        headers = {
            "Date": formatdate(time.time() + dials.clock_offset_s, usegmt=True),
            dials.request_id: f"{len(self.requests):016X}",
        }
        return replace(answer, headers=headers | answer.headers)

    def _answer_with(self, request: Request, asked: Asked, dials: Dials) -> Answer:
        fault = self._take_fault(request)
        if fault is None:
            return self._right_answer(request, asked, dials)
        self._stopped.wait(fault.delay_s)
        answer = Answer()
        if fault.is_done or fault.status is None:
            answer = self._right_answer(request, asked, dials)
        if fault.status is not None:
            refusal = Refusal(fault.status, fault.code, "told to", dict(fault.headers))
            answer = _error(refusal, asked, dials)
        return replace(answer, breaks_after_bytes=fault.breaks_after_bytes)

    def _right_answer(self, request: Request, asked: Asked, dials: Dials) -> Answer:
        try:
            self._check(request, asked, dials)
            _wait(request, asked, dials)
            with self._lock:
                return self._done(request, asked, dials)
        except Refusal as refusal:
            return _error(refusal, asked, dials)

    def _take_fault(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.operations and request.operation not in fault.operations:
                    continue
                if fault.key not in request.key or self._random.random() >= fault.share:
                    continue
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self.faults.remove(fault)
                return fault
        return None

    def _request(self, asked: Asked, dials: Dials) -> Request:
        host = re.sub(r":\d+$", "", asked.headers.get("host", ""))
        raw = asked.target.partition("?")[0].removeprefix(dials.path)
        path = unquote(raw, errors="surrogateescape").removeprefix("/")
        if host.endswith(_DOMAIN):
            bucket, key = host.removesuffix(_DOMAIN), path
        else:
            bucket, _, key = path.partition("/")
        return Request(_operation(asked, bucket, key), bucket, self._named(key), asked)

    def _named(self, key: str) -> str:
        """The key under which the store keeps an object."""
        if not self.dials.backslash:
            key = key.replace("\\", "/")
        if self.dials.double_slash == "merges":
            key = re.sub("/+", "/", key).removeprefix("/")
        return key

    def _check(self, request: Request, asked: Asked, dials: Dials) -> None:
        """Raise `Refusal` if the request does not get through to the bucket."""
        if dials.proxy_wants_password and "proxy-authorization" not in asked.headers:
            raise Refusal(407, "", "", {"Proxy-Authenticate": 'Basic realm="proxy"'})
        if dials.redirects_to:
            raise _redirection(request, asked, dials)
        is_virtual = asked.headers.get("host", "").partition(":")[0].endswith(_DOMAIN)
        if not dials.path_style and not is_virtual:
            raise Refusal(403, "SecondLevelDomainForbidden", "use virtual hosted style")
        if store_signature.access_key_of(asked) in dials.expired:
            raise Refusal(400, "ExpiredToken", "The provided token has expired.")
        if dials.checks_signatures:
            now_s = time.time() + dials.clock_offset_s
            store_signature.check(asked, self.keys, dials, now_s)
        if request.operation in dials.lacks:
            raise Refusal(*dials.lacks[request.operation])
        if dials.requester_pays and asked.headers.get("x-amz-request-payer") != "requester":
            raise Refusal(403, "AccessDenied", "Access Denied")
        if request.operation in dials.forbids or not _may(request, asked, dials):
            raise Refusal(403, "AccessDenied", "not authorized to perform: s3:" + request.operation)

    def _done(self, request: Request, asked: Asked, dials: Dials) -> Answer:
        """Do what is asked. Raises `Refusal`."""
        operation, name, key, _ = request
        if operation == "CreateBucket":
            if name in self.buckets:
                raise Refusal(409, "BucketAlreadyOwnedByYou")
            self.buckets[name] = Bucket(name, self.dials)
            return Answer(b"", 200, {"Location": f"/{name}"})
        if operation == "ListBuckets":
            rows = "".join(f"<Bucket>{element('Name', each)}</Bucket>" for each in self.buckets)
            return xml_answer("ListAllMyBucketsResult", f"<Buckets>{rows}</Buckets>", dials)
        bucket = self.buckets.get(name)
        if bucket is None:
            raise Refusal(404, "NoSuchBucket", "The specified bucket does not exist")
        if operation == "HeadBucket":
            return Answer(b"", 200, {"x-amz-bucket-region": dials.region})
        if operation in _LISTS:
            return store_lists.page(bucket, asked, dials)
        if operation == "GetBucketLocation":
            return xml_answer("LocationConstraint", "", dials)
        if operation == "DeleteBucket":
            if bucket.objects:
                raise Refusal(409, "BucketNotEmpty")
            del self.buckets[name]
            return Answer(b"", 204)
        if operation in _OBJECTS:
            _check_key(bucket, request, dials)
        done = (_READS | _WRITES).get(operation)
        if done is None:
            raise Refusal(501, "NotImplemented", f"{asked.method} {asked.target}")
        return done(Call(asked, bucket, key, dials, self.buckets))


def _operation(asked: Asked, bucket: str, key: str) -> str:
    """The name of an operation."""
    query, is_copy = asked.query, "x-amz-copy-source" in asked.headers
    if not bucket:
        return "ListBuckets"
    if key:
        is_of_upload = "uploadId" in query
        found = {
            "GET": "ListParts" if is_of_upload else "GetObject",
            "HEAD": "HeadObject",
            "PUT": "CopyObject" if is_copy else "PutObject",
            "POST": "CompleteMultipartUpload" if is_of_upload else "CreateMultipartUpload",
            "DELETE": "AbortMultipartUpload" if is_of_upload else "DeleteObject",
        }
        if asked.method == "PUT" and is_of_upload:
            return "UploadPartCopy" if is_copy else "UploadPart"
        return found.get(asked.method, asked.method)
    if asked.method == "GET":
        for name, operation in (
            ("uploads", "ListMultipartUploads"),
            ("location", "GetBucketLocation"),
        ):
            if name in query:
                return operation
        return "ListObjectsV2" if query.get("list-type") == "2" else "ListObjects"
    if asked.method == "POST":
        return "DeleteObjects" if "delete" in query else "PostObject"
    return {"HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}[asked.method]


def _may(request: Request, asked: Asked, dials: Dials) -> bool:
    """Whether a policy for users' folders allows it."""
    folder = dials.user_folder
    if not folder:
        return True
    if request.operation in _LISTS or request.operation == "ListMultipartUploads":
        prefix = asked.query.get("prefix", "")
        is_above = folder.startswith(prefix) and (not prefix or prefix.endswith("/"))
        return prefix.startswith(folder) or (is_above and asked.query.get("delimiter") == "/")
    return request.key.startswith(folder)


def _wait(request: Request, asked: Asked, dials: Dials) -> None:
    is_slow = asked.query.get("prefix", "").startswith(dials.list_delay_prefix)
    if request.operation in _LISTS and is_slow:
        time.sleep(dials.list_delay_s)
    elif request.operation == "GetObject":
        time.sleep(dials.get_delay_s)


def _check_key(bucket: Bucket, request: Request, dials: Dials) -> None:
    """Raise `Refusal` if the store can't have the key."""
    key = request.key
    if len(key.encode(errors="surrogateescape")) > 1024:
        raise Refusal(400, "KeyTooLongError", "Your key is too long")
    parts = key.split("/")
    if dials.double_slash == "refuses" and "" in parts[:-1]:
        raise Refusal(400, "XMinioInvalidObjectName", "Object name is not valid.")
    if not dials.dot_parts and {".", ".."} & set(parts):
        raise Refusal(400, "XMinioInvalidResourceName", "Resource name contains bad components")
    if dials.below_a_file != "refused" or request.operation not in ("PutObject", "CopyObject"):
        return
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    if any(each in bucket.objects for each in above):
        raise Refusal(400, "ParentIsObject", "Object-prefix is already an object")
    if not key.endswith("/") and bucket.has_below(key + "/"):
        raise Refusal(409, "ExistsAsDirectory", "already exists as a directory")


def _redirection(request: Request, asked: Asked, dials: Dials) -> Refusal:
    """To another endpoint, as S3 does for a bucket that is new or elsewhere."""
    code = "TemporaryRedirect" if dials.redirect_status == 307 else "PermanentRedirect"
    headers = {}
    if dials.redirect_location:
        headers["Location"] = dials.redirects_to + asked.target
    if dials.names_region in ("both", "header"):
        headers["x-amz-bucket-region"] = dials.region
    host = dials.redirects_to.partition("://")[2]
    more = element("Endpoint", host) + element("Bucket", request.bucket)
    return Refusal(dials.redirect_status, code, "Please re-send this request there.", headers, more)


def _error(refusal: Refusal, asked: Asked, dials: Dials) -> Answer:
    if asked.method == "HEAD" or refusal.status == 304 or not refusal.code:
        return Answer(b"", refusal.status, {"Content-Type": "application/xml"} | refusal.headers)
    inner = element("Code", refusal.code) + element("Message", refusal.message) + refusal.more
    inner += "<RequestId>1</RequestId>"
    answer = xml_answer("Error", inner, replace(dials, namespace=""), refusal.status)
    return replace(answer, headers=answer.headers | refusal.headers)
