"""`cachefs mount --manifest` and `cachefs manifest create`, on a real S3 server and beside it."""

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site, drop_pages
from tests.servers.seaweedfs import SeaweedFS

OBJECTS = {
    "train/a.jpg": b"aaaa",
    "train/b.jpg": b"bbbb",
    "train/deep/er/c.jpg": b"cccc",
    "train/empty": b"",
    "other/d.jpg": b"dddd",
}
CHANGED = " the origin no longer has the version that the manifest froze "


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS) -> str:
    return seaweedfs.make_bucket("manifests")  # one for all: SeaweedFS has room for few


@pytest.fixture
def prefix(seaweedfs: SeaweedFS, bucket: str, request: pytest.FixtureRequest) -> str:
    """Each test's own, with all objects."""
    prefix = re.sub(r"\W+", "-", request.node.name)
    seaweedfs.put_many(bucket, {f"{prefix}/{key}": data for key, data in OBJECTS.items()})
    return prefix


@pytest.fixture
def s3_site(tmp_path: Path, seaweedfs: SeaweedFS, bucket: str, prefix: str) -> Iterator[Site]:
    site = Site(tmp_path, f"s3://{bucket}/{prefix}")
    site.environment = seaweedfs.environment
    site.options = PATIENT
    yield site
    site.tear_down()


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def without_a_list(site: Site) -> bool:
    return site.origin()["lists"] == 0


def paths_in(file: Path) -> list[str]:
    return sorted(json.loads(line)["path"] for line in file.read_text().splitlines())


@pytest.mark.parametrize("name", ["m.parquet", "m.jsonl"])
def test_a_manifest_of_a_bucket_is_all_that_is_shown(s3_site: Site, name: str) -> None:
    manifest = s3_site.mountpoint.parent / name
    said = s3_site.cli(
        "manifest", "create", s3_site.source, "-o", manifest, "--exclude", "other/*"
    ).stderr
    assert said.startswith("4 files in "), said
    s3_site.mount("--manifest", manifest)
    heads = s3_site.origin()["heads"]
    mounted = s3_site.mountpoint
    wanted = {key: data for key, data in OBJECTS.items() if key.startswith("train/")}
    assert names_below(mounted) == sorted(wanted)
    assert {key: (mounted / key).read_bytes() for key in wanted} == wanted
    assert not (mounted / "other").exists()
    assert not (mounted / "other/d.jpg").exists()
    assert not (mounted / "train/x").exists()
    assert without_a_list(s3_site)
    assert s3_site.origin()["heads"] == heads <= 3


def test_a_list_of_paths_is_asked_for_once_and_then_frozen(
    s3_site: Site, seaweedfs: SeaweedFS, bucket: str, prefix: str
) -> None:
    manifest = s3_site.mountpoint.parent / "list.txt"
    manifest.write_text(
        "train/a.jpg\ntrain/empty\ntrain/gone.jpg\n" + s3_site.source + "/other/d.jpg"
    )
    s3_site.mount("--manifest", manifest, "--entry-ttl", "0", "--attr-ttl", "0", "--list-ttl", "0")
    mounted = s3_site.mountpoint
    assert names_below(mounted) == ["other/d.jpg", "train/a.jpg", "train/empty"]
    assert not (mounted / "train/gone.jpg").exists()
    seaweedfs.put(bucket, f"{prefix}/train/a.jpg", b"longer than before")
    seaweedfs.put(bucket, f"{prefix}/train/b.jpg", b"new")
    assert (mounted / "train/a.jpg").stat().st_size == 4
    assert names_below(mounted) == ["other/d.jpg", "train/a.jpg", "train/empty"]
    assert without_a_list(s3_site)
    s3_site.umount()
    s3_site.mount("--manifest", manifest)
    assert (mounted / "train/a.jpg").read_bytes() == b"longer than before"
    assert without_a_list(s3_site)


def test_absent_names_cost_nothing_beside_listed_ones_that_were_never_asked(s3_site: Site) -> None:
    manifest = s3_site.mountpoint.parent / "list.txt"
    manifest.write_text("train/a.jpg\ntrain/b.jpg\n")
    s3_site.mount("--manifest", manifest)
    heads = s3_site.origin()["heads"]
    for number in range(100):
        assert not (s3_site.mountpoint / f"train/{number}").exists()
    assert s3_site.origin()["heads"] == heads
    assert without_a_list(s3_site)


