"""All manifests: what the schemas of Kubernetes do not see, and the command lines of containers.

`make test-kubernetes` has an API server's own validation."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest

from cachefs.config.fields import user_cache_home
from tests.servers.examples import Example, blocks, documents
from tests.unit import manifests
from tests.unit.manifests import CMD, ENTRYPOINT, IMAGE, Pod, command_line, our_commands, parsed
from tests.unit.texts import ROOT

PODS = list(manifests.pods())
OUR_CONTAINERS = [
    pytest.param(container, id=f"{pod}, {container['name']}")
    for pod in PODS
    for container in pod.containers()
    if manifests.runs_cachefs(container)
]
ENGINES = ("podman", "docker")
WITHOUT_VALUE = {"--detach", "--interactive", "--privileged", "--rm", "--tty", "-it"}
"""Options of `podman run` that take no value."""


def test_there_are_manifests() -> None:
    assert len(manifests.FILES) >= 15
    assert len(PODS) >= 10
    assert len(OUR_CONTAINERS) >= 8


def is_unique(values: list[Any]) -> bool:
    return len(values) == len(set(values))


def faults(pod: Pod) -> Iterator[str]:
    """Yield what an API server would refuse of names and paths."""
    volumes = [volume["name"] for volume in pod.spec.get("volumes", ())]
    used = set()
    if not is_unique(volumes):
        yield f"volumes with the same name: {volumes}"
    if not is_unique([container["name"] for container in pod.containers()]):
        yield "containers with the same name"
    for container in pod.containers():
        mounts = container.get("volumeMounts", ())
        used |= {mount["name"] for mount in mounts}
        if not is_unique([mount["mountPath"] for mount in mounts]):
            yield f"{container['name']} has two volumes at one path"
        names = [port["name"] for port in container.get("ports", ()) if "name" in port]
        if not is_unique(names):
            yield f"{container['name']} has ports with the same name"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for asked in container.get(probe, {}).values():
                port = asked.get("port", 0) if isinstance(asked, dict) else 0
                if isinstance(port, str) and port not in names:
                    yield f"{container['name']} has no port {port} for its {probe}"
    if used != set(volumes):
        yield f"volumes are {sorted(volumes)}, and {sorted(used)} are mounted"
    numbers = [
        port["containerPort"]
        for container in pod.spec["containers"]
        for port in container.get("ports", ())
    ]
    if not is_unique(numbers):
        yield f"two containers with the same port: {numbers}"


@pytest.mark.parametrize("pod", PODS, ids=str)
def test_names_and_paths_fit_each_other(pod: Pod) -> None:
    assert list(faults(pod)) == []


def test_a_path_with_two_volumes_would_be_noticed() -> None:
    mounts = [{"name": name, "mountPath": "/run"} for name in "ab"]
    container = {"name": "c", "volumeMounts": mounts, "livenessProbe": {"httpGet": {"port": "p"}}}
    pod = Pod("", {"containers": [container], "volumes": [{"name": "a"}]})
    assert len(list(faults(pod))) == 3


@pytest.mark.parametrize("container", OUR_CONTAINERS)
def test_containers_of_the_image_run_what_cachefs_has(container: dict[str, Any]) -> None:
    commands = our_commands(command_line(container))
    assert commands
    for words in commands:
        parsed(words)


def test_the_entry_point_twice_would_be_noticed() -> None:
    assert command_line({"args": ["csi"]}) == [*ENTRYPOINT, "csi"]
    assert command_line({}) == [*ENTRYPOINT, *CMD]
    with pytest.raises(click.UsageError, match=r"(?i)no such command"):
        parsed(command_line({"args": ["cachefs", "csi"]}))


def lines_of(file: Any) -> Iterator[tuple[Example, str]]:
    for block in blocks(file):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield block, line.split("  #")[0].strip()


RUNS = [
    pytest.param(line, id=f"{block}: {line}")
    for file in documents()
    for block, line in lines_of(file)
    if line.split()[:2] in [[engine, "run"] for engine in ENGINES]
]


def of_a_run(line: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options of a `podman run` of our image, and what the container runs."""
    options: dict[str, list[str]] = {}
    words = shlex.split(line)[2:]
    while words[0].startswith("-"):
        option, separator, value = words.pop(0).partition("=")
        if not separator and option not in WITHOUT_VALUE:
            value = words.pop(0)
        options.setdefault(option, []).append(value)
    image, *args = words
    assert image.rpartition(":")[0] == IMAGE
    return options, command_line({"args": args})


def test_there_is_a_line_for_podman() -> None:
    assert RUNS


_EXEC = re.compile(r"(?:kubectl [^`]*?exec [^`]*?-- |podman exec \S+ )(cachefs [^`]*)`")


@pytest.mark.parametrize("line", RUNS)
def test_a_container_without_kubernetes_has_what_it_needs(line: str) -> None:
    """A command line that is understood, credentials, the mount on the host, and a cache that
    outlives the container."""
    options, words = of_a_run(line)
    context = parsed(words)
    volumes = dict(each.split(":", 1) for each in options["--volume"])
    place = context.params["mountpoint"]
    (shared,) = (host for host in volumes if place.startswith(f"{host}/"))
    assert volumes[shared] == f"{shared}:rshared"
    cache = str(user_cache_home())
    assert volumes[cache] == cache
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(options["--env"])


def test_what_documents_run_in_containers_is_understood() -> None:
    """`kubectl exec ... -- cachefs ...`, and `podman exec NAME cachefs ...`."""
    found = []
    for file in [*documents(), *manifests.FILES]:
        text = re.sub(r"\s+", " ", file.read_text())
        for words in _EXEC.findall(text):
            parsed(shlex.split(words))
            found.append(words)
    assert found


@pytest.mark.parametrize("name", ["README.md", "docs/INSTALL.md"])
def test_first_steps_make_the_directory_that_they_mount_on(name: str) -> None:
    """Elsewhere it is known by then."""
    for block in blocks(ROOT / name):
        lines = block.text.splitlines()
        for number, line in enumerate(lines if len(lines) > 1 else ()):
            found = re.search(r"mount (?:--foreground )?s3://\S+ (/\S+)", line)
            if found is not None:
                made = [word for each in lines[:number] if "mkdir" in each for word in each.split()]
                assert found[1] in made, block
