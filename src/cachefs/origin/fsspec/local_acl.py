"""POSIX access lists of local files: which mode grants no more than a file's list does.

The kernel checks the mode that the mount shows, and nothing else. If a file has a list, the group
bits of its own mode are the list's mask (acl(5)), so the mode alone would grant more than the list.
"""

import contextlib
import errno
import os
import struct

ACL = "system.posix_acl_access"
_DEFAULT = "system.posix_acl_default"

_VERSION = 2
_HEAD = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")
"""Tag, permissions, id (linux/posix_acl_xattr.h)."""
_OWNER, _USER, _GROUP_OWNER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def mode_of(path: str, mode: int) -> int:
    """Return a mode for the file or directory at `path` that grants nobody more than its access
    list. `mode` is its own. A `path` without a slash is a name in the thread's working directory.
    Links are not followed, except those of /proc."""
    if not mode & 0o077:
        return mode  # nobody but the owner has any right
    follows = path.startswith("/proc/self/fd/")
    try:
        if ACL not in os.listxattr(path, follow_symlinks=follows):
            return mode
        return _limited(mode, os.getxattr(path, ACL, follow_symlinks=follows))
    except OSError as error:
        has_none = error.errno in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT)
        return mode if has_none else mode & ~0o077


def _limited(mode: int, acl: bytes) -> int:
    """Return `mode` without the rights of the group and of others that an access list denies to
    anybody. A list that can't be read grants nothing."""
    try:
        (version,) = _HEAD.unpack_from(acl)
        entries = list(_ENTRY.iter_unpack(acl[_HEAD.size :]))
    except struct.error:
        return mode & ~0o077
    if version != _VERSION:
        return mode & ~0o077
    mask = next((bits for tag, bits, _ in entries if tag == _MASK), 7)
    group = others = 7
    for tag, bits, _ in entries:
        if tag in (_USER, _GROUP_OWNER):
            group &= bits & mask  # a named user may be in the file's group, too
        if tag in (_USER, _GROUP):
            others &= bits & mask
    return mode & (~0o077 | group << 3 | others)


def default_list(directory: int) -> bytes:
    """Return the access list that a directory (O_PATH) gives to new files; empty if it has none."""
    try:
        return os.getxattr(f"/proc/self/fd/{directory}", _DEFAULT)
    except OSError:
        return b""


def make_as_new(file: int, inherited: bytes, mode: int) -> None:
    """Give a file the access list of a new one with this mode in a directory that has the list
    `inherited`, as the kernel does it (acl(5), "object creation"): the mode only takes away."""
    entries = list(_ENTRY.iter_unpack(inherited[_HEAD.size :]))
    group = _MASK if any(tag == _MASK for tag, _, _ in entries) else _GROUP_OWNER
    limits = {_OWNER: mode >> 6, group: mode >> 3, _OTHERS: mode}
    made = [_ENTRY.pack(tag, bits & limits.get(tag, 7), who) for tag, bits, who in entries]
    os.setxattr(file, ACL, inherited[: _HEAD.size] + b"".join(made))


def copy_attributes(source: int, target: int) -> None:
    """Give the file `target` the extended attributes of the file `source`, with its access list.
    `target` loses an access list that its directory gave it. Both are descriptors of regular files.
    Attributes that this process may not set (`trusted.`, some of `security.`) are left out; a list
    that can't be set raises `OSError`."""
    kept = set(os.listxattr(source))
    for name in kept:
        if name == "security.capability":
            continue  # a write takes it away (capabilities(7))
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError:
            if name == ACL:
                raise
    if ACL not in kept:
        with contextlib.suppress(OSError):  # there is none
            os.removexattr(target, ACL)
