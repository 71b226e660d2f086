"""Checks of requests that several calls share."""

from collections.abc import Iterable

from cachefs.csi.refusal import Refusal
from cachefs.csi.spec import csi_pb2 as csi
from cachefs.csi.targets import Access

_READERS = {
    csi.VolumeCapability.AccessMode.SINGLE_NODE_READER_ONLY,
    csi.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY,
}
_FLAGS = ("ro", "rw", "noexec", "nosuid", "nodev")
"""The mount options of a volume. The last two are always on."""


def demand(request: object, *fields: str) -> None:
    """Check that the fields of a request are set. Raises `Refusal`."""
    for field in fields:
        value = getattr(request, field)
        is_missing = not value if isinstance(value, str) else not request.HasField(field)  # type: ignore[attr-defined]
        if is_missing:
            raise Refusal("INVALID_ARGUMENT", f"the request has no {field}")


def demand_capabilities(capabilities: Iterable[csi.VolumeCapability]) -> None:
    """Check that there are capabilities, and that volumes can have them. Raises `Refusal`."""
    checked = [access_of(capability) for capability in capabilities]
    if not checked:
        raise Refusal("INVALID_ARGUMENT", "the request has no volume_capabilities")


def access_of(capability: csi.VolumeCapability, read_only: bool = False) -> Access:
    """Return the access that a capability describes. Raises `Refusal` for a block device, and for
    mount options that are not those of a bind mount."""
    if not capability.HasField("mount"):
        kind = "a block device" if capability.HasField("block") else "no file system"
        raise Refusal(
            "INVALID_ARGUMENT", f"the volume is to be {kind}; cachefs has volumeMode: Filesystem"
        )
    if capability.access_mode.mode == csi.VolumeCapability.AccessMode.UNKNOWN:
        raise Refusal("INVALID_ARGUMENT", "the volume has no access mode")
    flags = set(capability.mount.mount_flags)
    for flag in flags:
        if flag not in _FLAGS:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the volume can't have the mount option {flag[:64]!r}, only {', '.join(_FLAGS)}; "
                "give others to the daemon",
            )
    is_read_only = read_only or "ro" in flags or capability.access_mode.mode in _READERS
    return Access(is_read_only, "noexec" in flags)
