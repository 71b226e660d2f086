"""docs/SHARED_TIER.md: memcached's flags are the same everywhere, and memcached accepts them."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cachefs.shared.inspection import LEAST_CONNECTIONS, inspect
from tests.servers.memcached import Memcached, flags, memcached_binary

DOCS = Path(__file__).parents[2] / "docs"
UNIT = DOCS / "shared_tier/cachefs-memcached.service"
MANIFEST = DOCS / "kubernetes/memcached.yaml"
TEXT = (DOCS / "SHARED_TIER.md").read_text()


def of_the_unit() -> list[str]:
    """The flags of the unit's command, with the values of the example in its comment."""
    text = UNIT.read_text()
    command = re.search(r"^ExecStart=/usr/bin/memcached (.+)$", text, re.MULTILINE)
    assert command is not None
    command_line = command[1]
    for name, value in re.findall(r"^#   (\w+)=(\S+)$", text, re.MULTILINE):
        command_line = command_line.replace(f"${{{name}}}", value)
    assert "$" not in command_line
    return shlex.split(command_line)


def of_the_manifest() -> list[str]:
    daemon_set = list(yaml.safe_load_all(MANIFEST.read_text()))[1]
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["memcached"]
    arguments: list[str] = container["args"]
    return arguments


def of_the_document() -> list[str]:
    command = re.search(r"^    memcached (.+?[^\\])\n", TEXT, re.MULTILINE | re.DOTALL)
    assert command is not None
    return shlex.split(command[1].replace("\\\n", " "))


def settings(arguments: list[str]) -> dict[str, str]:
    """Flags without addresses, and without what depends on the machine."""
    found: dict[str, str] = {}
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        found |= dict(o.split("=") for o in value.split(",")) if name == "-o" else {name: value}
    assert found.pop("ext_path")
    assert int(found.pop("-m")) > 0
    return {name: value for name, value in found.items() if name not in ("-l", "-p")}


@pytest.mark.parametrize("where", [of_the_unit, of_the_manifest, of_the_document])
def test_the_flags_are_those_of_the_tests(where: Callable[[], list[str]]) -> None:
    assert settings(where()) == settings(flags(Path("/tmp")))


def test_enough_connections() -> None:
    assert int(settings(of_the_unit())["-c"]) >= LEAST_CONNECTIONS


@pytest.mark.server
@pytest.mark.parametrize("where", [of_the_unit, of_the_manifest, of_the_document])
def test_memcached_accepts_the_flags(where: Callable[[], list[str]], tmp_path: Path) -> None:
    if memcached_binary() is None:
        pytest.skip("memcached is missing: apt-get install memcached")
    arguments = where()
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    own: list[str] = []
    for name, value in pairs:
        if name not in ("-l", "-p"):
            place = f"ext_path={tmp_path}/blocks:1G"
            own += [name, "64" if name == "-m" else re.sub(r"ext_path=[^,]+", place, value)]
    with Memcached(tmp_path, own) as member:
        assert inspect("127.0.0.1", member.port, 60.0).problems == []


def test_systemd_has_nothing_to_say_against_the_unit() -> None:
    if shutil.which("systemd-analyze") is None or memcached_binary() != "/usr/bin/memcached":
        pytest.skip("no systemd-analyze here, or no memcached")
    done = subprocess.run(
        ["systemd-analyze", "verify", UNIT],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_name_of_the_service_is_the_one_in_the_document() -> None:
    service, daemon_set, policy = yaml.safe_load_all(MANIFEST.read_text())
    name = ".".join([service["metadata"]["name"], service["metadata"]["namespace"]])
    assert f"dns:{name}.svc.cluster.local:{service['spec']['ports'][0]['port']}" in TEXT
    assert service["spec"]["clusterIP"] == "None"
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
