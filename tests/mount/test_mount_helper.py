"""`mount.cachefs`, run as mount(8) runs it, and by mount(8) itself."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cli.mounting.mount_words import FSTAB, IGNORED, parse_mount_words
from cachefs.config import flags
from tests.mount.harness import Site
from tests.servers.seaweedfs import SeaweedFS

HELPER = Path(sys.executable).with_name("mount.cachefs")
LINK = Path("/sbin/mount.cachefs")


def run(*command: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def words(site: Site, *more: str) -> str:
    ours = (f"cache_dir={site.cache}", "cache_size=64MiB", "free_space_ratio=0")
    return ",".join(("rw", *ours, f"log_file={site.log}", *more))


@pytest.fixture
def helper_link() -> Iterator[None]:
    """Where mount(8) looks. One that is already there is used."""
    if os.geteuid() != 0:
        pytest.skip("only root can put a helper of mount(8) into /sbin")
    made = not os.path.lexists(LINK)
    if made:
        LINK.symlink_to(HELPER)
    yield
    if made:
        LINK.unlink()


def test_the_words_of_an_fstab_line(site: Site) -> None:
    (site.files / "file").write_text("content")
    fstab = "noauto,user,exec,nofail,_netdev,x-systemd.automount,comment=data"
    done = run(HELPER, site.source, site.mountpoint, "-n", "-v", "-o", words(site, fstab))
    assert done.stdout == f"mount.cachefs: {site.source} mounted on {site.mountpoint}\n"
    assert (site.mountpoint / "file").read_text() == "content"
    site.umount()


def test_mount_and_umount_find_it(site: Site, helper_link: None) -> None:
    (site.files / "file").write_text("content")
    run("mount", "-t", "cachefs", site.source, site.mountpoint, "-o", words(site, "file_mode=440"))
    assert (site.mountpoint / "file").read_text() == "content"
    assert (site.mountpoint / "file").stat().st_mode & 0o777 == 0o440
    run("umount", site.mountpoint)
    assert not site.is_mounted()


def test_a_line_of_fstab(site: Site, helper_link: None, tmp_path: Path) -> None:
    config = tmp_path / "data.toml"
    config.write_text(f'cache_dir = "{site.cache}"\ncache_size = "64MiB"\nfree_space_ratio = 0\n')
    options = f"noauto,nofail,_netdev,x-systemd.requires=network.target,config={config}"
    fstab = tmp_path / "fstab"
    line = f"{site.source} {site.mountpoint} cachefs {options},log_file={site.log} 0 0\n"
    fstab.write_text(line)
    run("mount", "--fstab", fstab, site.mountpoint)
    assert site.is_mounted()
    run("umount", site.mountpoint)


def test_a_writable_mount_in_fstab(site: Site, helper_link: None, tmp_path: Path) -> None:
    """mount(8) adds "rw" to every mount that is not "ro", so that word says nothing."""
    fstab = tmp_path / "fstab"
    for word, is_writable in (("nofail", False), ("writable", True), ("rw,writable", True)):
        options = words(site, word).removeprefix("rw,")
        fstab.write_text(f"{site.source} {site.mountpoint} cachefs noauto,{options} 0 0\n")
        run("mount", "--fstab", fstab, site.mountpoint)
        if is_writable:
            (site.mountpoint / "new").write_text(word)
            assert (site.files / "new").read_text() == word
        else:
            with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
                (site.mountpoint / "new").write_text(word)
        run("umount", site.mountpoint)


def test_ro_wins_over_a_file(site: Site, helper_link: None, tmp_path: Path) -> None:
    config = tmp_path / "data.toml"
    config.write_text("read_only = false\n")
    options = words(site, f"config={config}").removeprefix("rw,")
    run("mount", "-r", "-t", "cachefs", site.source, site.mountpoint, "-o", options)
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        (site.mountpoint / "new").touch()
    run("umount", site.mountpoint)
    said = run(HELPER, site.source, site.mountpoint, "-o", "ro,writable", code=1).stderr
    assert said == (
        "mount.cachefs: error: -o ro and -o writable contradict each other; leave one out\n"
    )


def test_fstab_reads_the_credentials_beside_the_file(
    site: Site, helper_link: None, tmp_path: Path, seaweedfs: SeaweedFS
) -> None:
    bucket = seaweedfs.make_bucket("fstab")
    seaweedfs.put(bucket, "file", b"content")
    config = tmp_path / "data.toml"
    config.write_text(f'source = "s3://{bucket}"\n')
    secrets = config.with_suffix(".env")
    secrets.write_text(
        "# for S3\n" + "".join(f"{k}={v}\n" for k, v in seaweedfs.environment.items())
    )
    secrets.chmod(0o600)
    fstab = tmp_path / "fstab"
    options = words(site, "noauto", f"config={config}")
    fstab.write_text(f"s3://{bucket} {site.mountpoint} cachefs {options} 0 0\n")
    run("mount", "--fstab", fstab, site.mountpoint)
    assert (site.mountpoint / "file").read_bytes() == b"content"
    run("umount", site.mountpoint)
    secrets.chmod(0o620)
    said = run("mount", "--fstab", fstab, site.mountpoint, code=1).stderr
    assert f"others than root can change it; run: chown 0 {secrets} && chmod 600" in said


def test_failures_have_the_exit_codes_of_mount(site: Site) -> None:
    said = run(HELPER, site.source, site.mountpoint, "-o", "cach_dir=/x", code=1).stderr
    assert said == 'mount.cachefs: error: -o: "cach_dir" is unknown; did you mean "cache_dir"?\n'
    missing = site.mountpoint / "missing"
    site.expected_trouble += (" cachefs.cli.mounting.background: ",)
    said = run(HELPER, site.source, missing, "-o", words(site), code=32).stderr
    assert said.startswith("mount.cachefs: error: ")
    assert "does not exist" in said
    assert "missing argument" in run(HELPER, site.source, code=1).stderr
    run(HELPER, "-s", "-f", site.source, site.mountpoint, "-o", "whatever,cach_dir=/x")
    assert "-N" in run(HELPER, site.source, site.mountpoint, "-N", "/x", code=1).stderr


def test_remounting_and_noexec_are_refused(site: Site) -> None:
    for word in ("remount", "noexec"):
        said = run(HELPER, site.source, site.mountpoint, "-o", f"rw,{word}", code=1).stderr
        assert f"-o {word}" in said


def test_every_option_is_a_word() -> None:
    ignored = IGNORED | FSTAB
    for field, flag in flags().items():
        if field in {"foreground", "read_only"}:
            continue
        word = flag.key if flag.metavar is None else f"{flag.key}=x"
        assert field in parse_mount_words(word, ignored), field
