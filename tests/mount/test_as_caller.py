"""A writable mount of a local directory gives nobody more rights than the directory itself.

Several users may write into the source, also past the mount. What a user may not do there, the
mount does not do for it.
"""

import os
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually

pytestmark = pytest.mark.root

MALLORY, ALICE, TEAM = 54_321, 54_322, 54_333


def run_as(uid: int, script: str, *args: object, groups: str = "") -> str:
    """Run a script in a shell with `set -e`. Return what it prints; errors too."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}"]
    become += [f"--groups={groups}"] if groups else ["--clear-groups"]
    command = [*become, "--", "sh", "-c", f"set -e; {script}", "sh", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def can(uid: int, script: str, *args: object, groups: str = "") -> bool:
    return "done" in run_as(uid, f"{script}; echo done", *args, groups=groups).splitlines()


def python_as(uid: int, code: str, *args: object) -> str:
    """Run Python, where the shell would hide an error of a close."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    command = [*become, sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


WRITE = """
import sys
with open(sys.argv[1], sys.argv[2]) as file:
    file.write(sys.argv[3])
"""


@pytest.fixture
def site() -> Iterator[Site]:
    """One that other users can reach, and into whose source they may write."""
    with tempfile.TemporaryDirectory(prefix="cachefs-test-") as name:
        Path(name).chmod(0o755)
        site = Site(Path(name))
        site.files.chmod(0o777)
        site.expected_trouble += (" cachefs.writes.",)
        yield site
        site.tear_down()


@pytest.mark.parametrize("ttls", [(), ("--list-ttl", "0", "--negative-ttl", "0")])
def test_another_directory_at_the_path(site: Site, ttls: tuple[str, ...]) -> None:
    """A user puts another user's directory in the place of an own one that the kernel knows."""
    source, mnt = site.files, site.mountpoint
    run_as(ALICE, 'umask 022; mkdir "$1"; echo s >"$1/f"; echo k >"$1/keep"', source / "private")
    (source / "private").chmod(0o700)
    run_as(MALLORY, 'mkdir "$1" "$1/below"', source / "mine")
    site.mount("--rw", *ttls)
    assert can(MALLORY, 'ls -la "$1" >&2; stat "$1" "$1/below" >&2', mnt / "mine")
    inside = os.open(mnt / "mine", os.O_RDONLY | os.O_DIRECTORY)
    run_as(MALLORY, 'mv "$1" "$1.old"; mv "$2" "$1"', source / "mine", source / "private")
    try:
        assert not can(MALLORY, 'cat "$1/f" >&2', mnt / "mine")
        assert "keep" not in run_as(MALLORY, 'ls "$1"', mnt / "mine")
        assert not can(MALLORY, 'rm "$1/keep"', mnt / "mine")
        assert not can(MALLORY, 'chmod 777 "$1"', mnt / "mine")
        assert not can(MALLORY, 'mkdir "$1/planted"', mnt / "mine")
        assert "Error" in python_as(MALLORY, WRITE, mnt / "mine/new", "w", "x")
        with pytest.raises(OSError):
            os.mkdir("planted", dir_fd=inside)  # root's process, too, means the other directory
    finally:
        os.close(inside)
    found = (source / "mine").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (ALICE, 0o700)
    assert sorted(os.listdir(source / "mine")) == ["f", "keep"]
    # The kernel learns what is there now, so the owner goes on.
    eventually(lambda: can(ALICE, 'cat "$1/f" >&2; echo 2 >"$1/g"', mnt / "mine"))
    assert (source / "mine/g").read_text() == "2\n"
    site.umount()


