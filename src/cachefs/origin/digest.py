"""What an ETag says about an object's bytes.

The ETag of an object that was put in one piece is the MD5 of its bytes in S3, OSS, Ceph, MinIO and
others. It isn't where the object has several parts (then it has a `-`), nor where it is encrypted
with a key of the customer's own or of a key service, which only the headers tell. obstore doesn't
show these, nor `x-amz-checksum-*`; so bytes that don't match are held against them before they are
called wrong.
"""

import base64
import hashlib
import re
from collections.abc import Mapping

from cachefs.types import Buffer

_MD5 = re.compile('^"([0-9a-fA-F]{32})"$')
_EXPRESS = "--x-s3"
"""How names of S3's directory buckets end, where an ETag is never an MD5."""


def md5_in(e_tag: str, bucket: str) -> bytes | None:
    """The digest that a strong ETag may be, or None if it can't be one."""
    found = _MD5.match(e_tag)
    return bytes.fromhex(found[1]) if found and not bucket.endswith(_EXPRESS) else None


def has_md5(data: Buffer, md5: bytes) -> bool:
    """Takes 0.2 ms for 100 KB and lets other threads run meanwhile."""
    return hashlib.md5(data, usedforsecurity=False).digest() == md5


def is_no_md5(headers: Mapping[str, str], md5: bytes) -> bool:
    """Whether the headers of a HEAD (by lower-case names) say that the ETag is something else."""
    if headers.get("x-amz-server-side-encryption", "").startswith("aws:kms"):
        return True
    if "x-amz-server-side-encryption-customer-algorithm" in headers:
        return True
    # OSS says what the MD5 is where it knows it: its ETags of copied, appended or posted objects
    # look like MD5s and are none.
    if any(name.startswith("x-oss-") for name in headers):
        return headers.get("content-md5") != base64.b64encode(md5).decode()
    return False
