"""Use an ETag as the MD5 of an object's bytes, where it is one.

In S3, OSS, Ceph, MinIO and others, the ETag of an object that was put in one piece is the MD5 of
its bytes. It is no MD5 if the object has several parts (then it contains a `-`), or if the object
is encrypted with a customer's key or a key service; only the headers show this encryption. So if
bytes don't match, the caller checks the headers with a HEAD before it reports an error.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence

from cachefs.origin.http._engine import md5_of_each as _together
from cachefs.types import Buffer

_MD5 = re.compile('^"([0-9a-fA-F]{32})"$')
_EXPRESS = "--x-s3"
"""The suffix of S3 directory bucket names. In these buckets an ETag is never an MD5."""
_TOGETHER = 4
"""At least so many are hashed together. Fewer are not faster than one after the other."""


def md5_in(e_tag: str, bucket: str) -> bytes | None:
    """Return the MD5 that a strong ETag may be, or None if it can't be one."""
    found = _MD5.match(e_tag)
    return bytes.fromhex(found[1]) if found and not bucket.endswith(_EXPRESS) else None


def has_md5(data: Buffer, md5: bytes) -> bool:
    """Whether `data` has this MD5. Takes 0.2 ms for 100 KB and releases the GIL meanwhile."""
    return hashlib.md5(data, usedforsecurity=False).digest() == md5


def md5_of_each(datas: Sequence[Buffer]) -> list[bytes]:
    """Return the MD5 of each of `datas`. Releases the GIL meanwhile. To hash 32 files of 20
    to 180 KB takes .3 to .45 of the time that hashlib needs (`python -m bench.engine md5`)."""
    if len(datas) < _TOGETHER:
        return [hashlib.md5(data, usedforsecurity=False).digest() for data in datas]
    return _together(datas)


def is_no_md5(headers: Mapping[str, str], md5: bytes) -> bool:
    """Whether the headers of a HEAD (with lower-case names) show that the ETag is no MD5."""
    if headers.get("x-amz-server-side-encryption", "").startswith("aws:kms"):
        return True
    if "x-amz-server-side-encryption-customer-algorithm" in headers:
        return True
    # OSS sends Content-MD5 if it has the MD5. Its ETags of copied, appended or posted objects look
    # like MD5s but are none.
    if any(name.startswith("x-oss-") for name in headers):
        return headers.get("content-md5") != base64.b64encode(md5).decode()
    return False
