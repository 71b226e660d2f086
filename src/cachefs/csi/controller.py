"""The Controller service: names volumes for claims. It keeps and deletes nothing, because volumes
are where daemons have mounted."""

from cachefs.csi.refusal import Refusal
from cachefs.csi.requests import demand, demand_capabilities
from cachefs.csi.sources import Sources
from cachefs.csi.spec import csi_pb2 as csi
from cachefs.csi.volumes import handle_of, parse_volume

_CAPABILITIES = (
    csi.ControllerServiceCapability.RPC.CREATE_DELETE_VOLUME,
    csi.ControllerServiceCapability.RPC.SINGLE_NODE_MULTI_WRITER,
)


class Controller:
    """The calls of the service, by their names in the specification."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def ControllerGetCapabilities(  # noqa: N802
        self, request: csi.ControllerGetCapabilitiesRequest
    ) -> csi.ControllerGetCapabilitiesResponse:
        """Return what this service can do, and that volumes can have all access modes."""
        rpcs = [csi.ControllerServiceCapability.RPC(type=each) for each in _CAPABILITIES]
        return csi.ControllerGetCapabilitiesResponse(
            capabilities=[csi.ControllerServiceCapability(rpc=rpc) for rpc in rpcs]
        )

    def CreateVolume(self, request: csi.CreateVolumeRequest) -> csi.CreateVolumeResponse:  # noqa: N802
        """Return a volume that shows what the parameters `mount` and `directory` name.

        Its size is that of the mount, whatever is demanded, so the answer has none. Raises
        `Refusal`.
        """
        demand(request, "name")
        demand_capabilities(request.volume_capabilities)
        if request.HasField("volume_content_source"):
            raise Refusal("INVALID_ARGUMENT", "a volume of cachefs can't be a copy of another")
        volume = parse_volume("", request.parameters)
        handle = handle_of(volume, request.name)
        return csi.CreateVolumeResponse(volume=csi.Volume(volume_id=handle))

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
