"""Check `--shared`: where the members of the shared tier are named."""

import re

from cachefs.config.address import OFF, join_address, split_address
from cachefs.config.fields import absolute_path, show
from cachefs.config.record import Check

MOST_MEMBERS = 4096
_DNS = "dns:"
_FORMS = "HOST:PORT[,HOST:PORT...], dns:NAME:PORT, or the path of a file with one HOST:PORT a line"


def split_dns(option: str) -> tuple[str, int] | None:
    """Return name and port of `dns:NAME:PORT`, None for another form. Raises `ValueError`."""
    return split_address(option.removeprefix(_DNS)) if option.startswith(_DNS) else None


def parse_members(text: str, where: str) -> list[tuple[str, int]]:
    """Return host and port of each member in a list or a file, each once. `#` begins a comment.

    Raises `ValueError` for a text that is no address; it names `where`.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    words = [word for line in lines for word in re.split(r"[,\s]+", line) if word]
    if len(words) > MOST_MEMBERS:
        raise ValueError(f"{where} has more than {MOST_MEMBERS} members")
    members: dict[tuple[str, int], None] = {}
    for word in words:
        try:
            host, port = split_address(word)
        except ValueError:
            raise ValueError(f"{show(word)} in {where} is no member; write HOST:PORT") from None
        if not port:
            raise ValueError(f"{show(word)} in {where} has no port; write HOST:PORT")
        members[host, port] = None
    return list(members)


def _check(value: object) -> str:
    """Return the option in one form: OFF, a list, `dns:NAME:PORT`, or an absolute path. Raises
    `ValueError`."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"{show(value)} names no members; write {_FORMS}, or off")
    text = value.strip()
    if text == OFF:
        return OFF
    if text.startswith(_DNS):
        try:
            name, port = split_address(text.removeprefix(_DNS))
            if port:
                return _DNS + join_address(name, port)
        except ValueError:
            pass
        raise ValueError(f"{show(text)} is no DNS name and port; write {_FORMS}")
    if "/" in text:
        return str(absolute_path(text))
    return ",".join(join_address(*member) for member in parse_members(text, "the list"))


SHARED = Check(_check)
