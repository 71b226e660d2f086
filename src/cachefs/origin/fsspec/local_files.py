"""What `local_writer.py` does in worker threads: all functions here block.

Like reads, they never leave the source: each path is opened part by part (`local_tree.py`), and a
name that is a symbolic link is never followed. A link to a directory is followed only if root or
the daemon's user has made it: another user could replace a directory by a link, and so make a
daemon of root change files of others.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Any

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
)
from cachefs.origin.fsspec.local_steps import (
    Refused,
    Task,
    apply,
    copy_bytes,
    locked,
    new_file,
    rename_to_absent,
    write_content,
)
from cachefs.origin.fsspec.local_tree import ConfinedFileSystem, described, is_hidden, upload_name
from cachefs.origin.writable import ABSENT, Attributes, Condition, Content, PartTag, Upload
from cachefs.types import ObjectMeta

_WRITE_ID = "user.cachefs.write"
_PARTS = ".parts"
"""The suffix of the file that names the parts of an upload, one line each."""
_PART = re.compile(r"^([0-9]{1,5}) ([0-9]{1,19}) ([0-9]{1,19})\n", re.MULTILINE)

Describe = Callable[[dict[str, Any]], ObjectMeta | None]


class LocalFiles:
    """One method for each of `LocalWriter`. Raises `OSError` and `Refused`."""

    def __init__(self, fs: ConfinedFileSystem, root: str, describe: Describe) -> None:
        self._fs = fs
        self._root = root
        self._describe = describe
        umask = os.umask(0o077)
        os.umask(umask)
        self._mode = 0o666 & ~umask

    def probe(self, path: str, task: Task) -> tuple[bool, bool]:
        """Return whether files can have write ids and whether they can be linked."""
        name, other = upload_name(secrets.token_hex(16)), upload_name(secrets.token_hex(16))
        task.check()
        with self._opened(path) as place:
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, dir_fd=place)
            try:
                os.write(fd, b"x")
                keeps_ids = _note_write_id(fd, "probe")
                links = True
                try:
                    os.link(name, other, src_dir_fd=place, dst_dir_fd=place)
                    os.unlink(other, dir_fd=place)
                except OSError:
                    links = False
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=place)
        return keeps_ids, links

    def put(
        self,
        upload: Upload,
        content: Content,
        condition: Condition | None,
        attributes: Attributes,
        task: Task,
    ) -> ObjectMeta:
        with self._parent(upload.path) as (place, name):
            done = self._done_before(place, name, upload.write_id)
            if done is not None:
                return done
            self._compare(place, name, condition)
            fd = new_file(place, upload.upload_id)
            try:
                write_content(fd, 0, content, task)
                return self._publish(place, name, fd, upload, condition, attributes, task)
            finally:
                os.close(fd)
                _unlink(place, upload_name(upload.upload_id))

    def written_by(self, path: str, write_id: str, _: Task) -> ObjectMeta | None:
        with self._parent(path) as (place, name):
            return self._done_before(place, name, write_id)

    def set_attributes(
        self, path: str, attributes: Attributes, version: str | None, task: Task
    ) -> ObjectMeta | None:
        """Return the new description of a file; None for a directory."""
        name, fd = path, self._open_itself(path)
        try:
            found = os.fstat(fd)
            if stat.S_ISLNK(found.st_mode):
                raise Refused(AccessDeniedError, "is a symbolic link: change its target")
            meta = self._meta(name, found)
            if version is not None and (meta is None or meta.version != version):
                raise Refused(ObjectChangedError, "has been changed meanwhile")
            task.check()
            apply(f"/proc/self/fd/{fd}", attributes, must_own=True)
            return self._meta(name, os.fstat(fd))
        finally:
            os.close(fd)

    def _open_itself(self, path: str) -> int:
        """Return a descriptor (O_PATH) of a file, directory or link. The caller owns it."""
        if not path:
            return self._fs.open_path(self._full(path))
        with self._parent(path) as (place, name):
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)

    def start(self, upload: Upload, task: Task) -> None:
        with self._parent(upload.path) as (place, _):
            task.check()
            os.close(new_file(place, upload.upload_id))

    def put_part(
        self, upload: Upload, number: int, offset: int, content: Content, task: Task
    ) -> PartTag:
        with self._parent(upload.path) as (place, _):
            fd = self._upload_file(place, upload)
            try:
                write_content(fd, offset, content, task)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            return _note_part(place, upload, number, offset, content.size_bytes)

    def copy_part(
        self,
        upload: Upload,
        number: int,
        offset: int,
        path: str,
        meta: ObjectMeta,
        length: int,
        task: Task,
    ) -> PartTag:
        with self._parent(upload.path) as (place, _), self._source(path, meta) as source:
            fd = self._upload_file(place, upload)
            try:
                copy_bytes(source, offset, length, fd, task)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            self._check_source(path, meta)
            return _note_part(place, upload, number, offset, length)

    def complete(
        self,
        upload: Upload,
        size_bytes: int,
        condition: Condition | None,
        attributes: Attributes,
        task: Task,
    ) -> ObjectMeta:
        with self._parent(upload.path) as (place, name):
            done = self._done_before(place, name, upload.write_id)
            if done is None:
                fd = self._upload_file(place, upload)
                try:
                    if os.fstat(fd).st_size != size_bytes:
                        raise Refused(OriginError, "can't be completed: parts are missing")
                    self._compare(place, name, condition)
                    done = self._publish(place, name, fd, upload, condition, attributes, task)
                finally:
                    os.close(fd)
            _drop_upload(place, upload)
            return done

    def parts(self, upload: Upload, task: Task) -> list[PartTag]:
        with self._parent(upload.path) as (place, _):
            os.close(self._upload_file(place, upload))
            try:
                fd = os.open(_parts_name(upload), os.O_RDONLY | os.O_CLOEXEC, dir_fd=place)
            except FileNotFoundError:
                return []
            with open(fd, encoding="ascii") as lines:
                found = _PART.findall(lines.read())
        task.check()
        tags = {int(n): PartTag(int(n), int(size), offset) for n, offset, size in found}
        return [tags[number] for number in sorted(tags)]

    def abort(self, upload: Upload, task: Task) -> None:
        task.check()
        with self._parent(upload.path) as (place, _):
            _drop_upload(place, upload)

    def remove_rest(self, path: str, write_id: str, task: Task) -> None:
        """Remove the hidden files of one write. They are not opened, and new ones get other names,
        so it does not matter who has made files of such names."""
        digits = hidden_digits(write_id)
        with self._parent(path) as (place, _):
            task.check()
            for name in os.listdir(place):
                if is_hidden(name) and name.startswith(upload_name(digits)):
                    with contextlib.suppress(OSError):  # a directory, or sticky and of another user
                        os.unlink(name, dir_fd=place)

    def copy(
        self, path: str, meta: ObjectMeta, upload: Upload, condition: Condition | None, task: Task
    ) -> ObjectMeta:
        with self._parent(upload.path) as (place, name), self._source(path, meta) as source:
            done = self._done_before(place, name, upload.write_id)
            if done is not None:
                return done
            self._compare(place, name, condition)
            fd = new_file(place, upload.upload_id)
            try:
                copy_bytes(source, 0, meta.size_bytes, fd, task)
                self._check_source(path, meta)
                found = os.fstat(source)
                kept = Attributes(found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns)
                return self._publish(place, name, fd, upload, condition, kept, task)
            finally:
                os.close(fd)
                _unlink(place, upload_name(upload.upload_id))

    def rename(self, path: str, target: str, condition: Condition | None, task: Task) -> None:
        with self._parent(path) as (old, old_name), self._parent(target) as (new, new_name):
            with locked(new, task):
                self._compare(new, new_name, condition)
                task.check()
                if condition == ABSENT:
                    rename_to_absent(old, old_name, new, new_name)
                else:
                    os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)
            os.fsync(new)
            os.fsync(old)

    def delete(self, path: str, condition: Condition | None, task: Task) -> None:
        with self._parent(path) as (place, name):
            with locked(place, task):
                found = _lstat(place, name)
                if found is None:
                    return
                if stat.S_ISDIR(found.st_mode):
                    raise Refused(ConflictError, "is a directory")
                self._compare(place, name, condition)
                task.check()
                os.unlink(name, dir_fd=place)
            os.fsync(place)

    def make_directory(
        self, path: str, attributes: Attributes, write_id: str | None, task: Task
    ) -> None:
        """With a `write_id`, an existing directory is refused unless this write has made it."""
        with self._parent(path) as (place, name):
            task.check()
            try:
                os.mkdir(name, dir_fd=place)
            except FileExistsError:
                if write_id is not None:
                    if not _is_made_by(place, name, write_id):
                        raise Refused(ConflictError, "exists already") from None
                    return
                found = os.stat(name, dir_fd=place)  # a link to a directory is one, too
                if not stat.S_ISDIR(found.st_mode):
                    raise Refused(NotADirError, "is a file") from None
                return
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            try:
                if write_id is not None:
                    _note_write_id(fd, write_id)
                apply(fd, attributes, must_own=False)
            finally:
                os.close(fd)
            os.fsync(place)

    def remove_directory(self, path: str, task: Task) -> None:
        with self._parent(path) as (place, name):
            task.check()
            os.rmdir(name, dir_fd=place)
            os.fsync(place)

    def _publish(
        self,
        place: int,
        name: str,
        fd: int,
        upload: Upload,
        condition: Condition | None,
        attributes: Attributes,
        task: Task,
    ) -> ObjectMeta:
        """Give the file `fd` of an upload its name. Return its description."""
        _note_write_id(fd, upload.write_id)
        if attributes.mode is None:
            os.fchmod(fd, self._mode)
        apply(fd, attributes, must_own=False)
        os.fsync(fd)
        hidden = upload_name(upload.upload_id)
        with locked(place, task):
            self._compare(place, name, condition)
            task.check()
            if condition is None or condition.version is not None:
                os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)
            else:
                _link(place, hidden, name)
            meta = self._meta(name, os.fstat(fd))
        os.fsync(place)
        assert meta is not None
        return meta

    def _done_before(self, place: int, name: str, write_id: str) -> ObjectMeta | None:
        """Return the file at `name` if the write `write_id` has made it."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=place)
        except OSError:
            return None
        try:
            with contextlib.suppress(OSError):
                if os.getxattr(fd, _WRITE_ID) == write_id.encode():
                    return self._meta(name, os.fstat(fd))
            return None
        finally:
            os.close(fd)

    def _compare(self, place: int, name: str, condition: Condition | None) -> None:
        """Raise `Refused` if the condition is false, or if only a file may be replaced."""
        found = _lstat(place, name)
        if found is not None and stat.S_ISLNK(found.st_mode):
            raise Refused(AccessDeniedError, "is a symbolic link: write to its target")
        if condition is None:
            return
        meta = self._meta(name, found) if found is not None else None
        if condition.version is None and found is not None:
            raise Refused(ConflictError, "exists already")
        if condition.version is not None and (meta is None or meta.version != condition.version):
            raise Refused(ConflictError, "has been changed or deleted meanwhile")

    def _meta(self, name: str, found: os.stat_result) -> ObjectMeta | None:
        return self._describe(described(name, found))

    def _upload_file(self, place: int, upload: Upload) -> int:
        if not re.fullmatch("[0-9a-f]{32}", upload.upload_id):
            raise Refused(NotFoundError, "has no such upload")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(upload_name(upload.upload_id), flags, dir_fd=place)
        except FileNotFoundError:
            raise Refused(NotFoundError, "has no such upload") from None

    @contextlib.contextmanager
    def _source(self, path: str, meta: ObjectMeta) -> Iterator[int]:
        """Open the version `meta` of a file for reading."""
        self._check_source(path, meta)
        fd = self._fs.open_path(self._full(path))
        try:
            source = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        try:
            yield source
        finally:
            os.close(source)

    def _check_source(self, path: str, meta: ObjectMeta) -> None:
        found = self._describe(self._fs.info(self._full(path)))
        if found is None or found.version != meta.version:
            raise Refused(ObjectChangedError, f"can't be made of {path}: that has changed")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Open a directory."""
        fd = self._fs.open_path(self._full(path), only_trusted=True)
        try:
            place = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        try:
            yield place
        finally:
            os.close(place)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory of `path`. Yield it with the name in it."""
        above, _, name = path.rpartition("/")
        if not name:
            raise Refused(ConflictError, "is the root of the source")
        with self._opened(above) as place:
            yield place, name


