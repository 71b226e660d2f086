"""`MountConfig`, the configuration of a daemon and the source of `cachefs mount --help`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cachefs.config.cache_options import CacheSection
from cachefs.config.fields import PATH, Flag, check_text
from cachefs.config.options import (
    AccessSection,
    MetadataSection,
    OriginSection,
    ProcessSection,
    ReadingSection,
    Section,
    SharedSection,
    WorkloadSection,
)
from cachefs.config.record import Check, FieldInfo
from cachefs.config.source_url import normal_source, refuse_secrets, refuse_web_address
from cachefs.config.workloads import WORKLOADS


def _check_source(value: object) -> str:
    source = check_text(value)
    if "://" in source:
        refuse_secrets(source)
    return normal_source(source)


class _Arguments(Section):
    """What `cachefs mount` is given without an option's name."""

    source: Annotated[str, Check(_check_source)]
    mountpoint: Annotated[Path, PATH]


class MountConfig(
    ProcessSection,
    AccessSection,
    ReadingSection,
    SharedSection,
    MetadataSection,
    CacheSection,
    OriginSection,
    WorkloadSection,
    _Arguments,
):
    """The configuration of one mount. Immutable.

    Field names are the option names with underscores, except `cache_dirs` (`--cache-dir`) and
    `tier_tables` (`[[tier]]` in a file). The cache consists of `tiers`. The fields of the last
    base class are checked first: defaults of later fields depend on earlier ones.
    """

    def _default(self, field: FieldInfo, others: Mapping[str, Any]) -> Any:
        of_workload = WORKLOADS[others["workload"]] if "workload" in others else {}
        if field.name in of_workload:
            return of_workload[field.name]
        return super()._default(field, others)

    def _check_together(self) -> None:
        super()._check_together()
        if self.manifest is not None and not self.read_only:
            raise ValueError("a manifest fixes what the mount shows; leave out --rw or --manifest")
        if self.manifest is None:
            refuse_web_address(self.source)
        places = [("cache directory", path) for tier in self.tiers for path in tier.paths]
        if self.log_file is not None:
            places.append(("log_file", self.log_file))
        for name, path in places:
            refuse_below_mountpoint(name, path, self.mountpoint)


_SECTIONS: tuple[type[Section], ...] = (
    OriginSection,
    CacheSection,
    MetadataSection,
    SharedSection,
    WorkloadSection,
    ReadingSection,
    AccessSection,
    ProcessSection,
)


def flags() -> dict[str, Flag]:
    """Return the command-line form of every field that has one, by field name."""
    return {
        name: _complete(flag, name, section, field.annotation)
        for section in _SECTIONS
        for name, field in section.fields.items()
        for flag in field.metadata
        if isinstance(flag, Flag)
    }


def _complete(flag: Flag, field: str, section: type[Section], annotation: object) -> Flag:
    """Return the flag with what its declaration leaves out."""
    names = flag.names or (f"--{field.replace('_', '-')}",)
    words = "|".join(get_args(annotation)) if get_origin(annotation) is Literal else None
    return replace(flag, names=names, metavar=flag.metavar or words, group=section.group)


def refuse_below_mountpoint(name: str, path: Path, mountpoint: Path) -> None:
    """Raise `ValueError` if `path` lies below the mountpoint: a daemon that used it would wait for
    itself."""
    if path.is_relative_to(mountpoint):
        raise ValueError(
            f"{name} {path} lies below the mountpoint {mountpoint}, which would wait for itself; "
            "choose another place"
        )
