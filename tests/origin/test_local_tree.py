"""`file://`: nothing outside the source can be seen or read, whatever links in it say."""

import os

import pytest

from cachefs.errors import NotFoundError, OriginError, UsageError
from cachefs.origin.open_origin import open_origin
from tests.origin.listing import list_all

SECRET = b"not for users"
LEADS_OUT = pytest.mark.expect_log("is a symbolic link that leads out of the source")


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    return path


@pytest.fixture
async def origin(root):
    opened = open_origin(f"file://{root}")
    yield opened
    await opened.aclose()


@LEADS_OUT
@pytest.mark.parametrize(
    "target",
    [
        "../outside/secret",
        "../outside",
        "{outside}/secret",
        "{outside}",
        "/",
        "..",
        "inner/../../outside/secret",
        "up/outside/secret",
        "chain",
        "{root}/../outside/secret",
        "/proc/self/root{outside}/secret",
        "circle",
    ],
)
async def test_links_that_lead_outside_are_not_there(root, origin, target) -> None:
    outside = root.parent / "outside"
    (root / "inner").mkdir()
    (root / "up").symlink_to("inner/../..")
    (root / "chain").symlink_to("inner/next")
    (root / "inner/next").symlink_to(outside / "secret")
    (root / "link").symlink_to(target.format(root=root, outside=outside))
    (root / "circle").symlink_to("circle")
    assert sorted(await list_all(origin)) == ["inner"]
    assert origin.counters.unshown_keys == 4
    assert origin.counters.links_out_in_dir[""] >= 2
    assert await list_all(origin, "inner") == {}
    for path in ("link", "link/secret", "link/outside/secret", "up/outside/secret"):
        with pytest.raises(NotFoundError):
            await origin.stat(path)
        with pytest.raises(NotFoundError):
            await list_all(origin, path)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("inner/f", "f"),
        ("inner/../inner/./f", "f"),
        ("{root}/inner/f", "f"),
        ("{given}/inner/f", "f"),
        ("../root/inner/f", "f"),
        ("inner/back/inner/f", "f"),
        ("inner", "inner"),
        (".", "root"),
    ],
)
async def test_links_that_stay_inside_are_followed(root, target, name) -> None:
    given = root.parent / "given"
    given.symlink_to(root)
    (root / "inner").mkdir()
    (root / "inner/f").write_bytes(b"data")
    (root / "inner/back").symlink_to("..")
    (root / "link").symlink_to(target.format(root=root, given=given))
    origin = open_origin(f"file://{given}")
    entry = (await list_all(origin))["link"]
    assert await origin.stat("link") == entry.meta
    if name == "f":
        assert bytes(await origin.read("link", entry.meta, 1, 3)) == b"ata"
    else:
        assert entry.is_dir
        inner = await list_all(origin, "link")
        assert set(inner) == ({"f", "back"} if name == "inner" else {"inner", "link"})
        path = "link/f" if name == "inner" else "link/link/inner/f"
        assert bytes(await origin.read(path, await origin.stat(path), 0, 4)) == b"data"
    await origin.aclose()


@LEADS_OUT
async def test_what_becomes_a_link_after_it_was_listed_is_not_read(root, origin) -> None:
    (root / "f").write_bytes(SECRET.upper())
    (root / "d").mkdir()
    (root / "d/secret").write_bytes(SECRET.upper())
    metas = {path: await origin.stat(path) for path in ("f", "d/secret")}
    (root / "f").unlink()
    (root / "f").symlink_to("../outside/secret")
    (root / "d").rename(root / "e")
    (root / "d").symlink_to("../outside")
    for path, meta in metas.items():
        with pytest.raises(OriginError):
            await origin.read(path, meta, 0, len(SECRET))
        with pytest.raises(FileNotFoundError):
            origin._fs.cat_file(f"{root}/{path}", start=0, end=len(SECRET))


@LEADS_OUT
async def test_no_descriptor_is_left_open(root, origin) -> None:
    (root / "f").write_bytes(b"data")
    (root / "to-f").symlink_to("f")
    (root / "out").symlink_to("../outside/secret")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        meta = (await list_all(origin))["to-f"].meta
        await origin.read("to-f", meta, 0, 4)
        with pytest.raises(NotFoundError):
            await origin.stat("out/x")
    assert len(os.listdir("/proc/self/fd")) <= before + 5, "trio may keep some of its own"


