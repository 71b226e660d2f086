"""Credentials that change while a mount lives: files of a Secret, and temporary ones that end."""

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cachefs.errors import AccessDeniedError, CredentialsError, OriginError, UsageError
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3 import credential_files, credentials
from cachefs.origin.s3.credential_files import open_credentials_dir
from cachefs.origin.s3.credentials import CredentialProvider, Credentials, CredentialSource
from cachefs.origin.writable import BufferContent
from cachefs.types import ObjectMeta
from tests.servers.store import Store
from tests.servers.store_signature import access_key_of
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

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


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as running:
        running.make_bucket("b")
        running.put("b", "f", b"data", e_tag='"one"')
        yield running


async def ask_until(origin, store, key: str) -> None:
    """Listings and reads must come to use `key`."""
    with trio.fail_after(300):
        while True:
            store.requests.clear()
            await origin.check()
            await origin.read("f", META, 0, 4)
            if {access_key_of(request.asked) for request in store.requests} == {key}:
                return
            await trio.sleep(0.1)


async def test_requests_are_signed_with_new_files(secret, store) -> None:
    store.keys |= {"OLD": ("k", ""), "NEW": ("k", "")}
    secret.set(access_key_id="OLD", secret_access_key="k")
    options = OriginOptions(endpoint=store.endpoint, credentials_dir=secret.path)
    origin = open_origin("s3://b", options)
    await ask_until(origin, store, "OLD")
    secret.set(access_key_id="NEW", secret_access_key="k")
    await ask_until(origin, store, "NEW")
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


async def test_temporary_credentials_are_renewed(tmp_path, store) -> None:
    """The first ones end after 3 s."""
    store.keys |= {"KEY1": ("k", "t"), "KEY2": ("k", "t")}
    script, counter = tmp_path / "give.py", tmp_path / "counter"
    script.write_text(PROCESS)
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        f"[profile temporary]\ncredential_process = {sys.executable} {script} {counter}\n"
    )
    options = OriginOptions(endpoint=store.endpoint, profile="temporary")
    origin = open_origin("s3://b", options)
    started = time.monotonic()
    await ask_until(origin, store, "KEY2")
    assert time.monotonic() - started < 50
    for _ in range(20):
        await origin.read("f", META, 0, 4)
    assert len(counter.read_text()) <= 4, "good ones are kept"
    await origin.aclose()


class KeyedStore:
    """An S3 server that accepts some access keys, and refuses others with `code`."""

    def __init__(self) -> None:
        self.valid = {"OLD"}
        self.code, self.status = "ExpiredToken", 400
        self.refused = 0

    def answer(self, asked: Asked) -> Answer:
        if re.search(r"Credential=([^/]*)", asked.headers["authorization"])[1] not in self.valid:
            self.refused += 1
            return Answer(f"<Error><Code>{self.code}</Code></Error>".encode(), self.status)
        if asked.is_list:
            return page(row("f"))
        headers = {"ETag": '"one"', "Last-Modified": DATE}
        return Answer(b"data" if asked.path == "/b/f" else b"x" * LARGE.size_bytes, headers=headers)


LARGE = ObjectMeta(3 << 20, 1_793_613_600_000_000_000, '"one"')
REFUSALS = [("ExpiredToken", 400), ("InvalidAccessKeyId", 403), ("SignatureDoesNotMatch", 403)]
WAYS = {
    "check": lambda origin: origin.check(),
    "look up": lambda origin: origin.stat_and_read("f"),
    "stat": lambda origin: origin.stat("f"),
    "small": lambda origin: origin.read("f", META, 0, 4),
    "large": lambda origin: origin.read("large", LARGE, 0, LARGE.size_bytes),
    "small write": lambda origin: origin.writer.put("f", BufferContent(b"x")),
    "large write": lambda origin: origin.writer.put("f", BufferContent(bytes(1 << 20))),
}


