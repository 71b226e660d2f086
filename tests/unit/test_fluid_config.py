"""From what Fluid writes to mounts: cli/thin_runtime, on outputs of Fluid's own code."""

import json
from pathlib import Path
from typing import Any

import pytest

from cachefs.cli import main
from cachefs.cli.thin_runtime.config_json import MOST_BYTES, parse_config
from cachefs.cli.thin_runtime.options import merge_options, parse_words
from cachefs.cli.thin_runtime.wanted import Wanted, wanted_mounts
from cachefs.errors import UsageError
from tests.unit.texts import ROOT

DATA = ROOT / "tests/data/fluid"
SECRETS = Path("/etc/fluid/secrets")
PRIVATE = Path("/dev/shm/private")


def shape(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def wanted_of(name: str) -> Wanted:
    fluids = shape(name)
    return wanted_mounts(fluids["config"].encode(), fluids["env"], SECRETS, PRIVATE)


def wanted(config: dict[str, Any], **environment: str) -> Wanted:
    return wanted_mounts(json.dumps(config).encode(), environment, SECRETS, PRIVATE)


def config(*mounts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"mounts": list(mounts), "targetPath": "/runtime-mnt/thin/lab/a/thin-fuse", **more}


def refused(config: dict[str, Any], **environment: str) -> str:
    with pytest.raises(UsageError) as caught:
        wanted(config, **environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_mount_is_the_target_path() -> None:
    target, mounts = wanted_of("one-mount")
    assert list(mounts) == [target] == [Path("/runtime-mnt/thin/default/imagenet/thin-fuse")]
    mount = mounts[target]
    assert mount.source == "s3://public-imagenet/2012"
    assert set(mount.arguments) == {
        "--anonymous",
        "--cache-dir=/var/cache/cachefs/imagenet",
        "--cache-size=400GiB",
        "--free-space-ratio=0.15",
        "--read-only",
        "--region=eu-central-1",
    }
    assert mount.secrets == {}


def test_several_mounts_are_below_it_with_a_cache_of_their_own() -> None:
    target, mounts = wanted_of("several-mounts")
    assert list(mounts) == [target / "train", target / "labels"]
    caches = [a for m in mounts.values() for a in m.arguments if a.startswith("--cache-dir")]
    assert caches == [f"--cache-dir=/var/cache/cachefs-driving/{n}" for n in ("train", "labels")]
    assert len({mount.secrets_dir for mount in mounts.values()}) == 2


def test_secrets_are_links_to_files() -> None:
    _, mounts = wanted_of("secret")
    (mount,) = mounts.values()
    files = {name: (file.text, file.is_link) for name, file in mount.secrets.items()}
    below = "/etc/fluid/secrets/reviews-s3"
    assert files == {
        "access_key_id": (f"{below}/access-key-id", True),
        "secret_access_key": (f"{below}/secret-access-key", True),
    }
    assert f"--credentials-dir={mount.secrets_dir}" in mount.arguments
    assert not [argument for argument in mount.arguments if below in argument]


def test_inline_secrets_are_on_no_command_line() -> None:
    _, mounts = wanted_of("inline")
    (mount,) = mounts.values()
    assert mount.secrets["secret_access_key"] == ("EXAMPLE-SECRET", False)
    assert "EXAMPLE" not in " ".join(mount.arguments)
    assert "EXAMPLE-SECRET" not in repr(mount)


def test_options_come_from_all_places() -> None:
    _, mounts = wanted_of("options")
    (mount,) = mounts.values()
    assert set(mount.arguments) == {
        "--attr-ttl=1m",
        "--cache-size=40GiB",
        "--endpoint=http://minio.example:9000",
        "--free-space-ratio=0.15",
        "--hedge",
        "--limit-uid=1000=50MiB",
        "--limit-uid=1001=60MiB",
        "--read-only",
        "--region=eu-west-1",
        "--shared=10.0.0.1:11211,10.0.0.2:11211",
        "--verify=full",
    }


def test_access_modes_and_read_only() -> None:
    target, mounts = wanted_of("writable")
    assert "--rw" in mounts[target / "checkpoints"].arguments
    assert "--read-only" in mounts[target / "data"].arguments
    for modes, argument in (
        (None, "--read-only"),
        (["ReadWriteOnce"], "--rw"),
        (["ReadWriteMany", "ReadOnlyMany"], "--read-only"),
    ):
        _, mounts = wanted(config({"mountPoint": "s3://bucket"}, accessModes=modes))
        assert next(iter(mounts.values())).arguments == (argument,)


def test_without_names_and_without_mounts() -> None:
    target, mounts = wanted_of("plain")
    assert list(mounts) == [target]
    assert wanted_of("empty").mounts == {}


def test_a_change_leaves_what_is_equal_alone() -> None:
    before, after = wanted_of("several-mounts"), wanted_of("changed")
    train = before.target / "train"
    assert set(after.mounts) == {train, after.target / "static/maps"}
    env = shape("several-mounts")["env"]
    same = wanted_mounts(shape("changed")["config"].encode(), env, SECRETS, PRIVATE)
    assert same.mounts[train].is_served_by(before.mounts[train])
    assert not after.mounts[train].is_served_by(before.mounts[train])  # no CACHEFS_CACHE_DIR


def test_other_credentials_need_no_new_mount() -> None:
    def keys(secret: str, **more: str) -> Any:
        options = {"access_key_id": "a", "secret_access_key": secret, **more}
        mounts = wanted(config({"mountPoint": "s3://bucket", "options": options})).mounts
        return next(iter(mounts.values()))

    assert keys("b").is_served_by(keys("c"))
    assert not keys("b", session_token="d").is_served_by(keys("b"))
    one, other = (keys("b", shared_secret_file=text) for text in ("e", "f"))
    assert not one.is_served_by(other)
    assert f"--shared-secret-file={one.secrets_dir}/..data/shared_secret_file" in one.arguments


def test_volumes_are_refused() -> None:
    with pytest.raises(UsageError, match="'other': cachefs reads object stores"):
        wanted_of("claim")


@pytest.mark.parametrize(
    "path", ["..", "/../../etc", "a/../../b", "./a", "a/./b", "a\nb", "a\0b", "x" * 256, "a/" * 9]
)
def test_a_path_stays_below_the_target(path: str) -> None:
    assert "path" in refused(config({"mountPoint": "s3://bucket", "path": path}))
    assert "targetPath" in refused({"mounts": [], "targetPath": f"/{path}{'/a' * 1500}/../b"})


@pytest.mark.parametrize("name", ["..", "a/b", ".", "a\x1bb", "\ud800", "x" * 256])
def test_a_name_is_one_directory(name: str) -> None:
    assert "name" in refused(config({"mountPoint": "s3://b", "name": name}))


def test_places_differ_and_do_not_contain_each_other() -> None:
    one, other = {"mountPoint": "s3://a", "name": "a"}, {"mountPoint": "s3://b", "name": "b"}
    assert "has the same place" in refused(config(one, other | {"path": "/a/"}))
    assert "'b' lies in mount 'a'" in refused(config(one, other | {"path": "a/b"}))
    assert "lies in" in refused(config(one | {"path": "/"}, other))
    assert "neither name nor path" in refused(config(one, {"mountPoint": "s3://b"}))
    target, mounts = wanted(config(one | {"path": "/x/y"}))
    assert list(mounts) == [target / "x/y"]


def test_cache_directories_differ() -> None:
    rows = [{"mountPoint": "s3://a", "path": path} for path in ("/a/b", "/a-b", "/a b", "/.x")]
    _, mounts = wanted(config(*rows), CACHEFS_CACHE_DIR="/one:/two/")
    caches = {a for m in mounts.values() for a in m.arguments if a.startswith("--cache-dir")}
    assert len(caches) == 4
    assert "--cache-dir=/one/a-b:/two/a-b" in caches
    assert "absolute" in refused(config(*rows), CACHEFS_CACHE_DIR="relative")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_sise": "1GiB"}, "unknown option 'cache_sise'; did you mean \"cache_size\"?"),
        ({"fs.s3a.fast.upload": "true"}, "unknown option 'fs.s3a.fast.upload'"),
        ({"endpoint": "http://a", "fs.s3a.endpoint": "http://b"}, "mean the same"),
        ({"cache-size": "1GiB", "cache_size": "2GiB"}, "mean the same"),
        ({"rw": "true"}, "accessModes"),
        ({"read-only": "false"}, "accessModes"),
        ({"foreground": "true"}, "is no option here"),
        ({"hedge": "yes"}, 'is a switch; write "true" or "false"'),
        ({"region": ""}, "needs a value: NAME"),
        ({"cache_size": "much"}, '--cache-size: "much"'),
        ({"cache_size": 5}, "must be a text"),
        ({"secret_access_key": "hunter2"}, "secret_access_key alone"),
        ({"access_key_id": "", "secret_access_key": "hunter2"}, "access_key_id is empty"),
        ({"access_key_id": "/etc/fluid/secrets/../../shadow"}, "must be a file"),
        ({"access_key_id": "/etc/fluid/secrets/a"}, "must be a file"),
        ({"secret-acess-key": "hunter2"}, "unknown option 'secret-acess-key'"),
    ],
)
def test_options_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    text = refused(config({"mountPoint": "s3://bucket", "name": "it", "options": options}))
    assert said in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "no valid JSON"),
        (b"\xff\xfe\xfd", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b"[]", "must be a JSON object"),
        (b" " * (MOST_BYTES + 1), "more than 1 MiB"),
        (b'{"mounts": {}}', "mounts must be a list"),
        (b'{"mounts": [3]}', "mount 1 must be a JSON object"),
        (b'{"mounts": [{"mountPoint": 3}]}', "mountPoint must be a text"),
        (b'{"mounts": [{"mountPoint": "s3://b", "readOnly": 1}]}', "readOnly must be"),
        (b'{"mounts": [{"mountPoint": "s3://b", "options": []}]}', "options must be an object"),
        (b'{"mounts": []}', "targetPath must be a text"),
        (b'{"targetPath": "/"}', "targetPath must be an absolute path"),
        (b'{"targetPath": "/a", "accessModes": "ReadOnlyMany"}', "accessModes must be a list"),
        (b'{"targetPath": "/a", "runtimeOptions": {"a": null}}', "must be a text"),
    ],
)
def test_wrong_files_are_refused(content: bytes, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(content)
    assert said in str(caught.value)


def test_sources_are_checked_and_their_secrets_not_shown() -> None:
    assert "no URL" in refused(config({"mountPoint": "--help-me"}))
    text = refused(config({"mountPoint": "s3://id:hunter2@bucket", "name": "it"}))
    assert "mount 'it'" in text
    assert "hunter2" not in text


def test_words_of_mount_options() -> None:
    assert parse_words("") == {}
    assert parse_words("ro,hedge,cache_size=1GiB") == {
        "ro": "true",
        "hedge": "true",
        "cache_size": "1GiB",
    }
    assert parse_words("shared=a:1,b:2,hedge=false")["shared"] == "a:1,b:2"
    assert parse_words("limit_uid=1=1MiB,2=2MiB") == {"limit_uid": "1=1MiB,2=2MiB"}
    with pytest.raises(UsageError):
        parse_words("=x")
    for value in ("region=\udcc6", "region=a\n", "a\0"):
        assert "MOUNT_OPTIONS has a control" in refused(config(), MOUNT_OPTIONS=value)
    with pytest.raises(UsageError, match="MOUNT_OPTIONS: unknown option 'b'"):
        merge_options({"MOUNT_OPTIONS": parse_words("shared=a,b")})


def test_the_arguments_are_ones_that_mount_understands() -> None:
    command = main.get_command(None, "mount")  # type: ignore[arg-type]
    assert command is not None
    for name in ("one-mount", "several-mounts", "secret", "options", "writable", "inline"):
        for mount in wanted_of(name).mounts.values():
            words = [*mount.arguments, "--", mount.source, str(mount.place)]
            assert command.make_context("mount", words).params["source"] == mount.source
