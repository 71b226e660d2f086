"""In what stores that speak S3 differ: a dial for each thing, and the dials of stores we know.

The defaults are those of Amazon S3. Each dial of a profile has a source beside it: a document of
the store, or a report of somebody who met it. What is not known of a store stays as at S3. A new
report becomes one more dial.
"""

from dataclasses import dataclass, field
from typing import Literal

Condition = Literal["checks", "ignores", "refuses"]
"""What a store does with a condition of a write: `refuses` is 501 NotImplemented."""
Error = tuple[int, str]
"""A status and a code."""


@dataclass(frozen=True)
class Dials:
    """How a store behaves."""

    name: str = "aws"

    # -- who may ask, and where ------------------------------------------------------------------
    checks_signatures: bool = True
    oss_signatures: bool = False
    """Takes OSS's own signatures, too."""
    region: str = "us-east-1"
    other_regions: tuple[str, ...] | None = ()
    """Regions that a signature may name, too. None: any."""
    names_region: Literal["both", "header", "body", "no"] = "both"
    """Where an answer to a signature for another region names the right one."""
    path_style: bool = True
    """False: the bucket must be in the host name."""
    path: str = ""
    """Of the endpoint."""
    redirects_to: str = ""
    """Another endpoint, which the answer to any request names."""
    redirect_status: Literal[301, 307] = 307
    redirect_location: bool = True
    """False: only the body names the endpoint, as S3 does for a bucket in another region."""
    proxy_wants_password: bool = False
    requester_pays: bool = False
    expired: frozenset[str] = frozenset()
    """Access keys whose session is over: ExpiredToken."""
    user_folder: str = ""
    """A policy for users' folders, such as `home/me/`: above it LIST is allowed only with the
    delimiter, and objects are not."""
    forbids: frozenset[str] = frozenset()
    """Operations that the policy does not allow: AccessDenied."""
    lacks: dict[str, Error] = field(default_factory=dict)
    """Operations that the store does not have, and what it says to them."""

    # -- LIST ------------------------------------------------------------------------------------
    has_list_v2: bool = True
    """False: `list-type` is ignored, and the answer is that of the first version."""
    list_root: str = "ListBucketResult"
    namespace: str = "http://s3.amazonaws.com/doc/2006-03-01/"
    list_encodes: bool = True
    """Whether `encoding-type=url` is honoured. If not, control characters are references."""
    list_space: Literal["+", "%20"] = "+"
    """How a space is encoded."""
    list_e_tag: Literal["same", "none", "empty", "other", "of nothing", "unquoted"] = "same"
    list_time: Literal["ms", "s", "ns", "no zone"] = "ms"
    list_types: bool = False
    """Each row has a `Type`."""
    list_order: Literal["bytes", "parts"] = "bytes"
    """`parts`: as a file system, so `a/b` comes before `a-`."""
    list_rows: int = 1000
    """The most rows of a page."""
    list_delay_s: float = 0.0
    list_delay_prefix: str = ""

    # -- keys ------------------------------------------------------------------------------------
    double_slash: Literal["keeps", "merges", "refuses"] = "keeps"
    below_a_file: Literal["shown", "hidden", "refused"] = "shown"
    """`a/b` beside `a`; `hidden`: in LIST, while GET and HEAD find it."""
    backslash: bool = True
    """False: it is a slash."""
    dot_parts: bool = True
    """False: a key with a part `.` or `..` is refused."""

    # -- GET and HEAD ----------------------------------------------------------------------------
    ranges: bool = True
    chunked: bool = False
    """Bodies come without Content-Length."""
    gzip: Literal["", "unpacks", "packs"] = ""
    """`unpacks`: objects with Content-Encoding: gzip, for who does not accept gzip. `packs`: texts,
    for who accepts it."""
    get_if_match: bool = True
    get_delay_s: float = 0.0
    no_such_key: str = "NoSuchKey"

    # -- ETags -----------------------------------------------------------------------------------
    e_tags: Literal["md5", "kms"] = "md5"
    """Of objects that were put in one piece. `kms`: no digests, and a header says so."""
    e_tags_of_uploads: Literal["md5-n", "md5", "opaque"] = "md5-n"

    # -- writes ----------------------------------------------------------------------------------
    put_absent: Condition = "checks"
    put_version: Condition = "checks"
    complete_absent: Condition = "checks"
    complete_version: Condition = "checks"
    copy_absent: Condition = "checks"
    copy_version: Condition = "checks"
    delete_version: Condition = "checks"
    quotes_copies: bool = True
    """Whether the answer to a copy has its ETag in quotes."""
    forbid_overwrite: bool = False
    """Knows OSS's header of this name."""
    version_of_nothing: Error = (404, "NoSuchKey")
    """The answer to If-Match for an object that does not exist."""
    keeps_metadata: bool = True
    keeps_metadata_of_markers: bool = True
    needs_checksum: bool = False
    """A PUT without Content-MD5 or a checksum is refused, as with Object Lock."""
    needs_sse: bool = False
    """A PUT without x-amz-server-side-encryption is denied by the policy."""
    delete_many_needs_md5: bool = True
    """Or a checksum header."""
    delete_many_quiet_body: bool = True
    """False: the answer to a quiet deletion of all that was named has no body."""
    delete_of_nothing: Error | None = None
    """The answer to a deletion of an object that does not exist; None: success."""
    equal_parts: bool = False
    """All parts but the last must have one size, and the last may not be larger."""
    least_part_bytes: int = 5 << 20
    """Of all parts but the last."""
    completes_again: Literal["always", "while it is there", "never"] = "always"
    """When a second CompleteMultipartUpload has the answer of the first."""
    lists_uploads_of: Literal["prefix", "key"] = "prefix"
    """`key`: ListMultipartUploads wants the whole key as prefix."""
    quota_bytes: int | None = None
    quota_error: Error = (403, "QuotaExceeded")
    tells_md5: bool = False
    """GET and HEAD of objects that were put in one piece have Content-MD5."""
    request_id: str = "x-amz-request-id"
    clock_offset_s: float = 0.0
    """Of the store's clock."""


