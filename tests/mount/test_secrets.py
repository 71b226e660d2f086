"""Nothing that a mount shows or writes has anything of its credentials in it."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.mounts.runtime import runtime_dir
from tests.mount.harness import CLI, Site
from tests.servers.moto_s3 import MotoS3
from tests.servers.oss import SeaweedOss

ACCESS_KEY = "AKIDRECOGNISABLE"
SECRET_KEY = "hunter2Secret/Key+0"
TOKEN = "hunter2Token//ZXhhbXBsZQ=="
HIDDEN = re.compile(rb"hunter2|AKIDRECOGNISABLE|AKIDSEAWEED|seaweed-Secret", re.IGNORECASE)
DENIED = ("denied", "AccessDenied", "Permission")


def secrets(token: bool = True) -> dict[str, str]:
    given = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    return given | ({"AWS_SESSION_TOKEN": TOKEN} if token else {})


@pytest.fixture(scope="module")
def bucket(moto_s3: MotoS3) -> str:
    moto_s3.make_bucket("hidden")
    moto_s3.put("hidden", "dir/file", b"content")
    return "hidden"


@pytest.fixture(scope="module")
def oss(seaweedfs: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedOss]:
    with SeaweedOss(tmp_path_factory.mktemp("oss")) as server:
        server.make_bucket("hidden")
        server.put("hidden", "dir/file", b"content")
        yield server


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.tear_down()
    assert not HIDDEN.search(site.log.read_bytes() if site.log.exists() else b"")


def shown_while_mounted(site: Site) -> dict[str, bytes]:
    """All that others can see, by where it was seen."""
    root = site.mountpoint
    of_mount = [Path(f"/proc/{pid}") for pid in (site.pid(), site.daemon_pid())]
    seen = {
        "mounts": Path("/proc/mounts").read_bytes(),
        "mountinfo": Path("/proc/self/mountinfo").read_bytes(),
        "cmdline": b"".join((process / "cmdline").read_bytes() for process in of_mount),
        "title": b"".join((process / "comm").read_bytes() for process in of_mount),
        "status": site.cli("status").stdout.encode(),
        "status of one": site.cli("status", root).stdout.encode(),
        "status --json": site.cli("status", root, "--json").stdout.encode(),
        "tiers": site.cli("tier", "list", root, code=0).stdout.encode(),
    }
    for path in (root, root / "dir", root / "dir/file"):
        with contextlib.suppress(FileNotFoundError):
            for name in os.listxattr(path):
                seen[f"{name} of {path}"] = os.getxattr(path, name)
    kept = [*site.cache.rglob("*"), *runtime_dir().iterdir()]
    for path in kept:
        with contextlib.suppress(FileNotFoundError):  # of a mount that has ended meanwhile
            if path.is_file():
                seen[str(path)] = path.read_bytes()
    return seen


def refused(site: Site, *options: object, code: int = 1) -> str:
    """Mounting fails, also with tracebacks, and tells nothing; returns the line without them."""
    said = site.refused(*options, code=code)
    mount = [*CLI, "mount", site.source, str(site.mountpoint), "--cache-dir", str(site.cache)]
    debugged = subprocess.run(
        [*mount, "--log-file", str(site.log), "--debug", *map(str, options)],
        capture_output=True,
        check=False,
        timeout=300,
        env=os.environ | site.environment,
    )
    site.expected_trouble += ("Traceback",)
    assert debugged.returncode != 0
    assert b"Traceback" in debugged.stderr
    assert not HIDDEN.search(said.encode() + debugged.stdout + debugged.stderr)
    return said


def assert_hidden(seen: dict[str, bytes]) -> None:
    assert len(seen) > 8
    assert [place for place, text in seen.items() if HIDDEN.search(text)] == []


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_mount_that_works(site: Site, moto_s3: MotoS3, bucket: str, scheme: str) -> None:
    site.source = f"{scheme}://{bucket}"
    site.environment = moto_s3.environment | secrets()
    said = site.mount("--debug")
    assert (site.mountpoint / "dir/file").read_bytes() == b"content"
    assert_hidden(shown_while_mounted(site) | {"said": said.encode()})


def test_a_mount_of_oss(site: Site, oss: SeaweedOss) -> None:
    site.source = "oss://hidden"
    site.environment = oss.oss_environment
    said = site.mount("--debug")
    assert (site.mountpoint / "dir/file").read_bytes() == b"content"
    assert_hidden(shown_while_mounted(site) | {"said": said.encode()})


@pytest.mark.parametrize("source", ["s3://hidden", "fsspec+s3://hidden", "oss://hidden"])
def test_wrong_credentials(site: Site, oss: SeaweedOss, source: str) -> None:
    site.source = source
    site.environment = oss.environment | oss.oss_environment | secrets(token=False)
    site.environment |= {"OSS_ACCESS_KEY_ID": ACCESS_KEY, "OSS_ACCESS_KEY_SECRET": SECRET_KEY}
    said = refused(site)
    assert any(word in said for word in DENIED), said


@pytest.mark.parametrize("bad", ["hunter2\nX-Other: 1", "hunter2é", "hunter2 hunter2"])
def test_credentials_that_fit_in_no_header(site: Site, moto_s3: MotoS3, bucket, bad: str) -> None:
    site.source = f"s3://{bucket}"
    site.environment = moto_s3.environment | secrets() | {"AWS_SESSION_TOKEN": bad}
    said = refused(site)
    assert "characters that no key has" in said


@pytest.mark.parametrize(
    "source",
    [
        "https://user:hunter2@127.0.0.1:1/x",
        "https://hunter2@127.0.0.1:1/x",
        "fsspec+https://hunter2@127.0.0.1:1/x",
        "s3://AKIDRECOGNISABLE:hunter2@hidden/x",
        "s3://AKIDRECOGNISABLE@hidden/x",
        "sftp://user:hunter2@127.0.0.1:1/x",
        "http://127.0.0.1:1/x?X-Amz-Algorithm=AWS4&X-Amz-Signature=hunter2",
        "https://account.blob.example/x?sv=2026&sig=hunter2",
        "http://127.0.0.1:1/x?token=hunter2",
        "user:hunter2@127.0.0.1/x",
    ],
)
def test_sources_that_carry_secrets(site: Site, source: str) -> None:
    site.source = source
    refused(site, code=2)
    assert not HIDDEN.search(site.cli("status").stdout.encode())


@pytest.mark.parametrize("source", ["s3://hidden", "fsspec+s3://hidden", "oss://hidden"])
@pytest.mark.parametrize("endpoint", ["http://u:hunter2@127.0.0.1:1", "http://h/?sig=hunter2"])
def test_endpoints_that_carry_secrets(site: Site, source: str, endpoint: str) -> None:
    site.source = source
    said = refused(site, "--endpoint", endpoint, code=2)
    assert "is no address" in said


BREAK = """
from cachefs.origin.http.wire import Wire

send = Wire.send

async def fail(wire, request, *args):
    if request.url.endswith({end!r}) or not {end!r}:
        raise ValueError("Invalid header value b'hunter2Secret/Key+0'")
    return await send(wire, request, *args)

Wire.send = fail
"""


def test_libraries_that_quote_secrets(
    site: Site, moto_s3: MotoS3, bucket: str, tmp_path: Path
) -> None:
    """Whatever they raise, at mount time and later."""
    broken = tmp_path / "broken"
    broken.mkdir()
    moto_s3.put(bucket, "dir/large", bytes(300_000))
    site.source = f"s3://{bucket}"
    site.environment = moto_s3.environment | secrets()
    site.environment["PYTHONPATH"] = f"{broken}:{os.environ.get('PYTHONPATH', '')}"
    site.expected_trouble += ("can't be read",)
    (broken / "sitecustomize.py").write_text(BREAK.format(end=""))
    refused(site)
    (broken / "sitecustomize.py").write_text(BREAK.format(end="dir/large"))
    site.mount("--debug")
    with pytest.raises(OSError, match="Input/output"):
        (site.mountpoint / "dir/large").read_bytes()
    assert_hidden(shown_while_mounted(site))
