"""What `local_writer.py` does in worker threads: all functions here block.

The kernel decides what the caller may do: the thread has the caller's identity
(`local_identity.py`). A new version of an existing file is the exception. A caller that may
open the file for writing may replace it, also in a directory that it may not change: the new
version gets owner, mode and access list of the file that it replaces, as only the daemon can do.

Like reads, changes never leave the source: each path is opened part by part (`local_tree.py`), and
a name that is a symbolic link is never followed. A link to a directory is followed only if root,
the daemon's user or the caller has made it.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
)
from cachefs.origin.fsspec.local_acl import default_list, make_as_new
from cachefs.origin.fsspec.local_identity import acting_as_daemon, acts_for
from cachefs.origin.fsspec.local_steps import (
    Refused,
    Task,
    apply,
    copy_bytes,
    give_owner,
    grow,
    have_one_owner,
    locked,
    new_file,
    rename_to_absent,
    take_over,
    write_content,
)
from cachefs.origin.fsspec.local_tree import ConfinedFileSystem, is_hidden, upload_name
from cachefs.origin.local_ids import numbered_posix
from cachefs.origin.writable import ABSENT, Attributes, Condition, Content, PartTag, Upload
from cachefs.types import MOST_MODE, Directory, ObjectMeta

_WRITE_ID = "user.cachefs.write"
_UPLOAD_ID = re.compile("[0-9a-f]{32}")

T = TypeVar("T")
Describe = Callable[[dict[str, Any]], ObjectMeta | None]


class _OpenUpload(NamedTuple):
    """An upload in parts of this process: descriptors of its hidden file, of its directory, and of
    the file that it replaces (None: of none)."""

    file: int
    place: int
    old: int | None
    parts: dict[int, PartTag]


class LocalFiles:
    """One method for each of `LocalWriter`. Raises `OSError`, `Refused` and `MovedError`."""

    def __init__(self, fs: ConfinedFileSystem, root: str, describe: Describe) -> None:
        self._fs = fs
        self._root = root
        self._describe = describe
        self._uploads: dict[str, _OpenUpload] = {}
        """By upload id. Nobody else's file can take the place of a descriptor."""
        self._changing_uploads = threading.Lock()
        umask = os.umask(0o077)
        os.umask(umask)
        self._file_mode, self._directory_mode = 0o666 & ~umask, 0o777 & ~umask

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
            replaces = not attributes.is_renamed
            with self._new_version(place, name, upload.upload_id, replaces) as (fd, old):
                write_content(fd, 0, content, task)
                grow(fd, content.size_bytes)
                return self._publish(place, name, fd, old, upload, condition, attributes, task)

    def written_by(self, path: str, write_id: str, _: Task) -> ObjectMeta | None:
        with self._parent(path) as (place, name):
            return self._done_before(place, name, write_id)

    def set_attributes(
        self, path: str, attributes: Attributes, version: str | None, task: Task
    ) -> ObjectMeta | None:
        """Return the new description of a file; None for a directory."""
        fd = self._open_itself(path)
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                raise Refused(AccessDeniedError, "is a symbolic link: change its target")
            meta = self._meta(fd)
            if version is not None and (meta is None or meta.version != version):
                raise Refused(ObjectChangedError, "has been changed meanwhile")
            task.check()
            apply(f"/proc/self/fd/{fd}", attributes, must_own=True)
            return self._meta(fd)
        finally:
            os.close(fd)

    def _open_itself(self, path: str) -> int:
        """Return a descriptor (O_PATH) of a file, directory or link. The caller owns it."""
        if not path:
            return self._fs.open_path(self._full(path))
        with self._parent(path) as (place, name):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        self._fs.check_place(fd, path)
        return fd

    # -- uploads -----------------------------------------------------------------------------------

    def start(self, upload: Upload, attributes: Attributes, task: Task) -> None:
        with self._parent(upload.path) as (place, name), contextlib.ExitStack() as stack:
            task.check()
            old = None if attributes.is_renamed else self._opened_old(place, name)
            if old is not None:
                stack.callback(os.close, old)
            fd = self._new_file(place, upload.upload_id, old)
            stack.callback(os.close, fd)
            self._uploads[upload.upload_id] = _OpenUpload(fd, os.dup(place), old, {})
            stack.pop_all()

    def put_part(
        self, upload: Upload, number: int, offset: int, content: Content, task: Task
    ) -> PartTag:
        with self._upload_file(upload) as (fd, parts):
            is_new = number not in parts
            parts[number] = tag = PartTag(number, content.size_bytes, str(offset))
            try:
                write_content(fd, offset, content, task, is_new=is_new)
                os.fdatasync(fd)
            except BaseException:
                parts[number] = tag._replace(size_bytes=-1)
                raise
            return tag

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
        with self._upload_file(upload) as (fd, parts), self._source(path, meta) as source:
            is_new = number not in parts
            tag = PartTag(number, length, str(offset))
            parts[number] = tag._replace(size_bytes=-1)  # whatever fails, it has some bytes
            copy_bytes(source, offset, length, fd, task, is_new=is_new)
            os.fdatasync(fd)
            self._check_source(path, meta)
            parts[number] = tag
            return tag

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
                with self._upload_file(upload) as (fd, parts):
                    has_all = sum(part.size_bytes for part in parts.values()) == size_bytes
                    if not has_all or os.fstat(fd).st_size > size_bytes:
                        raise Refused(OriginError, "can't be completed: parts are missing")
                    grow(fd, size_bytes)
                    known = self._uploads[upload.upload_id]
                    if not os.path.samestat(os.fstat(place), os.fstat(known.place)):
                        raise Refused(NotFoundError, "has no such upload: its directory was moved")
                    self._compare(place, name, condition)
                    done = self._publish(
                        place, name, fd, known.old, upload, condition, attributes, task
                    )
            self._drop_upload(upload)
            return done

    def parts(self, upload: Upload, task: Task) -> list[PartTag]:
        with self._upload_file(upload) as (_, parts):
            task.check()
            return [parts[number] for number in sorted(parts) if parts[number].size_bytes >= 0]

    def abort(self, upload: Upload, task: Task) -> None:
        task.check()
        self._drop_upload(upload)

    @contextlib.contextmanager
    def _upload_file(self, upload: Upload) -> Iterator[tuple[int, dict[int, PartTag]]]:
        """Yield a descriptor of an upload's file, and its parts. The descriptor is a duplicate: the
        upload may be dropped meanwhile."""
        with self._changing_uploads:
            known = self._uploads.get(upload.upload_id)
            if known is None or not _UPLOAD_ID.fullmatch(upload.upload_id):
                raise Refused(NotFoundError, "has no such upload")
            fd = os.dup(known.file)
        try:
            yield fd, known.parts
        finally:
            os.close(fd)

    def _drop_upload(self, upload: Upload) -> None:
        with self._changing_uploads:
            known = self._uploads.pop(upload.upload_id, None)
        if known is None:
            return
        with acting_as_daemon():
            _unlink_own(known.place, upload_name(upload.upload_id), known.file)
        for fd in (known.file, known.place, known.old):
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """Close the descriptors of all uploads. Their hidden files stay."""
        with self._changing_uploads:
            left, self._uploads = list(self._uploads.values()), {}
        for file, place, old, _ in left:
            for fd in (file, place, old):
                if fd is not None:
                    os.close(fd)

    def remove_rest(self, path: str, write_id: str, task: Task) -> None:
        """Remove the hidden files of one write. They are not opened, and new ones get other names,
        so it does not matter who has made files of such names."""
        digits = hidden_digits(write_id)
        with self._parent(path) as (place, _), acting_as_daemon():
            task.check()
            fd = _opened_directory(place, ".")
            try:
                for name in os.listdir(fd):
                    if is_hidden(name) and name.startswith(upload_name(digits)):
                        with contextlib.suppress(OSError):  # a directory
                            os.unlink(name, dir_fd=fd)
            finally:
                os.close(fd)

    # -- names -------------------------------------------------------------------------------------

    def copy(
        self, path: str, meta: ObjectMeta, upload: Upload, condition: Condition | None, task: Task
    ) -> ObjectMeta:
        with self._parent(upload.path) as (place, name), self._source(path, meta) as source:
            done = self._done_before(place, name, upload.write_id)
            if done is not None:
                return done
            self._compare(place, name, condition)
            with self._new_version(place, name, upload.upload_id) as (fd, old):
                copy_bytes(source, 0, meta.size_bytes, fd, task)
                grow(fd, meta.size_bytes)
                self._check_source(path, meta)
                found = os.fstat(source)
                kept = Attributes(found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns)
                return self._publish(place, name, fd, old, upload, condition, kept, task)

    def rename(self, path: str, target: str, condition: Condition | None, task: Task) -> None:
        with self._parent(path) as (old, old_name), self._parent(target) as (new, new_name):
            with locked(new, task):
                self._compare(new, new_name, condition)
                task.check()
                if condition == ABSENT:
                    rename_to_absent(old, old_name, new, new_name)
                else:
                    os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)
            _sync(new)
            _sync(old)

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
            _sync(place)

    def make_directory(
        self, path: str, attributes: Attributes, write_id: str | None, task: Task
    ) -> Directory:
        """With a `write_id`, an existing directory is refused unless this write has made it."""
        with self._parent(path) as (place, name):
            task.check()
            mode = self._directory_mode if attributes.mode is None else attributes.mode & MOST_MODE
            try:
                os.mkdir(name, mode, dir_fd=place)
            except FileExistsError:
                return self._existing_directory(place, name, path, write_id)
            fd = _opened_directory(place, name)
            try:
                found = os.fstat(fd)
                caller = acts_for()
                if caller is not None and found.st_uid != caller.uid:
                    raise Refused(ObjectChangedError, "has been replaced at once by another user")
                if write_id is not None:
                    _note_write_id(fd, write_id)
                if caller is None:  # the umask of the daemon was applied
                    if default_list(place):
                        attributes = replace(attributes, mode=None)
                    apply(fd, attributes, must_own=False)
                made = self._directory(fd)
            finally:
                os.close(fd)
            _sync(place)
            return made

    def _existing_directory(
        self, place: int, name: str, path: str, write_id: str | None
    ) -> Directory:
        if write_id is None:
            found = os.stat(name, dir_fd=place)  # a link to a directory is one, too
            if not stat.S_ISDIR(found.st_mode):
                raise Refused(NotADirError, "is a file")
            fd = self._fs.open_path(self._full(path))
        else:
            try:
                fd = _opened_directory(place, name)
            except OSError:
                raise Refused(ConflictError, "exists already") from None
        try:
            if write_id is not None and _write_id_of(fd) != write_id:
                raise Refused(ConflictError, "exists already")
            return self._directory(fd)
        finally:
            os.close(fd)

    def _directory(self, fd: int) -> Directory:
        info = self._fs.described("", fd)
        return Directory(numbered_posix(info["uid"], info["gid"], info["mode"]), info["place"])

    def remove_directory(self, path: str, task: Task) -> None:
        with self._parent(path) as (place, name):
            task.check()
            os.rmdir(name, dir_fd=place)
            _sync(place)

    # -- new versions ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _new_version(
        self, place: int, name: str, upload_id: str, replaces: bool = True
    ) -> Iterator[tuple[int, int | None]]:
        """Yield a new hidden file, and the file of which it is a new version (None: of none, or
        `replaces` is false). What is not published is removed."""
        old = self._opened_old(place, name) if replaces else None
        try:
            fd = self._new_file(place, upload_id, old)
            try:
                yield fd, old
            except BaseException:
                with acting_as_daemon():
                    _unlink_own(place, upload_name(upload_id), fd)
                raise
            finally:
                os.close(fd)
        finally:
            if old is not None:
                os.close(old)

    def _opened_old(self, place: int, name: str) -> int | None:
        """Open an existing file for writing, with the caller's rights: a caller that may do that
        may replace it."""
        found = _lstat(place, name)
        if found is None:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise Refused(ConflictError, "exists already, and is no file")
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=place)
        if not os.path.samestat(os.fstat(fd), found):
            os.close(fd)
            raise Refused(ConflictError, "has been changed meanwhile")
        return fd

    def _new_file(self, place: int, upload_id: str, old: int | None) -> int:
        """Create the hidden file of an upload. If it replaces the file `old`, it has its owner from
        the start, whose disk quota counts."""
        if old is None:
            return new_file(place, upload_id)
        fd = _also_as_daemon(lambda: new_file(place, upload_id))
        try:
            if not have_one_owner(old, fd):
                with acting_as_daemon():
                    give_owner(old, fd)
        except BaseException:
            with acting_as_daemon():
                _unlink_own(place, upload_name(upload_id), fd)
            os.close(fd)
            raise
        return fd

    def _publish(
        self,
        place: int,
        name: str,
        fd: int,
        old: int | None,
        upload: Upload,
        condition: Condition | None,
        attributes: Attributes,
        task: Task,
    ) -> ObjectMeta:
        """Give the file `fd` of an upload its attributes and its name. `old` is the file that it
        replaces. Without a condition, this replaces what has the name at the end, if the caller may
        write that, too. Return its description."""
        with contextlib.ExitStack() as stack:
            while True:
                self._dress(place, fd, old, upload, attributes)
                os.fsync(fd)
                with locked(place, task):
                    self._compare(place, name, condition)
                    task.check()
                    hidden = upload_name(upload.upload_id)
                    if attributes.is_renamed:
                        os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)
                        break
                    if _is_at(place, name, old):
                        self._give_name(place, name, hidden, fd, replaces=old is not None)
                        break
                if condition is not None:
                    raise Refused(ConflictError, "has been changed or deleted meanwhile")
                old = self._opened_old(place, name)
                if old is not None:
                    stack.callback(os.close, old)
        meta = self._meta(fd)
        _sync(place)
        assert meta is not None
        return meta

    def _dress(
        self, place: int, fd: int, old: int | None, upload: Upload, attributes: Attributes
    ) -> None:
        """Give a new version its attributes: those of the file that it replaces, or those of a new
        file. An owner, and what another owner's file has, is given as the daemon: the file is
        nobody else's yet, and the kernel has allowed the caller to give it."""
        if attributes.is_renamed:
            old = None
        if old is not None:  # it may be another user's by now, so only the kernel changes more
            attributes = Attributes(mtime_ns=attributes.mtime_ns)
        is_callers = attributes.uid is None and attributes.gid is None
        if old is not None:
            found, caller = os.fstat(old), acts_for()
            is_callers = is_callers and caller is not None and caller.uid == found.st_uid
            is_callers = is_callers and have_one_owner(old, fd)
            is_callers = is_callers and bool(found.st_mode & 0o400)  # or it can't read attributes
        with contextlib.nullcontext() if is_callers else acting_as_daemon():
            if old is not None:
                take_over(old, fd)
            else:
                mode = self._file_mode if attributes.mode is None else attributes.mode
                attributes = replace(attributes, mode=mode)
                if inherited := default_list(place):
                    make_as_new(fd, inherited, mode)
                    attributes = replace(attributes, mode=None)
            _note_write_id(fd, upload.write_id)
            apply(fd, attributes, must_own=False)

    def _give_name(self, place: int, name: str, hidden: str, fd: int, *, replaces: bool) -> None:
        if not replaces:
            _link(place, hidden, name)
            return
        try:
            os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)
        except PermissionError:
            # The caller may write the file, but not change the directory or, in a sticky one, the
            # name: so nor can it change from now on what the names refer to. It may have done so
            # while the hidden file was its own.
            if not _is_at(place, hidden, fd):
                raise
            with acting_as_daemon():
                os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)

    def _done_before(self, place: int, name: str, write_id: str) -> ObjectMeta | None:
        """Return the file at `name` if the write `write_id` has made it."""
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        except OSError:
            return None
        try:
            return self._meta(fd) if _write_id_of(fd) == write_id else None
        finally:
            os.close(fd)

    def _compare(self, place: int, name: str, condition: Condition | None) -> None:
        """Raise `Refused` if the condition is false, or if only a file may be replaced."""
        found = _lstat(place, name)
        if found is not None and stat.S_ISLNK(found.st_mode):
            raise Refused(AccessDeniedError, "is a symbolic link: write to its target")
        if condition is None:
            return
        meta = None
        if found is not None:
            meta = self._describe(self._fs.described_as(name, found, found.st_mode))
        if condition.version is None and found is not None:
            raise Refused(ConflictError, "exists already")
        if condition.version is not None and (meta is None or meta.version != condition.version):
            raise Refused(ConflictError, "has been changed or deleted meanwhile")

    def _meta(self, fd: int) -> ObjectMeta | None:
        return self._describe(self._fs.described("", fd))

    @contextlib.contextmanager
    def _source(self, path: str, meta: ObjectMeta) -> Iterator[int]:
        """Open the version `meta` of a file for reading. The caller may have no right to read it,
        as the daemon reads it for all."""
        with acting_as_daemon():
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
        with acting_as_daemon():
            found = self._describe(self._fs.info(self._full(path)))
        if found is None or found.version != meta.version:
            raise Refused(ObjectChangedError, f"can't be made of {path}: that has changed")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Open a directory (O_PATH: the caller may have no right to list it)."""
        fd = self._fs.open_path(self._full(path), only_trusted=True)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            yield fd
        finally:
            os.close(fd)

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


def _is_at(place: int, name: str, old: int | None) -> bool:
    """Return whether a name refers to the open file `old`; None: to nothing."""
    found = _lstat(place, name)
    if old is None or found is None:
        return old is None and found is None
    return os.path.samestat(found, os.fstat(old))


def _sync(place: int) -> None:
    """Sync the names of a directory (O_PATH), which the caller may have no right to list."""
    fd = _opened_directory(place, ".")
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
        rename_to_absent(place, hidden, place, name)
    else:
        os.unlink(hidden, dir_fd=place)


def _opened_directory(place: int, name: str) -> int:
    """Open a directory that is no link, also one that the caller may not list."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return _also_as_daemon(lambda: os.open(name, flags, dir_fd=place))


def _also_as_daemon(work: Callable[[], T]) -> T:
    """Do something that is harmless as the daemon if the caller may not do it."""
    try:
        return work()
    except PermissionError:
        with acting_as_daemon():
            return work()


def _note_write_id(fd: int, write_id: str) -> bool:
    """Keep the id with the file; return whether that was possible."""
    try:
        _also_as_daemon(lambda: os.setxattr(fd, _WRITE_ID, write_id.encode()))
    except OSError:
        return False
    return True


def _write_id_of(fd: int) -> str | None:
    """Return the id of the write that has made an open file or directory; None if it has none."""
    try:
        found = _also_as_daemon(lambda: os.getxattr(f"/proc/self/fd/{fd}", _WRITE_ID))
    except OSError:
        return None
    return found.decode("ascii", "replace")


def _unlink_own(place: int, name: str, fd: int) -> None:
    """Remove a name if it refers to the open file `fd`, and not to a file of others."""
    found = _lstat(place, name)
    if found is not None and os.path.samestat(found, os.fstat(fd)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)