def write_file(access_key: str) -> None:
    file = Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])
    new = file.with_suffix(".new")
    new.write_text(
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\n"
        f"aws_session_token = hunter2-{access_key}\n"
    )
    new.replace(file)


@pytest.fixture
def keyed():
    return KeyedStore()


@pytest.fixture
async def refusing(keyed):
    """An origin whose credentials are in a shared file, and have worked once."""
    write_file("OLD")
    with ToldS3(keyed.answer) as server:
        origin = open_origin("s3://b", OriginOptions(endpoint=server.endpoint))
        await origin.check()
        yield origin
        await origin.aclose()
        # A thread would look when the variables are no longer set.
        until(lambda: not origin._provider._is_looking)


@pytest.mark.parametrize(("code", "status"), REFUSALS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_refused_request_uses_the_new_file_at_once(
    refusing, keyed, way, code, status
) -> None:
    keyed.code, keyed.status, keyed.valid = code, status, {"NEW"}
    write_file("NEW")
    if way == "stat" and status == 403:  # the answer to a HEAD says no reason
        await refusing.check()
    await WAYS[way](refusing)
    assert keyed.refused <= 2


async def test_a_changed_file_is_used_before_anything_is_refused(
    refusing, keyed, monkeypatch
) -> None:
    monkeypatch.setattr(credentials, "_LOOK_AGAIN_S", 0.0)
    keyed.valid = {"OLD", "NEW"}
    write_file("NEW")
    until(lambda: refusing._provider.current().access_key == "NEW")
    keyed.valid = {"NEW"}
    await refusing.check()
    assert not keyed.refused


@pytest.mark.parametrize(("code", "status"), REFUSALS)
@pytest.mark.parametrize("way", WAYS)
async def test_credentials_that_ended_are_no_denial(refusing, keyed, way, code, status) -> None:
    keyed.code, keyed.status, keyed.valid = code, status, set()
    with pytest.raises(CredentialsError):
        await refusing.check()
    with pytest.raises(CredentialsError) as caught:
        await WAYS[way](refusing)
    assert "hunter2" not in str(caught.value)
    keyed.valid = {"OLD"}
    await WAYS[way](refusing)


@pytest.mark.expect_log("going on with the")
async def test_a_file_that_is_gone_leaves_the_old_keys_in_use(refusing, monkeypatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).unlink()
    refusing._provider.has_newer(refusing._provider.current(), "ExpiredToken")
    await refusing.check()


@pytest.mark.parametrize(("code", "status"), REFUSALS[1:])
async def test_wrong_keys_are_a_denial_from_the_start(keyed, code, status) -> None:
    keyed.code, keyed.status, keyed.valid = code, status, set()
    write_file("OLD")
    with ToldS3(keyed.answer) as server:
        origin = open_origin("s3://b", OriginOptions(endpoint=server.endpoint))
        with pytest.raises(AccessDeniedError, match="check the credentials"):
            await origin.check()
        await origin.aclose()


async def test_a_denial_is_asked_once(refusing, keyed) -> None:
    keyed.code, keyed.status, keyed.valid = "AccessDenied", 403, set()
    for ask in WAYS.values():
        with pytest.raises(AccessDeniedError):
            await ask(refusing)
    assert keyed.refused <= len(WAYS) + 4, "a look-up adds a HEAD, and a denied HEAD a LIST"


class Agent(CredentialSource):
    """Gives KEY1, KEY2, ..., each for `session_s`."""

    advice = "ask the agent"

    def __init__(self, session_s: float) -> None:
        self.session_s = session_s
        self.problem: Exception | None = None
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def find(self) -> Credentials:
        self.asked += 1
        number = self.asked
        assert self.answers.wait(300)
        if self.problem is not None:
            raise self.problem
        return Credentials(f"KEY{number}", "s", "t", time.time() + self.session_s)


@pytest.fixture
def at_every_use(monkeypatch):
    monkeypatch.setattr(credentials, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(credentials, "_MOST_BACK_OFF_S", 0.01)


def until(condition) -> None:
    with_end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < with_end
        time.sleep(0.005)


async def test_a_short_session_is_not_renewed_for_each_request(at_every_use) -> None:
    agent = Agent(540.0)
    provider = CredentialProvider(agent)
    for _ in range(50):
        assert provider.current().access_key == "KEY1"
    assert agent.asked == 1


@pytest.mark.expect_log("going on with the old credentials")
@pytest.mark.parametrize("problem", [CredentialsError("the agent is away"), OSError("hunter2")])
async def test_valid_credentials_are_used_while_the_agent_is_away(
    at_every_use, monkeypatch, problem, caplog
) -> None:
    agent = Agent(540.0)
    provider = CredentialProvider(agent)
    provider.current()
    monkeypatch.setattr(credentials.time, "time", lambda now=time.time: now() + 500)
    agent.problem = problem
    until(lambda: provider.current().access_key == "KEY1" and agent.asked > 3)
    assert caplog.text.count("going on") == 1
    assert "hunter2" not in caplog.text
    agent.problem = None
    until(lambda: provider.current().access_key != "KEY1")


async def test_nobody_waits_for_an_agent_that_hangs_while_the_keys_are_valid(
    at_every_use, monkeypatch
) -> None:
    agent = Agent(540.0)
    provider = CredentialProvider(agent)
    provider.current()
    monkeypatch.setattr(credentials.time, "time", lambda now=time.time: now() + 500)
    agent.answers.clear()
    until(lambda: provider.current().access_key == "KEY1" and agent.asked == 2)
    for _ in range(50):
        assert provider.current().access_key == "KEY1"
    assert agent.asked == 2, "one thread asks"
    agent.answers.set()
    until(lambda: provider.current().access_key == "KEY2")


async def test_keys_that_have_ended_are_not_used(at_every_use, monkeypatch) -> None:
    agent = Agent(540.0)
    provider = CredentialProvider(agent)
    provider.current()
    monkeypatch.setattr(credentials.time, "time", lambda now=time.time: now() + 600)
    agent.problem = CredentialsError("the agent is away")
    with pytest.raises(CredentialsError, match="the agent is away"):
        provider.current()
    assert provider.at_hand() is None
    agent.problem = None
    until(lambda: _found(provider) is not None)


def _found(provider):
    try:
        return provider.current()
    except OriginError:
        return None


async def test_the_agent_is_asked_with_pauses(monkeypatch) -> None:
    agent = Agent(540.0)
    agent.problem = CredentialsError("the agent is away")
    provider = CredentialProvider(agent)
    for _ in range(50):
        with pytest.raises(CredentialsError):
            provider.current()
    assert agent.asked == 1
    for _ in range(50):
        assert not provider.has_newer(
            credentials.ReadOnlyCredentials("a", "b", None), "ExpiredToken"
        )
    assert agent.asked == 2


@pytest.mark.expect_log("AWS credentials can't be loaded")
async def test_a_container_agent(monkeypatch, keyed, caplog) -> None:
    """botocore asks it, once for a session of 9 minutes; its texts are not in the log."""
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 540))
    keys = f'{{"AccessKeyId": "OLD", "SecretAccessKey": "s", "Token": "t", "Expiration": "{ends}"}}'
    answers = [Answer(keys.encode()), Answer(b"hunter2", 403)]
    with ToldS3(keyed.answer) as server, ToldS3(lambda _: answers[0]) as agent:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{agent.endpoint}/get")
        origin = open_origin("s3://b", OriginOptions(endpoint=server.endpoint))
        for ask in WAYS.values():
            await ask(origin)
        assert len(agent.asked) == 1
        answers.pop(0)
        keyed.valid = set()
        with pytest.raises(CredentialsError):
            await origin.check()
        keyed.valid = {"OLD"}
        await origin.check()
        await origin.aclose()
    assert "hunter2" not in caplog.text
    assert "Traceback" not in caplog.text
    assert caplog.text.count("can't be loaded") == 1
