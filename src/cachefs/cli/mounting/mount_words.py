"""Parse the words after `-o`: those of mount(8) and fstab(5), and any option as `name=value`."""

from cachefs.config import Flag, flags, nearest
from cachefs.errors import UsageError

IGNORED = frozenset({"default_permissions", "auto_cache"})
"""Words for properties that every mount has."""

FSTAB = frozenset(
    "rw defaults auto noauto user nouser users owner group nofail _netdev exec suid nosuid dev "
    "nodev atime noatime relatime norelatime strictatime diratime nodiratime lazytime nolazytime "
    "async sync dirsync mand nomand loud silent".split()
)
"""Words that mount(8) passes to every file system and that have no effect here. mount(8) passes
"rw" whenever "ro" is missing, and mounts are always nosuid and nodev."""

_READ_ONLY = {"ro": True, "writable": False}
"""Words for `--read-only` and `--rw`. The latter can't be "rw", which mount(8) adds by itself."""

_FSTAB_PREFIXES = ("x-", "X-", "comment=", "user=", "helper=", "uhelper=")

_FUSE_NAMES = {
    "attr_timeout": "attr_ttl",
    "entry_timeout": "entry_ttl",
    "negative_timeout": "negative_ttl",
}
"""FUSE names of options, mapped to the names of the cachefs options."""

_REFUSED = {
    "rw": "for a mount that can be written it is --rw or -o writable",
    "noexec": 'it is not possible; where "user" implies it, add "exec"',
    "remount": "it is not possible; unmount and mount, or see cachefs set",
}
_NOT_HERE = ("foreground", "read_only")


def parse_mount_words(
    words: str, ignored: frozenset[str] = IGNORED, *, sloppy: bool = False
) -> dict[str, object]:
    """Return the fields in words such as "writable,allow_other,cache_dir=/ssd,attr_timeout=60".
    Values can't contain commas.

    Skips `ignored` words. If they include `FSTAB`, also skips fstab's free forms
    (`x-systemd.automount`). `sloppy` skips unknown words, too. Raises `UsageError`.
    """
    known = known_options()
    fields: dict[str, object] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        if word in ignored or (ignored >= FSTAB and word.startswith(_FSTAB_PREFIXES)):
            continue
        if word in _READ_ONLY:
            if fields.setdefault("read_only", _READ_ONLY[word]) is not _READ_ONLY[word]:
                raise UsageError("-o ro and -o writable contradict each other; leave one out")
            continue
        name, equals, value = word.partition("=")
        if name in _REFUSED and not equals:
            raise UsageError(f"-o {name}: {_REFUSED[name]}")
        field, flag = known.get(name.replace("-", "_"), (None, None))
        if field is None or flag is None:
            switch = _switched_off(name, known) if not equals else None
            if switch is not None:
                fields[switch] = False
            elif not sloppy:
                raise UsageError(_unknown(word, known))
        elif flag.metavar is None:
            fields[field] = _switch(name, equals, value)
        elif not value:
            raise UsageError(f"-o {name} needs a value: {name}={flag.metavar}")
        elif flag.multiple:
            before = fields.get(field, ())
            fields[field] = (*(before if isinstance(before, tuple) else ()), value)
        else:
            fields[field] = value
    return fields


def known_options() -> dict[str, tuple[str, Flag]]:
    """Return field and flag by each name of an option in fstab: the long names, with underscores,
    and those of FUSE. Options that no file may hold are missing."""
    found: dict[str, tuple[str, Flag]] = {}
    for field, flag in flags().items():
        if field not in _NOT_HERE:
            for name in flag.names:
                if name.startswith("--"):
                    word = name.partition("/")[0].removeprefix("--").replace("-", "_")
                    found[word] = (field, flag)
    return found | {name: found[ours] for name, ours in _FUSE_NAMES.items()}


def _switched_off(name: str, known: dict[str, tuple[str, Flag]]) -> str | None:
    """Return the switch that "no_NAME" or "noNAME" turns off, if there is one."""
    if not name.startswith("no"):
        return None
    field, flag = known.get(name[2:].replace("-", "_").lstrip("_"), (None, None))
    return field if flag is not None and flag.metavar is None else None


def _switch(name: str, equals: str, value: str) -> bool:
    if not equals:
        return True
    if value not in {"true", "false"}:
        raise UsageError(f'-o {name}: "{value}" is not a switch; write {name} or no{name}')
    return value == "true"


def _unknown(word: str, known: dict[str, tuple[str, Flag]]) -> str:
    name = word.partition("=")[0]
    everything = "see cachefs mount --help; its options are words here, as cache_size=100GiB"
    return f'-o: "{name}" is unknown; {nearest(name, [*known, *_READ_ONLY, *IGNORED], everything)}'
