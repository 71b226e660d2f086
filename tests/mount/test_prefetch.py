"""Files that come before anybody asks for them, through a real mount."""

import os
import random

from tests.mount.harness import PATIENT, Site, eventually

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


def shuffled_tree(site: Site, files: int) -> dict[str, bytes]:
    """Files of two directories, of 20 to 100 KB, in random order."""
    chance = random.Random(files)
    content = {f"d{n % 2}/{n:03}": chance.randbytes(chance.randrange(20_000, 100_000))
               for n in range(files)}  # fmt: skip
    for name, data in content.items():
        (site.files / name).parent.mkdir(exist_ok=True)
        (site.files / name).write_bytes(data)
    names = list(content)
    chance.shuffle(names)
    return {name: content[name] for name in names}


def list_tree(site: Site) -> None:
    for directory in ("", "d0", "d1"):
        os.listdir(site.mountpoint / directory)


def read_all(site: Site, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        assert (site.mountpoint / name).read_bytes() == data


def test_siblings_come_for_a_reader_in_random_order(site: Site) -> None:
    content = shuffled_tree(site, 120)
    site.mount("--prefetch", "siblings", *PATIENT)
    list_tree(site)
    first = dict(list(content.items())[:30])
    read_all(site, first)
    eventually(lambda: site.origin()["gets"] == len(content))
    read_all(site, content)
    assert site.origin()["gets"] == len(content), "each file once"


def test_siblings_that_no_reader_needs_cost_at_most_the_budget(site: Site) -> None:
    content = shuffled_tree(site, 400)
    site.mount("--prefetch", "siblings", *PATIENT)
    list_tree(site)
    few = dict(list(content.items())[:30])
    read_all(site, few)
    read_bytes = sum(map(len, few.values()))
    smallest = min(map(len, content.values()))
    assert sum(map(len, content.values())) > read_bytes + (12 << 20)
    # It goes on until not even one of the smallest files has room.
    eventually(lambda: site.origin()["get_bytes"] > (8 << 20) - 100_000 + smallest)
    assert site.origin()["get_bytes"] <= read_bytes + (8 << 20)


def test_siblings_are_switched_on_while_mounted(site: Site) -> None:
    content = shuffled_tree(site, 120)
    site.mount("--prefetch", "off", *PATIENT)
    list_tree(site)
    names = list(content)
    read_all(site, {name: content[name] for name in names[:30]})
    assert site.origin()["gets"] == 30
    said = site.cli("set", site.mountpoint, "prefetch=siblings").stdout
    assert said.startswith("prefetch was off and is siblings")
    read_all(site, {name: content[name] for name in names[30:60]})
    eventually(lambda: site.origin()["gets"] == len(content))
    read_all(site, content)
    assert site.origin()["gets"] == len(content)


def test_replaced_and_deleted_siblings_are_dropped(site: Site) -> None:
    content = shuffled_tree(site, 120)
    site.mount("--prefetch", "siblings", *PATIENT)
    list_tree(site)
    names = list(content)
    for name in names[60:70]:
        (site.files / name).unlink()
    for name in names[70:80]:
        (site.files / name).write_bytes(b"another")
    read_all(site, {name: content[name] for name in names[:60]})
    eventually(lambda: site.origin()["gets"] >= 100)
    read_all(site, {name: content[name] for name in names[80:]})
    assert site.is_running()
