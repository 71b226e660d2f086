"""`cachefs metadata export` and `import` between two mounts of one bucket."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site
from tests.servers.seaweedfs import SeaweedFS

COUNT = 2_500


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS) -> str:
    bucket = seaweedfs.make_bucket("metadata")
    seaweedfs.put_many(bucket, {f"data/many/{number:05}": b"x" for number in range(COUNT)})
    seaweedfs.put_many(bucket, {"data/deep/er/file": b"deep", "data/top": b"top"})
    return bucket


@pytest.fixture
def nodes(tmp_path: Path, seaweedfs: SeaweedFS, bucket: str) -> Iterator[tuple[Site, Site]]:
    sites = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        site = Site(tmp_path / name, f"s3://{bucket}/data")
        site.options = PATIENT
        site.environment = seaweedfs.environment
        sites.append(site)
    yield sites[0], sites[1]
    for site in sites:
        site.tear_down()


def tree(root: Path) -> dict[str, tuple]:
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            info = path.stat()
            version = os.getxattr(path, "user.cachefs.version")
            found[str(path.relative_to(root))] = (info.st_size, info.st_mtime_ns, version)
    return found


def test_a_new_node_shows_the_tree_without_listing_it(
    nodes: tuple[Site, Site], tmp_path: Path
) -> None:
    old, new = nodes
    old.mount()
    old.cli("load", old.mountpoint, "--metadata")
    file = tmp_path / "data.parquet"
    said = old.cli("metadata", "export", old.mountpoint, file).stdout
    assert said.startswith(f"{COUNT + 6:,} entries of {old.source} exported to {file} in "), said
    new.mount("--list-ttl", "1h")
    before = new.origin()
    said = new.cli("metadata", "import", new.mountpoint, file).stdout
    assert said.startswith(f"{COUNT + 6:,} entries imported, {COUNT + 5:,} of them new"), said
    assert tree(new.mountpoint) == tree(old.mountpoint)
    assert not (new.mountpoint / "many/absent").exists()
    assert new.origin() == before
    assert (new.mountpoint / "deep/er/file").read_bytes() == b"deep"
    assert new.origin() == {**before, "gets": 1, "get_bytes": 4}
    said = new.cli("metadata", "import", new.mountpoint, file).stdout
    assert " 0 of them new or changed in " in said


def test_an_import_below_a_kernel_that_has_looked(nodes: tuple[Site, Site], tmp_path: Path) -> None:
    old, new = nodes
    old.mount()
    old.cli("load", old.mountpoint, "--metadata")
    new.mount("--negative-ttl", "0")
    assert (new.mountpoint / "deep/er").is_dir()
    assert not (new.mountpoint / "many/absent").exists()
    inode = (new.mountpoint / "deep").stat().st_ino
    file = tmp_path / "data.parquet"
    old.cli("metadata", "export", old.mountpoint, file)
    new.cli("metadata", "import", new.mountpoint, file)
    assert tree(new.mountpoint) == tree(old.mountpoint)
    assert (new.mountpoint / "deep").stat().st_ino == inode


def test_what_does_not_fit_is_refused_in_one_line(nodes: tuple[Site, Site], site: Site) -> None:
    node, _ = nodes
    (site.files / "file").write_text("x")
    manifest = site.files.parent / "list"
    manifest.write_text("file\n")
    site.mount()
    exported = site.files.parent / "x.parquet"
    node.mount()
    node.cli("metadata", "export", node.mountpoint, exported)

    def refused(*arguments: object, code: int = 1) -> str:
        said = site.cli("metadata", *arguments, code=code).stderr
        assert said.startswith("cachefs: error: "), said
        assert said.count("\n") == 1, said
        return said

    assert "this is metadata of s3" in refused("import", site.mountpoint, exported)
    assert "no Parquet" in refused("import", site.mountpoint, manifest, code=2)
    assert "can't read" in refused("import", site.mountpoint, "/nonexistent")
    assert "can't read" in refused("import", site.mountpoint, site.files)
    assert "can't write" in refused("export", site.mountpoint, "/nonexistent/x")
    assert "is not mounted" in refused("export", site.files, "x")
    assert "is not mounted" in refused("import", site.files, exported)
    assert "missing argument 'FILE'" in refused("import", site.mountpoint, code=2)
    site.umount()
    site.mount("--manifest", manifest)
    assert "shows what a manifest names" in refused("export", site.mountpoint, exported)
    assert "shows what a manifest names" in refused("import", site.mountpoint, exported)
