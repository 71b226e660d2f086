"""`--oss-driver ossfs`: OSS through fsspec and Alibaba's own SDK, for cases that OSS's S3 interface
does not support.

This module corrects four properties of ossfs: its `info` lists the whole parent directory, its
listings drop the ETags, its ranges end one byte late, and it requires its cache of listings.
"""

import threading
from typing import Any

from cachefs.errors import UsageError
from cachefs.origin.fsspec.client import FsspecOrigin
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.oss import oss_credential_provider, resolve_oss


def open_ossfs(location: str, options: OriginOptions) -> FsspecOrigin:
    """Return the origin for `BUCKET[/PREFIX]`. Sends no request. Raises `UsageError`."""
    target = resolve_oss(location, options)
    provider = oss_credential_provider(options)
    try:
        fs = _file_system(target.endpoint, provider, options)
    except ImportError:
        raise UsageError(
            "--oss-driver ossfs needs ossfs: pip install 'cachefs[ossfs]', or leave the option out"
        ) from None
    root = f"{target.bucket}/{target.prefix}"
    return FsspecOrigin(fs, root, target.url, target.identity, options)


def _file_system(endpoint: str, provider: CredentialProvider, options: OriginOptions) -> Any:
    import oss2
    from oss2.credentials import Credentials as OssKeys
    from oss2.credentials import CredentialsProvider
    from ossfs import OSSFileSystem
    from ossfs.exceptions import translate_oss_error

    class Provider(CredentialsProvider):  # type: ignore[misc, unused-ignore]
        def get_credentials(self) -> Any:
            frozen = provider.current()
            assert frozen is not None
            return OssKeys(frozen.access_key, frozen.secret_key, frozen.token)

    class Ossfs(OSSFileSystem):  # type: ignore[misc, unused-ignore]
        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            bucket, key = self.split_path(self._strip_protocol(path))
            if key:
                try:
                    found = self._call_oss("head_object", bucket=bucket, key=key)
                except FileNotFoundError:
                    pass
                else:
                    return {
                        "name": f"{bucket}/{key}",
                        "type": "file",
                        "size": found.content_length,
                        "LastModified": found.last_modified,
                        "ETag": found.etag,
                    }
                if not self._list(path):
                    raise FileNotFoundError(path)
            return {"name": path, "type": "directory", "size": 0}

        def ls(self, path: str, **kwargs: Any) -> list[dict[str, Any]]:
            found = self._list(path)
            if not found and self.split_path(self._strip_protocol(path))[1]:
                return [self.info(path)]
            return found

        def _list(self, path: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self._ls_dir(self._strip_protocol(path))
            return found

        def _get_object_info_list(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super()._get_object_info_list(*args, **kwargs)
            except oss2.exceptions.OssError as error:
                # ossfs does not translate errors of LIST, and takes a denied one for an empty one.
                raise translate_oss_error(error) from None

        def cat_file(
            self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
        ) -> bytes:
            last = None if end is None else end - 1
            data: bytes = super().cat_file(path, start, last, **kwargs)
            return data

        def _transfer_object_info_to_dict(self, bucket: str, obj: Any) -> dict[str, Any]:
            info: dict[str, Any] = super()._transfer_object_info_to_dict(bucket, obj)
            return info if obj.is_prefix() else info | {"ETag": obj.etag}

        def _call_oss(self, *args: Any, **kwargs: Any) -> Any:
            # One try: `resilience` does the retries. `timeout` limits each wait.
            return super()._call_oss(
                *args, **kwargs | {"retry": 1, "timeout": options.idle_timeout_s}
            )

    oss2.defaults.connection_pool_size = options.max_threads
    fs = Ossfs(endpoint=endpoint, skip_instance_cache=True)
    fs._auth = oss2.AnonymousAuth() if provider.anonymous else oss2.ProviderAuth(Provider())
    fs.dircache = _LastListing()
    return fs


class _LastListing(threading.local):
    """Replaces the cache of ossfs, which stores a listing and reads it back in the next line. It
    keeps only the last listing of each thread."""

    def __setitem__(self, path: str, listing: list[dict[str, Any]]) -> None:
        self._last = listing

    def __getitem__(self, path: str) -> list[dict[str, Any]]:
        return self._last

    def __contains__(self, path: str) -> bool:
        return False