AWS = Dials()
"""docs.aws.amazon.com/AmazonS3/latest/API: If-Match and If-None-Match of PutObject, CopyObject,
CompleteMultipartUpload and DeleteObject. A second Complete has the answer of the first:
github.com/minio/minio/issues/13318, adobe/S3Mock#2586. If-Match for an absent key is 404:
docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html."""

GCS = Dials(
    name="gcs",
    region="auto",
    # cloud.google.com/storage/docs/authentication/signatures: any location is accepted
    other_regions=None,
    # ClickHouse/ClickHouse#49390, cloud.google.com/storage/docs/migrating
    lacks={
        "DeleteObjects": (400, "MalformedPOSTRequest"),
        # cloud.google.com/storage/docs/multipart-uploads: it has no copies of parts
        "UploadPartCopy": (501, "NotImplemented"),
    },
    gzip="unpacks",  # cloud.google.com/storage/docs/transcoding
    # cloud.google.com/storage/docs/request-preconditions, earth-mover/icechunk#533: If-Match is
    # for reads; writes have x-goog-if-generation-match
    put_absent="ignores",
    put_version="ignores",
    complete_absent="ignores",
    complete_version="ignores",
    copy_absent="ignores",
    copy_version="ignores",
    delete_version="ignores",
    # cloud.google.com/storage/docs/hashes-etags: the ETag of an upload in parts is no MD5
    e_tags_of_uploads="opaque",
    completes_again="never",
    # cloud.google.com/storage/docs/xml-api/delete-object: 404 if there is none
    delete_of_nothing=(404, "NoSuchKey"),
)

R2 = Dials(
    name="r2",
    region="auto",
    # developers.cloudflare.com/r2/api/s3/api: an empty region and us-east-1 stand for auto
    other_regions=("us-east-1", ""),
    # the same page: CopyObject has conditions of the source, and cf-copy-destination-if-*
    copy_absent="ignores",
    copy_version="ignores",
    delete_version="ignores",
    # developers.cloudflare.com/r2/objects/multipart-objects, yandex-cloud/geesefs#52,
    # apache/opendal#2904: equal parts, the last not larger
    equal_parts=True,
    gzip="packs",  # developers.cloudflare.com: compressible types, for who accepts it
)