def test_cached_blocks_of_a_replaced_version_are_served_and_others_are_stale(
    s3_site: Site, seaweedfs: SeaweedFS, bucket: str, prefix: str
) -> None:
    manifest = s3_site.mountpoint.parent / "m.jsonl"
    s3_site.cli("manifest", "create", s3_site.source, "-o", manifest)
    s3_site.mount("--manifest", manifest)
    cached, other = s3_site.mountpoint / "train/a.jpg", s3_site.mountpoint / "train/b.jpg"
    assert cached.read_bytes() == b"aaaa"
    for key in ("a", "b"):
        seaweedfs.put(bucket, f"{prefix}/train/{key}.jpg", b"XXXX")
    drop_pages(cached)
    assert cached.read_bytes() == b"aaaa"
    s3_site.expected_trouble += (CHANGED,)
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            other.read_bytes()
        assert caught.value.errno in {errno.ESTALE, errno.EIO}
    assert s3_site.log.read_text().count(CHANGED) == 1
    assert other.stat().st_size == 4
    assert without_a_list(s3_site)
    s3_site.umount()
    s3_site.cli("manifest", "create", s3_site.source, "-o", manifest)
    s3_site.mount("--manifest", manifest)
    assert [cached.read_bytes(), other.read_bytes()] == [b"XXXX", b"XXXX"]


def test_etags_without_quotes_are_understood(s3_site: Site) -> None:
    manifest = s3_site.mountpoint.parent / "m.jsonl"
    s3_site.cli("manifest", "create", s3_site.source, "-o", manifest)
    text = manifest.read_text()
    assert '"version": "\\"' in text
    manifest.write_text(text.replace('\\"', ""))
    s3_site.mount("--manifest", manifest)
    assert (s3_site.mountpoint / "train/a.jpg").read_bytes() == b"aaaa"
    assert s3_site.origin()["gets"] == 1
    assert without_a_list(s3_site)


def test_load_sees_the_listed_files_only(s3_site: Site) -> None:
    manifest = s3_site.mountpoint.parent / "m.jsonl"
    s3_site.cli("manifest", "create", f"{s3_site.source}/train", "-o", manifest,
                "--relative-to", s3_site.source, "--include", "*.jpg")  # fmt: skip
    assert paths_in(manifest) == ["train/a.jpg", "train/b.jpg", "train/deep/er/c.jpg"]
    s3_site.mount("--manifest", manifest)
    s3_site.cli("load", s3_site.mountpoint)
    origin = s3_site.origin()
    assert (origin["gets"], origin["lists"]) == (3, 0)
    s3_site.cli("load", "-f", manifest, "--check", "--mount", s3_site.mountpoint)
    said = s3_site.cli("load", s3_site.mountpoint / "other/d.jpg", code=1)
    assert "other/d.jpg" in said.stderr
    assert s3_site.origin()["heads"] == origin["heads"]
    assert without_a_list(s3_site)


def test_blocks_are_shared_and_names_are_not(s3_site: Site) -> None:
    s3_site.mount()
    assert (s3_site.mountpoint / "train/a.jpg").read_bytes() == b"aaaa"
    assert names_below(s3_site.mountpoint) == sorted(OBJECTS)
    s3_site.umount()
    manifest = s3_site.mountpoint.parent / "m.jsonl"
    s3_site.cli("manifest", "create", s3_site.source, "-o", manifest, "--include", "a.jpg")
    s3_site.mount("--manifest", manifest)
    assert names_below(s3_site.mountpoint) == ["train/a.jpg"]
    assert (s3_site.mountpoint / "train/a.jpg").read_bytes() == b"aaaa"
    assert s3_site.origin()["gets"] == 0
    s3_site.umount()
    s3_site.cli("manifest", "create", s3_site.source, "-o", manifest, "--include", "[bd].jpg")
    s3_site.mount("--manifest", manifest)
    assert names_below(s3_site.mountpoint) == ["other/d.jpg", "train/b.jpg"]
    s3_site.umount()
    s3_site.mount()
    assert names_below(s3_site.mountpoint) == sorted(OBJECTS)
    assert (s3_site.mountpoint / "train/a.jpg").read_bytes() == b"aaaa"
    origin = s3_site.origin()
    assert (origin["gets"], origin["lists"]) == (0, 1), "the one LIST is that of the mount"