def test_names_of_others_in_a_sticky_directory(site: Site) -> None:
    source, mnt = site.files, site.mountpoint
    source.chmod(0o1777)
    run_as(ALICE, 'echo 1 >"$1"; chmod 666 "$1"', source / "open")
    site.mount("--rw")
    names = ("a", "b", "c")
    for name in names:
        run_as(MALLORY, 'echo bait >"$1"', source / name)
    assert can(MALLORY, 'ls -la "$1" >&2', mnt)
    for name in names:
        run_as(MALLORY, 'rm "$1"', source / name)
        run_as(ALICE, 'umask 077; echo precious >"$1"', source / name)
    assert not can(MALLORY, 'rm -f "$1"', mnt / "a")
    assert not can(MALLORY, 'mv "$1" "$1.moved"', mnt / "b")
    assert "Error" in python_as(MALLORY, WRITE, mnt / "c", "w", "evil")
    assert [(source / name).read_text() for name in names] == ["precious\n"] * 3
    # What everybody may write may be written, and stays its owner's.
    assert can(MALLORY, 'echo 2 >>"$1"', mnt / "open")
    found = (source / "open").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (ALICE, 0o666)
    assert (source / "open").read_text() == "1\n2\n"
    site.umount()


def test_the_source_is_the_directory_that_was_mounted(site: Site) -> None:
    """Its path may lead to another one later, by the hand of the owner of a directory above."""
    real, evil = site.files, site.files.parent / "evil"
    evil.mkdir()
    (evil / "other").mkdir()
    (evil / "other/secret").write_text("secret")
    real.rename(evil / "data")
    os.chown(evil, MALLORY, MALLORY)
    site.source = f"file://{evil / 'data'}"
    (evil / "data/f").write_text("1")
    site.mount("--rw", "--entry-ttl", "0", "--attr-ttl", "0", "--list-ttl", "0")
    run_as(MALLORY, 'mv "$1/data" "$1/old"; ln -s other "$1/data"', evil)
    assert os.listdir(site.mountpoint) == ["f"]
    assert not (site.mountpoint / "secret").exists()
    assert can(MALLORY, 'echo 2 >"$1"', site.mountpoint / "g")
    assert sorted(os.listdir(evil / "old")) == ["f", "g"]
    assert os.listdir(evil / "other") == ["secret"]
    site.umount()


def test_only_what_was_asked_for_changes(site: Site) -> None:
    """What was changed at the source since the mount has seen a file stays so."""
    source, mnt = site.files, site.mountpoint
    for name in ("appended", "touched", "named"):
        run_as(ALICE, 'umask 022; echo 1 >"$1"', source / name)
    run_as(MALLORY, 'echo 1 >"$1"', source / "taken")
    site.mount("--rw", "--attr-ttl", "1h", "--entry-ttl", "1h")
    assert can(ALICE, 'ls -la "$1" >&2', mnt)
    for name in ("appended", "touched", "named"):
        (source / name).chmod(0o600)
    os.setxattr(source / "appended", "user.note", b"kept")
    os.chown(source / "taken", 0, 0)
    (source / "taken").chmod(0o600)
    assert can(ALICE, 'echo 2 >>"$1"', mnt / "appended")
    assert can(ALICE, 'touch -d 2020-01-01 "$1"', mnt / "touched")
    assert can(ALICE, 'echo 3 >"$1"', mnt / "named")
    assert "PermissionError" in python_as(MALLORY, WRITE, mnt / "taken", "a", "2")
    for name in ("appended", "touched", "named"):
        found = (source / name).stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (ALICE, 0o600)
    assert os.getxattr(source / "appended", "user.note") == b"kept"
    assert (source / "appended").read_text() == "1\n2\n"
    assert (source / "taken").read_text() == "1\n"
    site.umount()


