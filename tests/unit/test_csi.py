"""The CSI plugin without mounts: names, paths, limits, and the generated messages."""

import errno
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs.cli import main
from cachefs.cli.csi import parse_endpoint
from cachefs.csi.limited_calls import CallHangsError, LimitedCalls
from cachefs.csi.refusal import Refusal
from cachefs.csi.requests import access_of
from cachefs.csi.spec import csi_pb2 as csi
from cachefs.csi.syscalls import open_beneath
from cachefs.csi.volumes import Volume, handle_of, parse_target, parse_volume
from cachefs.errors import UsageError

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
Mode = csi.VolumeCapability.AccessMode


@pytest.mark.parametrize(
    ("handle", "attributes", "volume"),
    [
        ("data", {}, Volume("data", "")),
        ("data/train", {}, Volume("data", "train")),
        ("data/train/a b", {}, Volume("data", "train/a b")),
        ("data//pvc-1", {}, Volume("data", "")),
        ("data/train//any/../thing//", {}, Volume("data", "train")),
        ("csi-0", {"mount": "data"}, Volume("data", "")),
        ("..", {"mount": "data", "directory": "ä/b"}, Volume("data", "ä/b")),
        ("data", {"csi.storage.k8s.io/pod.name": "x"}, Volume("data", "")),
        ("data", {"storage.kubernetes.io/csiProvisionerIdentity": "x"}, Volume("data", "")),
    ],
)
def test_what_names_a_volume(handle: str, attributes: dict[str, str], volume: Volume) -> None:
    assert parse_volume(handle, attributes) == volume


@pytest.mark.parametrize(
    ("handle", "attributes"),
    [
        ("", {}),
        ("/", {}),
        ("/data", {}),
        ("data/", {}),
        ("//data", {}),
        (".", {}),
        ("data/..", {}),
        ("data/a/../b", {}),
        ("data/./b", {}),
        ("data/a/", {}),
        ("d\0ta", {}),
        ("d\nta", {}),
        ("x" * 256, {}),
        ("data/" + "x/" * 2100 + "x", {}),
        ("data", {"mount": ""}),
        ("data", {"mount": "a/b"}),
        ("data", {"mount": "data", "directory": "/etc"}),
        ("data", {"mount": "data", "directory": "a//b"}),
        ("data", {"directory": "train"}),
        ("data", {"mount": "data", "Directory": "train"}),
    ],
)
def test_what_names_none(handle: str, attributes: dict[str, str]) -> None:
    with pytest.raises(Refusal) as caught:
        parse_volume(handle, attributes)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert len(str(caught.value)) < 500


def test_handles_of_claims_differ_and_stay_short() -> None:
    volume = Volume("data", "train")
    assert handle_of(volume, "pvc-1") == "data/train//pvc-1"
    names = ["pvc-1", "x" * 128, "x" * 127 + "y", "//..//"]
    handles = {handle_of(volume, name) for name in names}
    assert len(handles) == len(names)
    for handle in handles:
        assert parse_volume(handle, {}) == volume
        assert len(handle.encode()) <= 128


def test_targets_are_canonical_and_apart_from_mounts(tmp_path: Path) -> None:
    mounts, pods = tmp_path / "mounts", tmp_path / "pods"
    for directory in (mounts, pods):
        directory.mkdir()
    (tmp_path / "link").symlink_to(pods)
    assert parse_target(f"{tmp_path}/link/new", mounts) == pods / "new"
    assert parse_target(f"{pods}/new/", mounts) == pods / "new"
    for text in ("", "new", "/", f"{pods}/./new", f"{pods}/../pods/new", f"{mounts}/x", "/a\0b"):
        with pytest.raises(Refusal) as caught:
            parse_target(text, mounts)
        assert caught.value.code == "INVALID_ARGUMENT"


def test_no_link_leads_out_of_a_directory(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "train").mkdir(parents=True)
    (inside / "file").write_text("")
    (inside / "near").symlink_to("train")
    (inside / "up").symlink_to("../outside")
    (inside / "absolute").symlink_to(tmp_path)
    (inside / "loop").symlink_to("loop")
    (tmp_path / "outside").mkdir()
    directory = os.open(inside, os.O_PATH)
    try:
        for name in ("train", "near", "."):
            os.close(open_beneath(directory, name))
        for name, number in {
            "up": errno.EXDEV,
            "absolute": errno.EXDEV,
            "..": errno.EXDEV,
            str(inside): errno.EXDEV,
            "loop": errno.ELOOP,
            "file": errno.ENOTDIR,
            "absent": errno.ENOENT,
        }.items():
            with pytest.raises(OSError) as caught:
                open_beneath(directory, name)
            assert caught.value.errno == number, name
    finally:
        os.close(directory)