async def test_fsspec_s_layers_over_local_files_are_refused(root) -> None:
    with pytest.raises(UsageError, match="would follow links"):
        open_origin(f"simplecache::file://{root}")


@pytest.mark.root
async def test_a_link_shows_nothing_that_its_owner_could_not_reach(root, origin) -> None:
    """The kernel checks only the target's own mode, and not the directories above it."""
    for name, uid, gid, mode in (
        ("private", 2001, 2001, 0o700),
        ("team", 2001, 3000, 0o750),
        ("public", 2001, 2001, 0o755),
        ("drop", 0, 3000, 0o3777),
    ):
        (root / name / "d").mkdir(parents=True)
        (root / name / "d/f").write_bytes(b"1")
        os.chown(root / name, uid, gid)
        (root / name).chmod(mode)
    links = {
        "to_private": ("private/d/f", 2002, 2002),
        "to_team": ("team/d", 2002, 2002),
        "to_public": ("public/d/f", 2002, 2002),
        "of_member": ("team/d/f", 2002, 3000),
        "of_owner": ("private/d/f", 2001, 2001),
        "of_root": ("private/d/f", 0, 0),
        "by_root": ("of_root", 2002, 2002),
        "drop/group_of_drop": ("../team/d/f", 2001, 3000),
        "private/inner": ("d/f", 2002, 2002),
    }
    for name, (target, uid, gid) in links.items():
        (root / name).symlink_to(target)
        os.chown(root / name, uid, gid, follow_symlinks=False)
    os.chown(root / "team", 2003, 3000)
    for path in ("team/d/f", "private/d/f"):
        os.chown(root / path, 2001, 2001)  # the rule of owners alone allows these
    found = sorted(name for name in await list_all(origin) if "_" in name)
    assert found == ["of_member", "of_owner", "of_root", "to_public"]
    assert sorted(await list_all(origin, "drop")) == ["d"]
    assert "inner" in await list_all(origin, "private")


async def test_a_directory_of_the_same_inode_number_has_another_place(root, origin) -> None:
    """File systems use the number of a removed directory again."""
    (root / "a").mkdir()
    before = (await origin.stat("a")).place
    number = (root / "a").stat().st_ino
    (root / "a").rmdir()
    for index in range(500):
        (root / f"b{index}").mkdir()
        if (root / f"b{index}").stat().st_ino == number:
            (root / f"b{index}").rename(root / "a")
            break
    else:
        pytest.skip("this file system does not use the number again")
    after = (await origin.stat("a")).place
    assert after != before
    assert (await list_all(origin))["a"].meta.place == after


@pytest.mark.expect_log(r"leads out of the source, to .*/model/blobs/1.*'file://.*/root/model'")
async def test_a_snapshot_of_links_says_what_to_mount(root) -> None:
    """As in the cache of the Hugging Face hub."""
    model = root / "model"
    for name in ("blobs", "snapshots/abc/sub"):
        (model / name).mkdir(parents=True)
    for number, name in enumerate(("config.json", "weights", "sub/tokens")):
        (model / f"blobs/{number}").write_text(name)
        link = model / "snapshots/abc" / name
        link.symlink_to(f"{'../' * (2 + name.count('/'))}blobs/{number}")
    (model / "snapshots/abc/config.json").unlink()
    origin = open_origin(f"file://{model}/snapshots/abc")
    with pytest.raises(NotFoundError):
        await origin.stat("weights")  # this tells of it, too
    assert list(await list_all(origin)) == ["sub"]
    assert await list_all(origin, "sub") == {}
    assert origin.counters.links_out_in_dir == {"": 1, "sub": 1}
    await origin.aclose()
    origin = open_origin(f"file://{model}")
    meta = await origin.stat("snapshots/abc/sub/tokens")
    assert bytes(await origin.read("snapshots/abc/sub/tokens", meta, 0, 3)) == b"sub"
    await origin.aclose()