def test_a_manifest_in_the_bucket_is_read_with_the_mounts_credentials(
    s3_site: Site, seaweedfs: SeaweedFS, bucket: str, prefix: str
) -> None:
    manifest = s3_site.mountpoint.parent / "m.parquet"
    s3_site.cli("manifest", "create", s3_site.source, "-o", manifest, "--include", "train/*")
    seaweedfs.put(bucket, f"{prefix}/lists/m.parquet", manifest.read_bytes())
    s3_site.mount("--manifest", f"{s3_site.source}/lists/m.parquet")
    assert len(names_below(s3_site.mountpoint)) == 4
    assert without_a_list(s3_site)


def test_a_manifest_of_a_mounted_directory(s3_site: Site) -> None:
    s3_site.mount()
    by_mount, by_url = (s3_site.mountpoint.parent / name for name in ("1.jsonl", "2.jsonl"))
    s3_site.cli("manifest", "create", s3_site.mountpoint / "train", "-o", by_mount)
    s3_site.cli("manifest", "create", s3_site.source, "-o", by_url, "--include", "train/*")
    assert sorted(by_mount.read_text().splitlines()) == sorted(by_url.read_text().splitlines())
    said = s3_site.cli("manifest", "create", s3_site.mountpoint, "-o", "-").stdout
    assert len(said.splitlines()) == len(OBJECTS)


def test_owners_come_from_the_list_and_directories_are_asked(site: Site) -> None:
    (site.files / "private").mkdir()
    (site.files / "private/file").write_text("x")
    (site.files / "private/plain").write_text("y")
    (site.files / "private").chmod(0o750)
    (site.files / "private/file").chmod(0o640)
    (site.files / "private/plain").chmod(0o600)
    manifest = site.mountpoint.parent / "m.jsonl"
    site.cli("manifest", "create", site.source, "-o", manifest, "--include", "file")
    with manifest.open("a") as file:
        file.write("private/plain\n")
    site.mount("--manifest", manifest)
    modes = {
        name: (site.mountpoint / name).stat().st_mode & 0o777
        for name in ("private", "private/file", "private/plain")
    }
    assert modes == {"private": 0o750, "private/file": 0o640, "private/plain": 0o600}
    assert names_below(site.mountpoint) == ["private/file", "private/plain"]
    assert without_a_list(site)


def test_what_is_no_manifest_is_refused(site: Site) -> None:
    manifest = site.mountpoint.parent / "m"
    manifest.write_text("a\nb/../c\n")
    assert f"manifest {manifest}, line 2: " in site.refused("--manifest", manifest, code=2)
    manifest.write_text("")
    assert "names no file" in site.refused("--manifest", manifest, code=2)
    manifest.write_text("not/there\n")
    assert "is it a manifest of this source?" in site.refused("--manifest", manifest)
    manifest.unlink()
    assert "can't read the manifest" in site.refused("--manifest", manifest)
    assert "can't read the manifest" in site.refused("--manifest", "file:///nonexistent/m")
    assert "must not carry" in site.refused("--manifest", "https://x/m?X-Amz-Signature=1", code=2)
    assert "fsspec can't open" in site.refused("--manifest", "nonsense://x/m", code=2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nonexistent", "-o", "m"], "neither a URL nor a directory of a mount"),
        (["{files}", "-o", "m"], "lies in no mount of cachefs"),
        (["file:///nonexistent", "-o", "m"], "does not exist"),
        (["file://{files}", "-o", "m", "--include", "nothing"], "no such file below"),
        (["file://{files}", "-o", "{files}/no/such/m"], "can't write "),
        (["file://{files}", "-o", "m", "--relative-to", "s3://b"], "does not lie below s3://b"),
        (["{files}", "-o", "m", "--endpoint", "http://x"], "--endpoint is for URLs"),
        (["file://{files}"], "missing option '-o'"),
    ],
)
def test_nonsense_to_create_is_one_line(
    site: Site, arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.files / "file").write_text("x")
    elsewhere = site.files.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    given = [argument.format(files=site.files) for argument in arguments]
    code = 1 if "does not exist" in complaint or "can't write" in complaint else 2
    said = site.cli("manifest", "create", *given, code=code).stderr
    assert said.startswith("cachefs: error: "), said
    assert complaint in said
    assert said.count("\n") == 1
    assert os.listdir(elsewhere) == []