def hidden_digits(write_id: str) -> str:
    """Return the 16 hexadecimal digits with which the ids of the uploads of one write begin. The
    other 16 are random, so nobody can make a file of such a name before."""
    return hashlib.sha256(write_id.encode()).hexdigest()[:16]


def _lstat(place: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _link(place: int, hidden: str, name: str) -> None:
    """Give a file its name if there is none such. Raises `Refused`."""
    try:
        os.link(hidden, name, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
    except FileExistsError:
        raise Refused(ConflictError, "exists already") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        # This file system has no links. The caller has compared and holds the lock.
        os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)
    else:
        os.unlink(hidden, dir_fd=place)


def _is_made_by(place: int, name: str, write_id: str) -> bool:
    """Return whether the write `write_id` has made the directory `name`."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=place)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):
            return os.getxattr(fd, _WRITE_ID) == write_id.encode()
        return False
    finally:
        os.close(fd)


def _note_write_id(fd: int, write_id: str) -> bool:
    """Keep the id with the file; return whether that was possible."""
    try:
        os.setxattr(fd, _WRITE_ID, write_id.encode())
    except OSError:
        return False
    return True


def _parts_name(upload: Upload) -> str:
    return upload_name(upload.upload_id) + _PARTS


def _note_part(place: int, upload: Upload, number: int, offset: int, size_bytes: int) -> PartTag:
    """Record a part whose bytes have been synced."""
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_parts_name(upload), flags, 0o600, dir_fd=place)
    try:
        os.write(fd, b"%d %d %d\n" % (number, offset, size_bytes))
    finally:
        os.close(fd)
    return PartTag(number, size_bytes, str(offset))


def _drop_upload(place: int, upload: Upload) -> None:
    _unlink(place, upload_name(upload.upload_id))
    _unlink(place, _parts_name(upload))


def _unlink(place: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=place)
