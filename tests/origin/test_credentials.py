"""Credentials that change while a mount lives: files of a Secret, and temporary ones that end."""

import os
import re
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trio

from cachefs.errors import UsageError
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3 import credential_files
from cachefs.origin.s3.credential_files import open_credentials_dir
from cachefs.types import ObjectMeta

META = ObjectMeta(4, 1_793_613_600_000_000_000, '"one"')


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    for name in [n for n in os.environ if n.startswith(("AWS_", "OSS_", "ALIBABA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def at_once(monkeypatch):
    """Files are looked at on every use."""
    monkeypatch.setattr(credential_files, "_LOOK_AGAIN_S", 0.0)


class Secret:
    """A Secret as the kubelet mounts it: links to `..data`, itself a link that is swapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._generation = 0
        path.mkdir()

    def set(self, **values: str) -> None:
        self._generation += 1
        fresh = self.path / f"..2026_{self._generation}"
        fresh.mkdir()
        for name, value in values.items():
            (fresh / name).write_text(value)
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        old = self.path / "..data"
        before = old.resolve() if old.is_symlink() else None
        (self.path / "..tmp").symlink_to(fresh.name)
        os.replace(self.path / "..tmp", old)
        if before is not None:
            shutil.rmtree(before)


@pytest.fixture
def secret(tmp_path):
    return Secret(tmp_path / "secret")


def three(path: Path) -> tuple[str, str, str | None]:
    keys = open_credentials_dir(path).find()
    return keys.access_key, keys.secret_key, keys.token


@pytest.mark.parametrize(
    "names",
    [
        ("access_key_id", "secret_access_key", "session_token"),
        ("access-key-id", "secret-access-key", "session-token"),
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        ("accessKey", "secretKey", "token"),
        ("accessKeyId", "accessKeySecret", "securityToken"),
        ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN"),
        ("aws.accessKeyId", "aws.secretKey", "aws.sessionToken"),
    ],
)
async def test_names_of_files(tmp_path, names) -> None:
    for name, value in zip(names, ["id\n", " key ", "tok\r\n"], strict=True):
        (tmp_path / name).write_text(value)
    (tmp_path / "ca.crt").write_text("something else")
    assert three(tmp_path) == ("id", "key", "tok")
    (tmp_path / names[2]).unlink()
    assert three(tmp_path) == ("id", "key", None)


async def test_a_secret_is_swapped(secret, at_once) -> None:
    secret.set(access_key_id="id1", secret_access_key="key1")
    source = open_credentials_dir(secret.path)
    assert source.find().access_key == "id1"
    secret.set(access_key_id="id2", secret_access_key="key2", session_token="tok")
    keys = source.find()
    assert (keys.access_key, keys.secret_key, keys.token) == ("id2", "key2", "tok")
    assert "key2" not in repr(keys)
    assert "tok" not in repr(keys)


async def test_plain_files_are_replaced(tmp_path, at_once) -> None:
    (tmp_path / "access_key_id").write_text("id1")
    (tmp_path / "secret_access_key").write_text("key1")
    source = open_credentials_dir(tmp_path)
    (tmp_path / "new").write_text("key2")
    os.replace(tmp_path / "new", tmp_path / "secret_access_key")
    assert source.find().secret_key == "key2"


@pytest.mark.expect_log("going on with the old credentials")
async def test_unusable_files_leave_the_old_keys_in_use(secret, at_once) -> None:
    secret.set(access_key_id="id1", secret_access_key="key1")
    source = open_credentials_dir(secret.path)
    secret.set(access_key_id="id2", secret_access_key="")
    assert source.find().access_key == "id1"
    shutil.rmtree(secret.path)
    assert source.find().access_key == "id1"
    secret.path.mkdir()
    secret.set(access_key_id="id3", secret_access_key="key3")
    assert source.find().access_key == "id3"


@pytest.mark.expect_log("going on with the old", required=False)
async def test_never_a_mix_of_two_generations(secret, at_once) -> None:
    secret.set(access_key_id="id0", secret_access_key="key0")
    source = open_credentials_dir(secret.path)
    ended = threading.Event()

    def rotate() -> None:
        for number in range(1, 200):
            secret.set(access_key_id=f"id{number}", secret_access_key=f"key{number}")
        ended.set()

    thread = threading.Thread(target=rotate)
    thread.start()
    while not ended.is_set():
        keys = source.find()
        assert keys.access_key[2:] == keys.secret_key[3:]
    thread.join()
    assert source.find().access_key == "id199"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "access_key_id is missing"),
        ({"access_key_id": "hunter2"}, "secret_access_key is missing"),
        ({"access_key_id": "a", "accessKey": "hunter2", "secret": "b"}, "two files for"),
        ({"access_key_id": "é-hunter2", "secret": "b"}, "no text"),
    ],
)
async def test_unusable_from_the_start(tmp_path, files, says) -> None:
    for name, value in files.items():
        (tmp_path / name).write_text(value)
    with pytest.raises(UsageError, match=says) as caught:
        open_origin("s3://b", OriginOptions(credentials_dir=tmp_path))
    assert "hunter2" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


async def test_what_a_directory_does_not_go_with(tmp_path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        open_origin("s3://b", OriginOptions(credentials_dir=tmp_path / "none"))
    for more in ({"anonymous": True}, {"profile": "x"}):
        with pytest.raises(UsageError, match=r"contradict|does not exist"):
            open_origin("s3://b", OriginOptions(credentials_dir=tmp_path, **more))
    for url in ("file:///tmp", "hdfs://h:1/", "fsspec+s3://b"):
        with pytest.raises(UsageError, match=r"--credentials-dir is for s3:// and oss://"):
            open_origin(url, OriginOptions(credentials_dir=tmp_path))


class Recorder(BaseHTTPRequestHandler):
    """Answers everything, and remembers who asked."""

    protocol_version = "HTTP/1.1"
    keys: list[str]

    def do_GET(self):
        signed = self.headers.get("authorization", "")
        self.keys.append(re.search(r"Credential=([^/]*)", signed)[1])
        body = b"<ListBucketResult></ListBucketResult>" if "?" in self.path else b"data"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Silence."""


@pytest.fixture
def recorder():
    handler = type("Handler", (Recorder,), {"keys": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    handler.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield handler
    server.shutdown()
    server.server_close()


async def ask_until(origin, recorder, key: str) -> None:
    """Both libraries must come to use `key`."""
    with trio.fail_after(300):
        while True:
            recorder.keys.clear()
            await origin.check()
            await origin.read("f", META, 0, 4)
            if set(recorder.keys) == {key}:
                return
            await trio.sleep(0.1)


async def test_requests_are_signed_with_new_files(secret, recorder) -> None:
    secret.set(access_key_id="OLD", secret_access_key="k")
    options = OriginOptions(endpoint=recorder.endpoint, credentials_dir=secret.path)
    origin = open_origin("s3://b", options)
    await ask_until(origin, recorder, "OLD")
    secret.set(access_key_id="NEW", secret_access_key="k")
    await ask_until(origin, recorder, "NEW")
    await origin.aclose()


PROCESS = """
import datetime, json, sys
counter = sys.argv[1]
with open(counter, "a") as stream:
    stream.write("x")
    number = stream.tell()
ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=3 if number == 1 else 3600)
print(json.dumps({"Version": 1, "AccessKeyId": f"KEY{min(number, 2)}", "SecretAccessKey": "k",
                  "SessionToken": "t", "Expiration": ends.isoformat()}))
"""


async def test_temporary_credentials_are_renewed(tmp_path, recorder) -> None:
    """The first ones end after 3 s."""
    script, counter = tmp_path / "give.py", tmp_path / "counter"
    script.write_text(PROCESS)
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        f"[profile temporary]\ncredential_process = {sys.executable} {script} {counter}\n"
    )
    options = OriginOptions(endpoint=recorder.endpoint, profile="temporary")
    origin = open_origin("s3://b", options)
    started = time.monotonic()
    await ask_until(origin, recorder, "KEY2")
    assert time.monotonic() - started < 50
    for _ in range(20):
        await origin.read("f", META, 0, 4)
    assert len(counter.read_text()) <= 4, "good ones are kept"
    await origin.aclose()