def test_the_kernel_gives_new_files_their_owner_and_group(site: Site) -> None:
    source, mnt = site.files, site.mountpoint
    team = source / "team"
    team.mkdir()
    os.chown(team, 0, TEAM)
    team.chmod(0o2770)
    site.mount("--rw")
    made = 'umask 027; echo 1 >"$1/f"; mkdir "$1/d"; echo 2 >"$1/d/g"'
    assert not can(MALLORY, made, mnt / "team")
    assert can(MALLORY, made, mnt / "team", groups=str(TEAM))
    facts = [(p.stat().st_uid, p.stat().st_gid) for p in (team / "f", team / "d", team / "d/g")]
    assert facts == [(MALLORY, TEAM)] * 3
    assert [p.stat().st_mode & 0o7777 for p in (team / "f", team / "d")] == [0o640, 0o2750]
    assert (mnt / "team/d/g").stat().st_gid == (mnt / "team/f").stat().st_gid == TEAM
    # The group may write what one of it has made, and only the owner may change its mode.
    assert can(MALLORY, 'chmod 660 "$1/f"', mnt / "team", groups=str(TEAM))
    assert can(ALICE, 'echo 2 >>"$1/f"; touch "$1/f"', mnt / "team", groups=str(TEAM))
    assert not can(ALICE, 'chmod 600 "$1/f"', mnt / "team", groups=str(TEAM))
    assert (team / "f").stat().st_uid == MALLORY
    site.umount()