def capability(mode: int = Mode.SINGLE_NODE_WRITER, *flags: str) -> csi.VolumeCapability:
    return csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(mount_flags=flags), access_mode=Mode(mode=mode)
    )


def test_access_is_what_capability_flags_and_request_allow() -> None:
    assert access_of(capability()) == (False, False)
    assert access_of(capability(), read_only=True) == (True, False)
    assert access_of(capability(Mode.MULTI_NODE_READER_ONLY)) == (True, False)
    assert access_of(capability(Mode.MULTI_NODE_MULTI_WRITER, "ro", "noexec")) == (True, True)
    for wrong in (capability(Mode.UNKNOWN), capability(Mode.SINGLE_NODE_WRITER, "suid")):
        with pytest.raises(Refusal):
            access_of(wrong)


def test_a_call_that_hangs_ends_for_its_caller() -> None:
    calls = LimitedCalls(0.2)
    go, late = threading.Event(), threading.Event()
    disposed = []

    def hang() -> str:
        go.wait(LONG_S)
        return "late"

    def dispose(result: str) -> None:
        disposed.append(result)
        late.set()

    with pytest.raises(CallHangsError, match=r"within 0\.2 s"):
        calls.run("a", hang, dispose)
    with pytest.raises(CallHangsError):
        calls.run("a", lambda: "never", dispose)
    assert LimitedCalls(LONG_S).run("a", lambda: 1, print) == 1
    go.set()
    assert late.wait(LONG_S)
    assert disposed == ["late"]


def test_calls_with_one_key_wait_for_each_other() -> None:
    calls = LimitedCalls(LONG_S)
    began, go = threading.Event(), threading.Event()
    order = []

    def first() -> None:
        began.set()
        go.wait(LONG_S)
        order.append("first")

    thread = threading.Thread(target=calls.run, args=("a", first, print))
    thread.start()
    assert began.wait(LONG_S)
    assert calls.run("b", lambda: "other key", print) == "other key"
    second = threading.Thread(target=calls.run, args=("a", lambda: order.append("second"), print))
    second.start()
    go.set()
    for each in (thread, second):
        each.join(LONG_S)
    assert order == ["first", "second"]


def test_an_error_of_a_call_is_raised_and_frees_its_key() -> None:
    calls = LimitedCalls(LONG_S)

    def fail() -> None:
        raise OSError(errno.ETIMEDOUT, "an answer, and no limit of ours")

    for _ in range(2):
        with pytest.raises(TimeoutError):
            calls.run("a", fail, print)


@pytest.mark.parametrize("text", ["unix:///csi/csi.sock", "unix:/csi/csi.sock", "/csi/csi.sock"])
def test_endpoints(text: str) -> None:
    assert parse_endpoint(text) == Path("/csi/csi.sock")


@pytest.mark.parametrize(
    "text", ["", "csi.sock", "tcp://127.0.0.1:1", "unix://csi.sock", "unix:///", "/" + "x" * 107]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoint(text)


def csi_command(*args: str) -> str:
    result = CliRunner().invoke(main, ["csi", "--endpoint", "/tmp/x.sock", "--node-id", "n", *args])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.root
def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--timeout must be" in csi_command("--timeout", "5m")
    assert "no directory" in csi_command("--mounts", str(tmp_path / "absent"))
    assert "--node-id has" in csi_command("--node-id", "")
    monkeypatch.delitem(sys.modules, "cachefs.csi.server", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert "pip install 'cachefs[csi]'" in csi_command("--mounts", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "must run as root" in csi_command("--mounts", str(tmp_path))


def test_packages_need_the_protobuf_that_the_messages_need() -> None:
    generated = (ROOT / "src/cachefs/csi/spec/csi_pb2.py").read_text()
    (version,) = re.findall(r"^# Protobuf Python Version: (.*)$", generated, re.MULTILINE)
    assert f'"protobuf>={version}"' in (ROOT / "pyproject.toml").read_text()