CEPH = Dials(
    name="ceph",
    region="default",
    other_regions=None,  # src/rgw/rgw_auth_s3.cc: takes the region of the scope as it is
    # src/rgw/rgw_op.cc, RGWPutObj: If-Match and If-None-Match; a Complete and a copy onto a name
    # look at neither before version 20 (ceph/s3-tests#583)
    complete_absent="ignores",
    complete_version="ignores",
    copy_absent="ignores",
    copy_version="ignores",
    delete_version="ignores",
    # src/rgw/driver/rados/rgw_rados.cc: -ERR_PRECONDITION_FAILED for an absent object, too
    version_of_nothing=(412, "PreconditionFailed"),
    # src/rgw/rgw_op.cc, RGWCompleteMultipart: compares with the object that is there
    completes_again="while it is there",
    quota_error=(403, "QuotaExceeded"),  # docs.ceph.com/en/latest/radosgw/s3/php and rgw_common.cc
)

MINIO = Dials(
    name="minio",
    other_regions=(),
    names_region="body",  # cmd/api-errors.go: AuthorizationHeaderMalformed with <Region>
    # cmd/object-handlers.go: PutObject and CompleteMultipartUpload check both; a copy checks its
    # source only, a DELETE nothing
    copy_absent="ignores",
    copy_version="ignores",
    delete_version="ignores",
    completes_again="never",  # minio/minio#13318
    # docs.min.io/community/minio-object-store/reference/s3-api-compatibility
    lists_uploads_of="key",
    below_a_file="hidden",  # minio/minio#12851, #20167, minio/docs#1040
    # cmd/api-errors.go: XMinioInvalidObjectName, XMinioInvalidResourceName
    double_slash="refuses",
    dot_parts=False,
    quota_error=(507, "XMinioStorageFull"),  # cmd/api-errors.go
)

AISTORE = Dials(
    name="aistore",
    path="/s3",  # docs.nvidia.com/aistore/s3compat
    checks_signatures=False,  # the same page: keys are not looked at unless AuthN is on
    # NVIDIA/aistore#201: root element, namespace, an empty ETag in LIST, times of whole seconds
    list_root="ListObjectResult",
    namespace="http://s3.amazonaws.com/doc/2006-03-01",
    list_e_tag="empty",
    list_time="s",
    list_encodes=False,
    no_such_key="ErrNotFound",  # NVIDIA/aistore#274, also the answer to a DELETE of nothing
    delete_of_nothing=(404, "ErrNotFound"),
    # ais/tgts3.go, ais/prxs3.go: no condition of a write is read
    put_absent="ignores",
    put_version="ignores",
    complete_absent="ignores",
    complete_version="ignores",
    copy_absent="ignores",
    copy_version="ignores",
    delete_version="ignores",
    get_if_match=False,
    completes_again="never",
)

OSS = Dials(
    name="oss",
    # alibabacloud.com/help/en/oss/developer-reference/compatibility-with-amazon-s3: only
    # virtual-hosted style
    path_style=False,
    oss_signatures=True,
    other_regions=None,
    # alibabacloud.com/help/en/oss/developer-reference/putobject; tobi/walgit#67: 501 for others
    forbid_overwrite=True,
    put_absent="refuses",
    put_version="refuses",
    complete_absent="refuses",
    complete_version="refuses",
    copy_absent="ignores",
    copy_version="ignores",
    delete_version="ignores",
    # alibabacloud.com/help/en/oss/developer-reference/listobjectsv2
    namespace="",
    list_types=True,
    list_time="ms",
    list_space="%20",
    # alibabacloud.com/help/en/oss/developer-reference/deletemultipleobjects: nothing if quiet
    delete_many_quiet_body=False,
    least_part_bytes=100 << 10,  # alibabacloud.com/help/en/oss/developer-reference/uploadpart
    completes_again="never",
    # alibabacloud.com/help/en/oss/developer-reference/headobject and common headers
    tells_md5=True,
    request_id="x-oss-request-id",
)

SEAWEEDFS = Dials(
    name="seaweedfs",
    other_regions=None,  # weed/s3api/auth_signature_v4.go: takes the region of the scope
    list_order="parts",  # as the filer has them: weed/s3api/s3api_object_handlers_list.go
    # a path of the filer: weed/s3api/s3_constants/header.go (NormalizeObjectKey)
    double_slash="merges",
    backslash=False,
    keeps_metadata_of_markers=False,
    # seen: version 4.48, test_store.py and test_writable.py
    completes_again="while it is there",
    quotes_copies=False,
    version_of_nothing=(412, "PreconditionFailed"),
)

PROFILES = {each.name: each for each in (AWS, GCS, R2, CEPH, MINIO, AISTORE, OSS, SEAWEEDFS)}