def access_list(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NOBODY = (1 << 32) - 1
OWNER, USER, GROUP_OWNER, GROUP, MASK, OTHERS = 1, 2, 4, 8, 0x10, 0x20


def test_access_lists_hold(site: Site) -> None:
    """The mode of such a file has the mask in the place of the group's rights."""
    source, mnt = site.files, site.mountpoint
    named = [(OWNER, 6, NOBODY), (USER, 0, MALLORY), (GROUP_OWNER, 4, NOBODY), (MASK, 4, NOBODY)]
    lists = {
        "user": access_list(*named, (OTHERS, 4, NOBODY)),
        "group": access_list(
            *((OWNER, 6, NOBODY), (GROUP_OWNER, 0, NOBODY), (GROUP, 4, TEAM + 1)),
            *((MASK, 4, NOBODY), (OTHERS, 0, NOBODY)),
        ),
    }
    for name, value in lists.items():
        (source / name).write_text("secret\n")
        os.chown(source / name, ALICE, TEAM)
        os.setxattr(source / name, "system.posix_acl_access", value)
    site.mount("--rw")
    assert not can(MALLORY, 'cat "$1" >&2', mnt / "user")
    assert not can(MALLORY, 'cat "$1" >&2', mnt / "group", groups=str(TEAM))
    for name, value in lists.items():
        assert can(ALICE, 'echo more >>"$1"', mnt / name)
        assert os.getxattr(source / name, "system.posix_acl_access") == value
        assert (source / name).read_text() == "secret\nmore\n"
        assert (source / name).stat().st_uid == ALICE
    site.umount()


def test_a_link_does_not_lead_out_of_what_its_owner_may_see(site: Site) -> None:
    """A container sees one directory of the mount. Its user plants links there."""
    source, mnt = site.files, site.mountpoint
    for name, uid in (("mine", MALLORY), ("theirs", ALICE)):
        (source / name).mkdir()
        (source / name / "f").write_text("secret")
        (source / name / "d").mkdir()
        for path in (source / name, source / name / "f", source / name / "d"):
            os.chown(path, uid, uid)
    links = {"up": "../theirs", "file": "../theirs/f", "down": "d", "own": "../mine/f"}
    for name, target in links.items():
        run_as(MALLORY, 'ln -s "$1" "$2"', target, source / "mine" / name)
    (source / "mine/roots").symlink_to("../theirs/f")
    site.mount()
    volume = mnt / "mine"
    assert sorted(os.listdir(volume)) == ["d", "down", "f", "own", "roots"]
    assert (volume / "own").read_text() == (volume / "roots").read_text() == "secret"
    assert not (volume / "up/f").exists()
    site.umount()
    assert "see --follow-links" in site.log.read_text()
    fresh = ("--list-ttl", "0", "--entry-ttl", "0", "--negative-ttl", "0")
    site.mount("--follow-links", "all", *fresh)
    assert (volume / "up/f").read_text() == "secret"
    site.umount()


def test_a_users_mode_holds_on_a_mount_with_modes(site: Site) -> None:
    site.mount("--rw", "--file-mode", "644", "--dir-mode", "777")
    mnt = site.mountpoint
    assert can(ALICE, 'umask 077; echo secret >"$1/f"; mkdir "$1/d"; echo 2 >"$1/d/g"', mnt)
    assert not can(MALLORY, 'cat "$1/f" >&2', mnt)
    assert not can(MALLORY, 'rm -f "$1/d/g"', mnt)
    assert can(ALICE, 'chmod 644 "$1/f"', mnt)
    assert can(MALLORY, 'cat "$1/f" >&2', mnt)
    site.umount()


def test_a_sparse_file_needs_no_room_at_the_source(site: Site) -> None:
    site.mount("--rw")
    run_as(MALLORY, 'truncate -s 20G "$1"', site.mountpoint / "big")
    eventually((site.files / "big").exists)
    found = (site.files / "big").stat()
    assert (found.st_size, found.st_uid) == (20 << 30, MALLORY)
    assert found.st_blocks < 2000
    site.umount()


def test_a_container_s_root_without_capabilities(site: Site) -> None:
    """It may do at the source what root may do without them, and no more."""
    source, mnt = site.files, site.mountpoint
    run_as(ALICE, 'mkdir -m 777 "$1"; echo 1 >"$1/f"; chmod 600 "$1/f"', source / "d")
    site.mount("--rw", "--entry-ttl", "1h", "--attr-ttl", "1h")
    (source / "d/f").chmod(0o666)
    os.stat(mnt / "d/f")
    (source / "d/f").chmod(0o600)
    (source / "d").chmod(0o700)
    bound = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"]
    for script in ('rm -f "$1/f"', 'mkdir "$1/e"', 'chmod 777 "$1"'):
        done = subprocess.run([*bound, "sh", "-c", script, "sh", mnt / "d"], check=False)
        assert done.returncode
    assert os.listdir(source / "d") == ["f"]
    assert can(ALICE, 'rm "$1/f"', mnt / "d")
    site.umount()


def test_a_program_of_root_does_not_make_a_users_file_its_own(site: Site) -> None:
    """It inherits a file that the user has created, and closes it before the user does."""
    site.mount("--rw")
    script = 'exec 3>"$1"; "$2" 1 >&3'
    tool = site.files.parent / "root-tool"
    tool.write_bytes(Path("/bin/echo").read_bytes())
    tool.chmod(0o4755)
    assert can(MALLORY, script, site.mountpoint / "f", tool)
    assert (site.files / "f").read_text() == "1\n"
    assert (site.files / "f").stat().st_uid == MALLORY
    site.umount()


CHANGE_WHILE_OPEN = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_TRUNC)
os.write(file, b"2")
os.fchmod(file, 0o600)
os.close(file)
"""


def test_attributes_of_a_file_with_unsent_changes(site: Site) -> None:
    """The kernel allows what the owner may do that the mount remembers. Another user owns it."""
    source, mnt = site.files, site.mountpoint
    for name in ("given", "replaced", "own"):
        run_as(MALLORY, 'umask 0; echo 1 >"$1"', source / name)
    site.mount("--rw", "--attr-ttl", "1h", "--entry-ttl", "1h")
    assert can(MALLORY, 'ls -la "$1" >&2', mnt)
    os.chown(source / "given", ALICE, ALICE)
    (source / "replaced").unlink()
    run_as(ALICE, 'umask 0; echo other >"$1"', source / "replaced")
    for name, owner, mode in (
        ("given", ALICE, 0o666),
        ("replaced", ALICE, 0o666),
        ("own", MALLORY, 0o600),
    ):
        errors = python_as(MALLORY, CHANGE_WHILE_OPEN, mnt / name)
        assert ("Error" in errors) == (owner == ALICE)
        found = (source / name).stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (owner, mode)
    assert (source / "own").read_text() == "2"
    site.umount()


RENAME_WHILE_OPEN = """
import os, sys
new, target, size = sys.argv[1:]
file = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
os.write(file, b"2")
os.ftruncate(file, int(size))
os.rename(new, target)
os.close(file)
"""


@pytest.mark.parametrize("size_bytes", [1, 17 << 20])
def test_an_unsent_file_takes_over_nothing_at_its_new_name(site: Site, size_bytes: int) -> None:
    source, mnt = site.files, site.mountpoint
    run_as(ALICE, 'umask 022; echo 1 >"$1"', source / "theirs")
    run_as(MALLORY, 'umask 0333; echo 1 >"$1"', source / "fixed")
    site.mount("--rw")
    for name in ("theirs", "fixed"):
        assert not python_as(MALLORY, RENAME_WHILE_OPEN, mnt / "new", mnt / name, size_bytes)
        found = (source / name).stat()
        assert (found.st_uid, found.st_size) == (MALLORY, size_bytes)
        assert stat.S_IMODE(found.st_mode) == 0o600
    assert sorted(os.listdir(source)) == ["fixed", "theirs"]
    site.umount()


def test_chmod_keeps_the_setgid_bit_of_a_directory(site: Site) -> None:
    """The mount does not show it, so chmod(1) would take it away."""
    source, mnt = site.files, site.mountpoint
    (source / "team").mkdir()
    os.chown(source / "team", MALLORY, TEAM)
    (source / "team").chmod(0o2750)
    site.mount("--rw")
    assert can(MALLORY, 'chmod g+w "$1"', mnt / "team", groups=str(TEAM))
    os.mkdir(mnt / "team/of_root")
    assert stat.S_IMODE((source / "team").stat().st_mode) == 0o2770
    assert (source / "team/of_root").stat().st_mode & stat.S_ISGID
    site.umount()


ACCESS = "system.posix_acl_access"


def test_the_access_list_of_a_directory_limits_what_is_new(site: Site) -> None:
    """It denies others everything, and has no entries that a file could not have as a mode."""
    source, mnt = site.files, site.mountpoint
    plain = [(OWNER, 7, NOBODY), (GROUP_OWNER, 5, NOBODY), (OTHERS, 0, NOBODY)]
    named = [*plain[:1], (USER, 7, ALICE), plain[1], (MASK, 7, NOBODY), plain[2]]
    for name, entries in (("plain", plain), ("named", named)):
        for place in (source / name, source / f"{name}-twin"):
            place.mkdir()
            os.chown(place, MALLORY, MALLORY)
            os.setxattr(place, "system.posix_acl_default", access_list(*entries))
    site.mount("--rw")
    for name in ("plain", "named"):
        for uid, prefix in ((MALLORY, "user"), (0, "root")):
            script = f'umask 0; echo 1 >"$1/{prefix}-file"; mkdir "$1/{prefix}-dir"'
            assert can(uid, script, mnt / name)
            run_as(uid, script, source / f"{name}-twin")
            for made in (f"{prefix}-file", f"{prefix}-dir"):
                facts = [
                    (path.stat().st_mode, ACCESS in os.listxattr(path))
                    for path in (source / name / made, source / f"{name}-twin" / made)
                ]
                assert facts[0] == facts[1]
                assert not facts[0][0] & 0o007
    site.umount()


def test_capabilities_in_another_user_namespace_are_none(site: Site) -> None:
    """A container's root can give a namespace all users, and has all capabilities there."""
    source, mnt = site.files, site.mountpoint
    run_as(ALICE, 'mkdir -m 700 "$1"', source / "private")
    site.mount("--rw")
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]
    script = 'echo ready; read -r _; mkdir "$1/planted"'
    inside = ["unshare", "--user", "--", "sh", "-c", script, "sh", str(mnt / "private")]
    pipe = subprocess.PIPE
    with subprocess.Popen([*bound, *inside], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(f"0 0 {NOBODY}")
        _, errors = process.communicate(b"\n")
    assert b"denied" in errors
    assert os.listdir(source / "private") == []
    site.umount()
