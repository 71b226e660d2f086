"""`--shared` and what belongs to it: what is accepted, and what a user is told otherwise."""

from pathlib import Path

import pytest

from cachefs.config import load_mount_config
from cachefs.config.shared_option import MOST_MEMBERS, parse_members, split_dns
from cachefs.daemon.settings import shared_secret
from cachefs.errors import UsageError


def option(value: object) -> str:
    return load_mount_config("s3://b", "/mnt", {"shared": value}).shared


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("off", "off"),
        ("cache1:11211", "cache1:11211"),
        (" a:1, b:2 ,a:1", "a:1,b:2"),
        ("[::1]:11211", "[::1]:11211"),
        (["a:1", "b:2"], "a:1,b:2"),
        ("dns:memcached.ns.svc:11211", "dns:memcached.ns.svc:11211"),
        ("/etc/members", "/etc/members"),
        ("/etc/../etc/members", "/etc/members"),
    ],
)
def test_forms(given: object, found: str) -> None:
    assert option(given) == found
    assert option(found) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "names no members"),
        ("cache1", '"cache1" in the list is no member; write HOST:PORT'),
        ("cache1:0", "has no port"),
        ("cache1:x", "no member"),
        ("cache1:99999", "no member"),
        ("::1:11211", "no member"),
        ("dns:name", "no DNS name and port"),
        ("dns:name:", "no DNS name and port"),
        ("a:1\n b:2", "names no members"),
        (7, "names no members"),
        (True, "names no members"),
        ([1], "names no members"),
    ],
)
def test_nonsense(given: object, said: str) -> None:
    with pytest.raises(UsageError, match="--shared: ") as caught:
        option(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_members() -> None:
    text = "# all\na:1\n\nb:2 # the second\n  [::1]:3\na:1\n"
    assert parse_members(text, "/etc/members") == [("a", 1), ("b", 2), ("::1", 3)]
    assert parse_members("", "/etc/members") == []
    with pytest.raises(ValueError, match='"nonsense" in /etc/members is no member'):
        parse_members("a:1\nnonsense\n", "/etc/members")
    with pytest.raises(ValueError, match="more than 4096 members"):
        parse_members("\n".join(f"h{n}:1" for n in range(MOST_MEMBERS + 1)), "/etc/members")


def test_dns_names() -> None:
    assert split_dns("dns:a.b:7") == ("a.b", 7)
    assert split_dns("a.b:7") is None


def secret(path: Path) -> bytes:
    return shared_secret(load_mount_config("s3://b", "/mnt", {"shared_secret_file": str(path)}))


def test_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"  0123 abc\n")
    assert secret(file) == b"0123 abc"
    assert shared_secret(load_mount_config("s3://b", "/mnt", {})) == b""
    for wrong in (b"", b" \n", b"x" * 5000):
        file.write_bytes(wrong)
        with pytest.raises(UsageError, match="must have 1 to 4096 bytes"):
            secret(file)


def test_a_secret_in_the_place_of_its_file_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        secret(tmp_path / "hunter2")
    assert str(caught.value) == "the --shared-secret-file can't be read: No such file or directory"


@pytest.mark.parametrize("given", ["0", "0.1ms", "2d", "-1s"])
def test_wrong_timeouts(given: str) -> None:
    with pytest.raises(UsageError, match="--shared-timeout: "):
        load_mount_config("s3://b", "/mnt", {"shared_timeout": given})
