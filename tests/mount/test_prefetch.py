"""Files that come before anybody asks for them, through a real mount."""

import os

from tests.mount.harness import Site, eventually

FILES = 60


def write_files(site: Site) -> list[str]:
    names = [f"{number:03}" for number in range(FILES)]
    for name in names:
        (site.files / name).write_bytes(name.encode() * 5_000)
    return names


def test_a_reader_in_name_order_finds_the_next_files_cached(site: Site) -> None:
    names = write_files(site)
    site.mount()
    assert sorted(os.listdir(site.mountpoint)) == names
    for name in names[:10]:
        assert (site.mountpoint / name).read_bytes() == name.encode() * 5_000
    eventually(lambda: site.origin()["gets"] > 30)
    assert all((site.mountpoint / name).read_bytes() == name.encode() * 5_000 for name in names)
    assert site.origin()["gets"] == FILES


def test_without_prefetching_only_what_is_read_is_fetched(site: Site) -> None:
    names = write_files(site)
    site.mount("--prefetch", "off")
    assert sorted(os.listdir(site.mountpoint)) == names
    for name in names[:10]:
        (site.mountpoint / name).read_bytes()
    assert site.origin()["gets"] == 10
