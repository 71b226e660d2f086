"""The Node service: shows mounts of this node in pods."""

import os

from cachefs.csi.limited_calls import CallHangsError, LimitedCalls
from cachefs.csi.refusal import Refusal
from cachefs.csi.requests import access_of, demand
from cachefs.csi.sources import DEAD, Sources
from cachefs.csi.spec import csi_pb2 as csi
from cachefs.csi.targets import Claims, publish, published_on, unpublish
from cachefs.csi.volumes import parse_target, parse_volume
from cachefs.mounts import FSTYPE, find_mount

_CAPABILITIES = (
    csi.NodeServiceCapability.RPC.GET_VOLUME_STATS,
    csi.NodeServiceCapability.RPC.VOLUME_CONDITION,
    csi.NodeServiceCapability.RPC.SINGLE_NODE_MULTI_WRITER,
)


class Node:
    """The calls of the service, by their names in the specification."""

    def __init__(self, node_id: str, sources: Sources, calls: LimitedCalls) -> None:
        self._node_id = node_id
        self._sources = sources
        self._calls = calls
        self._claims = Claims()

    def NodeGetInfo(self, request: csi.NodeGetInfoRequest) -> csi.NodeGetInfoResponse:  # noqa: N802
        """Return the name of the node. All nodes are alike, so there is no topology."""
        return csi.NodeGetInfoResponse(node_id=self._node_id)

    def NodeGetCapabilities(  # noqa: N802
        self, request: csi.NodeGetCapabilitiesRequest
    ) -> csi.NodeGetCapabilitiesResponse:
        """Return what this service can do besides publishing."""
        rpcs = [csi.NodeServiceCapability.RPC(type=each) for each in _CAPABILITIES]
        return csi.NodeGetCapabilitiesResponse(
            capabilities=[csi.NodeServiceCapability(rpc=rpc) for rpc in rpcs]
        )

    def NodePublishVolume(  # noqa: N802
        self, request: csi.NodePublishVolumeRequest
    ) -> csi.NodePublishVolumeResponse:
        """Show a volume in a pod. The kubelet repeats this call from time to time
        (requiresRepublish); it then does nothing, unless the mount of the node has been replaced.

        Raises `Refusal`: of a volume that is in the pod already only with codes after which the
        kubelet leaves it there.
        """
        demand(request, "volume_id", "target_path", "volume_capability")
        volume = parse_volume(request.volume_id, request.volume_context)
        access = access_of(request.volume_capability, request.readonly)
        target = parse_target(request.target_path, self._sources.mounts)
        with self._claims.claim(target):
            published = published_on(target)
            try:
                source = self._sources.open(volume)
            except Refusal as refusal:
                if published is not None:
                    raise Refusal("UNAVAILABLE", str(refusal)) from refusal
                raise
            try:
                publish(source, target, access, published)
            finally:
                source.close()
        return csi.NodePublishVolumeResponse()

    def NodeUnpublishVolume(  # noqa: N802
        self, request: csi.NodeUnpublishVolumeRequest
    ) -> csi.NodeUnpublishVolumeResponse:
        """Remove a volume from a pod; the mount of the node is not asked. Raises `Refusal`."""
        demand(request, "volume_id", "target_path")
        target = parse_target(request.target_path, self._sources.mounts)
        with self._claims.claim(target):
            unpublish(target)
        return csi.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(  # noqa: N802
        self, request: csi.NodeGetVolumeStatsRequest
    ) -> csi.NodeGetVolumeStatsResponse:
        """Return size and use as statfs(2) has them, and whether the volume answers.

        A volume that does not answer is abnormal. The kubelet wants a usage of it, too. Raises
        `Refusal` if no volume is on the path.
        """
        demand(request, "volume_id", "volume_path")
        try:
            target = parse_target(request.volume_path, self._sources.mounts)
        except Refusal as refusal:
            raise Refusal("NOT_FOUND", str(refusal)) from refusal
        entry = find_mount(target)
        if entry is None or entry.fstype != FSTYPE:
            raise Refusal("NOT_FOUND", f"no volume of cachefs is on {target}")
        try:
            found = self._calls.run(entry.device, lambda: os.statvfs(target), lambda late: None)
        except CallHangsError as error:
            return _abnormal(f"the mount hangs: {error}")
        except OSError as error:
            is_dead = error.errno in DEAD
            return _abnormal(
                "the mount is dead: its daemon has ended" if is_dead else str(error.strerror)
            )
        unit, usage = found.f_frsize, csi.VolumeUsage
        return csi.NodeGetVolumeStatsResponse(
            usage=[
                usage(
                    unit=usage.BYTES,
                    total=found.f_blocks * unit,
                    available=found.f_bavail * unit,
                    used=(found.f_blocks - found.f_bfree) * unit,
                ),
                usage(
                    unit=usage.INODES,
                    total=found.f_files,
                    available=found.f_favail,
                    used=found.f_files - found.f_ffree,
                ),
            ],
            volume_condition=csi.VolumeCondition(abnormal=False, message="the mount answers"),
        )


def _abnormal(message: str) -> csi.NodeGetVolumeStatsResponse:
    return csi.NodeGetVolumeStatsResponse(
        usage=[csi.VolumeUsage(unit=csi.VolumeUsage.BYTES)],
        volume_condition=csi.VolumeCondition(abnormal=True, message=message),
    )
