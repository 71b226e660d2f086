"""The Controller service, which has nothing to do: volumes exist where daemons have mounted.

CreateVolume and DeleteVolume are not announced. They are there for csi-sanity, which makes the
volumes with them that it publishes.
"""

from cachefs.csi.refusal import Refusal
from cachefs.csi.requests import demand, demand_capabilities
from cachefs.csi.sources import Sources
from cachefs.csi.spec import csi_pb2 as csi
from cachefs.csi.volumes import parse_volume


class Controller:
    """The calls of the service, by their names in the specification."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def ControllerGetCapabilities(  # noqa: N802
        self, request: csi.ControllerGetCapabilitiesRequest
    ) -> csi.ControllerGetCapabilitiesResponse:
        """Return the one that is true: volumes can have all access modes."""
        rpc = csi.ControllerServiceCapability.RPC(
            type=csi.ControllerServiceCapability.RPC.SINGLE_NODE_MULTI_WRITER
        )
        return csi.ControllerGetCapabilitiesResponse(
            capabilities=[csi.ControllerServiceCapability(rpc=rpc)]
        )

    def CreateVolume(self, request: csi.CreateVolumeRequest) -> csi.CreateVolumeResponse:  # noqa: N802
        """Return a volume that the parameters `mount` and `directory` name.

        Raises `Refusal` if they name none, or if a size, a content or a place is demanded that only
        a new volume could have.
        """
        demand(request, "name")
        demand_capabilities(request.volume_capabilities)
        if request.HasField("volume_content_source"):
            raise Refusal("INVALID_ARGUMENT", "a volume of cachefs can't be a copy of another")
        volume = parse_volume("", request.parameters)
        return csi.CreateVolumeResponse(volume=csi.Volume(volume_id=str(volume)))

    def DeleteVolume(self, request: csi.DeleteVolumeRequest) -> csi.DeleteVolumeResponse:  # noqa: N802
        """Do nothing: no call of this plugin deletes data."""
        demand(request, "volume_id")
        return csi.DeleteVolumeResponse()

    def ValidateVolumeCapabilities(  # noqa: N802
        self, request: csi.ValidateVolumeCapabilitiesRequest
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        """Return whether a volume can have the capabilities. Raises `Refusal` if there is no such
        mount."""
        demand(request, "volume_id")
        if not request.volume_capabilities:
            raise Refusal("INVALID_ARGUMENT", "the request has no volume_capabilities")
        self._sources.entry(parse_volume(request.volume_id, request.volume_context).mount)
        try:
            demand_capabilities(request.volume_capabilities)
        except Refusal as refusal:
            return csi.ValidateVolumeCapabilitiesResponse(message=str(refusal))
        confirmed = csi.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
        )
        return csi.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)
