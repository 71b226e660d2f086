"""Opens an `Origin` for a URL.

The libraries behind the origins take up to a second to import. This module imports them only when
they are used, so that `cachefs --help` stays fast.
"""

from cachefs.config.source_url import normal_source, refuse_secrets
from cachefs.errors import UsageError
from cachefs.origin import http
from cachefs.origin.base import Origin
from cachefs.origin.options import OriginOptions

_FSSPEC_PREFIX = "fsspec+"


def open_origin(url: str, options: OriginOptions | None = None) -> Origin:
    """Return the origin for `url`. Sends no request.

    `s3://BUCKET[/PREFIX]` and `oss://` open an object store, `hdfs://` opens a NameNode or a
    nameservice. fsspec opens any other URL; the prefix `fsspec+`, as in `fsspec+s3://...`, forces
    fsspec. Raises `UsageError` for a URL that can't be opened and for contradicting options.
    """
    options = options or OriginOptions()
    if options.max_threads < 1:
        raise UsageError(f"max threads is {options.max_threads}: give a number of 1 or more")
    try:
        refuse_secrets(url)
        url = normal_source(url)
    except ValueError as error:
        raise UsageError(f"source: {error}") from None
    scheme, _, rest = url.partition("://")
    for option, path in (
        ("--credentials-dir", options.credentials_dir),
        ("--ca-file", options.ca_file),
    ):
        if path is not None and scheme not in ("s3", "oss"):
            raise UsageError(f"{option} is for s3:// and oss://, not for {scheme}://")
    if options.requester_pays and scheme not in ("s3", "fsspec+s3"):
        raise UsageError(f"--requester-pays is for s3://, not for {scheme}://")
    if options.requester_pays and options.anonymous:
        raise UsageError("--requester-pays and --anonymous contradict each other: leave one out")
    if scheme == "s3":
        _check_libcurl(scheme)
        from cachefs.origin.s3.client import open_s3

        return open_s3(rest, options)
    if scheme == "oss":
        if options.oss_driver == "ossfs":
            if options.ca_file is not None:
                raise UsageError("--oss-driver ossfs has no --ca-file: leave one of them out")
            from cachefs.origin.fsspec.ossfs import open_ossfs

            return open_ossfs(rest, options)
        _check_libcurl(scheme)
        from cachefs.origin.s3.client import open_oss

        return open_oss(rest, options)
    if scheme == "hdfs" and options.hdfs_driver == "native":
        from cachefs.origin.hdfs.client import open_hdfs

        return open_hdfs(rest, options)
    from cachefs.origin.fsspec.client import open_fsspec

    return open_fsspec(url.removeprefix(_FSSPEC_PREFIX), options)


def _check_libcurl(scheme: str) -> None:
    reason = http.why_not()
    if reason is not None:
        raise UsageError(f"{scheme}:// can't be opened: {reason}")


__all__ = ["OriginOptions", "open_origin"]
