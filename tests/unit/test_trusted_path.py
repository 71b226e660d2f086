"""What an operator names is opened without a way through the hands of other users."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs import trusted_path
from cachefs.errors import CachefsError, UntrustedPathError
from cachefs.trusted_path import (
    check_tree,
    open_directory,
    open_file,
    open_own_file,
    open_place,
    read_file,
    read_own_file,
    read_secret,
    resolve,
)

_OTHER = 2001
_APPENDS = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def _link_of_other(link: Path, target: Path) -> None:
    link.symlink_to(target)
    os.chown(link, _OTHER, _OTHER, follow_symlinks=False)


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _tree(directory: Path, close: bool = False, twice: tuple[str, ...] = ()) -> list[str]:
    fd = open_directory(directory)
    try:
        return check_tree(fd, str(directory), leave=("left",), twice=twice, close=close)
    finally:
        os.close(fd)


def test_an_error_is_one_of_cachefs_and_of_the_system() -> None:
    error = UntrustedPathError("it is a link")
    assert isinstance(error, CachefsError)
    assert isinstance(error, OSError)
    assert str(error) == error.strerror == "it is a link"


@pytest.mark.root
def test_only_links_of_root_and_of_this_user_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(b"x")
    (tmp_path / "up").symlink_to("a/b/../../a")
    (tmp_path / "all").symlink_to(tmp_path / "up")
    assert read_file(tmp_path / "all" / "file", 10) == b"x"
    (tmp_path / "last").symlink_to("all/file")
    assert read_file(tmp_path / "last", 10) == b"x"
    _link_of_other(tmp_path / "evil", tmp_path / "a")
    for path in (tmp_path / "evil" / "file", tmp_path / "evil"):
        for call in (read_file_of, open_place, resolve):
            with pytest.raises(UntrustedPathError, match=r"evil is a link of uid 2001"):
                call(path)
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        open_file(tmp_path / "round" / "x")


def read_file_of(path: Path) -> bytes:
    return read_file(path, 10)


def test_a_path_is_resolved_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "l").symlink_to("a/b")
    (tmp_path / "a" / "b" / "m").symlink_to("../../l/..")
    for name in ("l", "l/m", "l/m/b/missing/x", "missing", "l/m/../l", ".", "l/", "a/b/m"):
        assert str(resolve(tmp_path / name)) == os.path.realpath(os.path.abspath(tmp_path / name))
    assert resolve("/") == Path("/")


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_fine"),
    [
        (0, 0, 0o755, True),
        (0, 0, 0o1777, True),  # /tmp
        (0, 4, 0o775, True),  # /var/log of Ubuntu
        (0, _OTHER, 0o775, False),
        (0, 100, 0o775, False),  # everybody is in the group "users" of Debian
        (0, _OTHER, 0o1775, True),
        (0, 0, 0o777, False),
        (_OTHER, _OTHER, 0o755, False),
        (_OTHER, _OTHER, 0o1777, False),
    ],
)
def test_root_writes_only_where_others_can_replace_nothing(
    owner: int, group: int, mode: int, is_fine: bool, tmp_path: Path
) -> None:
    above = tmp_path / "above"
    (above / "own").mkdir(parents=True)
    (above / "own" / "read").write_bytes(b"x")
    above.chmod(mode)
    os.chown(above, owner, group)
    assert read_file(above / "own" / "read", 10) == b"x"  # the content is judged, not the place
    calls: list[Callable[[], int]] = [
        lambda: open_file(above / "own" / "log", _APPENDS),
        lambda: open_file(above / "log", _APPENDS),
        lambda: open_directory(above / "own"),
        lambda: open_directory(above / "new" / "below", make=True),
    ]
    for call in calls:
        if is_fine:
            os.close(call())
        else:
            with pytest.raises(UntrustedPathError, match=r"above.*(chmod go-w|of root)"):
                call()
    assert (above / "new").exists() == is_fine
    if is_fine:
        assert (above / "new" / "below").stat().st_mode & 0o777 == 0o700


def test_a_user_may_write_below_directories_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root's files are worth the trouble: a user has chosen these directories."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid or 4711)
    tmp_path.chmod(0o777)
    os.close(open_file(tmp_path / "log", _APPENDS))
    os.close(open_directory(tmp_path / "cache", make=True))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "a FIFO"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("/dev/tty"), "a device"),
        (_listen, "a socket"),
        (Path.mkdir, "a directory"),
    ],
)
def test_only_regular_files_are_opened(
    make: Callable[[Path], object], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("x"))
    for call in (read_file_of, lambda path: open_file(path, _APPENDS)):
        with pytest.raises(UntrustedPathError, match=f"is {what}, not a regular file"):
            call(tmp_path / "x")
    with pytest.raises(UntrustedPathError, match="not a regular file"):
        open_own_file(tmp_path / "x", os.O_RDWR | os.O_CREAT)


def test_a_log_may_be_the_null_device_or_a_descriptor_of_this_process(tmp_path: Path) -> None:
    os.close(open_file("/dev/null", _APPENDS))
    assert read_file("/dev/null", 10) == b""
    reader, writer = os.pipe()
    os.write(writer, b"from a shell")
    os.close(writer)
    assert read_file(f"/dev/fd/{reader}", 100) == b"from a shell"
    os.close(reader)
    with pytest.raises(UntrustedPathError):
        open_own_file(Path("/dev/null"))


def test_a_file_that_is_written_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    (tmp_path / "y").hardlink_to(tmp_path / "x")
    assert read_file(tmp_path / "x", 10) == b"x"
    for call in (lambda path: open_file(path, _APPENDS), open_own_file):
        with pytest.raises(UntrustedPathError, match="x has 2 names"):
            call(tmp_path / "x")


@pytest.mark.root
def test_a_file_that_is_written_is_of_root_or_of_this_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "x").write_bytes(b"x")
    os.chown(tmp_path / "x", _OTHER, _OTHER)
    assert read_file(tmp_path / "x", 10) == b"x"
    with pytest.raises(UntrustedPathError, match="uid 2001"):
        open_file(tmp_path / "x", _APPENDS)
    with pytest.raises(UntrustedPathError, match="uid 2001"):
        read_own_file(tmp_path / "x", 10)


def test_files_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(11))
    assert len(read_file(tmp_path / "x", 11)) == 11
    for read in (read_file, read_own_file, read_secret):
        with pytest.raises(OSError, match="more than 10 B"):
            read(tmp_path / "x", 10)


@pytest.mark.expect_log("x has a secret, and all users may read it")
def test_a_secret_that_all_may_read_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "x"
    place.write_bytes(b"secret")
    place.chmod(0o644)
    tmp_path.chmod(0o700)
    assert read_secret(place, 10) == b"secret"
    assert not caplog.messages  # nobody gets there
    monkeypatch.setattr(trusted_path, "resolve", lambda path: Path("/x"))
    for _ in range(2):
        read_secret(place, 10)
    assert len(caplog.messages) == 1
    (tmp_path / "y").write_bytes(b"secret")
    (tmp_path / "y").chmod(0o640)
    read_secret(tmp_path / "y", 10)
    assert len(caplog.messages) == 1


@pytest.mark.root
def test_a_swapped_directory_never_leads_elsewhere(tmp_path: Path) -> None:
    """Another user exchanges a directory and a link all the time."""
    evil, outside = tmp_path / "evil", tmp_path / "outside"
    (evil / "real").mkdir(parents=True)
    (evil / "real" / "file").write_bytes(b"inside")
    outside.mkdir()
    (outside / "file").write_bytes(b"outside")
    code = """if True:
        import os, sys
        os.chdir(sys.argv[1])
        while True:
            os.symlink("../outside", "link")
            os.chown("link", 2001, 2001, follow_symlinks=False)
            os.rename("link", "d")
            os.unlink("d")
            os.rename("real", "d")
            os.rename("d", "real")
    """
    swapper = subprocess.Popen([sys.executable, "-c", code, str(evil)])
    found, refused, until = set(), 0, time.monotonic() + 60
    try:
        while not (found and refused > 50) and time.monotonic() < until:
            try:
                found.add(read_file(evil / "d" / "file", 10))
            except OSError as error:
                refused += isinstance(error, UntrustedPathError)
    finally:
        swapper.kill()
        swapper.wait()
    assert found == {b"inside"}
    assert refused


def _make(tree: Path, kind: str) -> None:
    place = tree / "below" / "x"
    match kind:
        case "link":
            place.symlink_to("/etc/passwd")
        case "FIFO":
            os.mkfifo(place)
        case "names":
            place.write_bytes(b"")
            (tree.parent / "elsewhere").hardlink_to(place)
        case "user":
            place.write_bytes(b"")
            os.chown(place, _OTHER, _OTHER)
        case "deep":
            (place / "/".join("abcdefgh")).mkdir(parents=True)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["link", "FIFO", "names", "user", "deep"])
def test_a_tree_has_nothing_of_others(kind: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "left").mkdir()
    (tree / "left" / "x").symlink_to("/etc/passwd")
    assert _tree(tree) == []
    _make(tree, kind)
    with pytest.raises(UntrustedPathError, match=r"tree/below/x") as caught:
        _tree(tree)
    assert kind in str(caught.value)


def test_a_tree_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"")
    (tmp_path / "y").hardlink_to(tmp_path / "a" / "x")
    (tmp_path / "a").chmod(0o777)
    assert _tree(tmp_path, twice=("x", "y")) == [str(tmp_path / "a")]
    _tree(tmp_path, twice=("x", "y"), close=True)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    with pytest.raises(UntrustedPathError, match="has 2 names"):
        _tree(tmp_path, twice=("x",))


@pytest.mark.root
def test_a_volume_of_kubernetes_can_be_used(tmp_path: Path) -> None:
    """An emptyDir belongs to root and has the mode 777; a pod often names a directory in it."""
    code = """if True:
        import os, sys
        from cachefs.errors import UntrustedPathError
        from cachefs.trusted_path import open_directory
        volume = sys.argv[1]
        open_directory(volume + "/cache", make=True)
        assert os.stat(volume).st_mode & 0o7777 == 0o1777
        os.chmod(volume, 0o777)
        os.mkdir(volume + "/of-another")
        os.chown(volume + "/of-another", 2001, 2001)
        try:
            open_directory(volume + "/cache")
        except UntrustedPathError as error:
            print(error)
    """
    mount = 'mount -t tmpfs -o mode=777 none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "others than root can replace what lies in" in done.stdout


@pytest.mark.root
def test_owners_that_a_user_namespace_does_not_have_count_as_root(tmp_path: Path) -> None:
    code = "from cachefs.trusted_path import open_directory; open_directory('/var'); print('open')"
    python = [sys.executable, "-c", code]
    as_user = ["setpriv", f"--reuid={_OTHER}", f"--regid={_OTHER}", "--clear-groups"]
    command = [*as_user, "unshare", "--user", "--map-root-user", *python]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("users may not make user namespaces here")
    assert done.stdout == "open\n", done.stderr
