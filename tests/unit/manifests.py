"""The manifests of the project, and what their containers run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml

from cachefs.cli import main
from tests.unit.texts import ROOT

FILES = sorted([*(ROOT / "docs/kubernetes").glob("*.yaml"), *(ROOT / "deploy").glob("*/*.yaml")])

_BUILD = (ROOT / "deploy/image/build").read_text()
_SEPARATORS = re.compile(r"&&|\|\||[;&|\n]")


def _built(pattern: str) -> str:
    (found,) = re.findall(pattern, _BUILD)
    assert isinstance(found, str)
    return found


IMAGE = _built(r"IMAGE=\$\{IMAGE:-([^}]+)\}")
"""The name of the image that deploy/image/build makes, without its version."""
ENTRYPOINT = [_built(r"--config\.entrypoint (\S+)")]
CMD = [_built(r"--config\.cmd (\S+)")]


class Pod(NamedTuple):
    """The spec of a pod, or what a ThinRuntimeProfile of Fluid has of it. `place` is for people."""

    place: str
    spec: dict[str, Any]

    def __str__(self) -> str:
        return self.place

    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def objects(file: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each is not None]


def pods() -> Iterator[Pod]:
    """Yield all pods in the manifests: by themselves, and as templates."""
    for file in FILES:
        for each in objects(file):
            place = f"{file.relative_to(ROOT)}: {each['kind']} {each['metadata']['name']}"
            spec = _pod_spec(each)
            if spec is not None:
                yield Pod(place, spec)


def _pod_spec(resource: dict[str, Any]) -> dict[str, Any] | None:
    spec = resource.get("spec", {})
    if resource["kind"] == "Pod":
        return dict(spec)
    if resource["kind"] == "ThinRuntimeProfile":
        fuse = spec["fuse"]
        container = {**fuse, "name": "fuse", "image": f"{fuse['image']}:{fuse['imageTag']}"}
        return {"containers": [container], "volumes": spec.get("volumes", [])}
    if resource["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template = spec.get("template")
    return None if template is None else dict(template["spec"])


def runs_cachefs(container: dict[str, Any]) -> bool:
    return bool(container["image"].rpartition(":")[0] == IMAGE)


def command_line(container: dict[str, Any]) -> list[str]:
    """Return what a container of our image runs, by Kubernetes' rules."""
    command, args = container.get("command", []), container.get("args", [])
    return [*command, *args] if command else [*ENTRYPOINT, *(args or CMD)]


def our_commands(words: list[str]) -> list[list[str]]:
    """Return the command lines of cachefs in a command line: itself, or those in its script."""
    if words[:2] != ["sh", "-c"]:
        return [words]
    _, _, script = words
    lines = [shlex.split(part) for part in _SEPARATORS.split(script.replace("$!", ""))]
    return [line[line.index("cachefs") :] for line in lines if "cachefs" in line[:2]]


def parsed(words: list[str]) -> click.Context:
    """Let click understand a command line of cachefs, and return the context of its verb. Raises
    `click.ClickException`."""
    program, *args = words
    assert program == "cachefs", words
    command: click.Command = main
    context = click.Context(main, info_name=program)
    while isinstance(command, click.Group):
        verb, found, args = command.resolve_command(context, args)
        assert found is not None
        command = found
        context = command.make_context(verb, args, parent=context)
        args = [*context._protected_args, *context.args]
    return context
