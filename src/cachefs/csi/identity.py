"""The Identity service: what this plugin is."""

from google.protobuf.wrappers_pb2 import BoolValue

from cachefs import __version__
from cachefs.csi.spec import csi_pb2 as csi

NAME = "cachefs.csi"
"""The name of the driver, in the CSIDriver object and in volumes."""


class Identity:
    """The calls of the service, by their names in the specification."""

    def GetPluginInfo(self, request: csi.GetPluginInfoRequest) -> csi.GetPluginInfoResponse:  # noqa: N802
        """Return the name and the version."""
        return csi.GetPluginInfoResponse(name=NAME, vendor_version=__version__)

    def GetPluginCapabilities(  # noqa: N802
        self, request: csi.GetPluginCapabilitiesRequest
    ) -> csi.GetPluginCapabilitiesResponse:
        """Return that there is a Controller service."""
        service = csi.PluginCapability.Service(type=csi.PluginCapability.Service.CONTROLLER_SERVICE)
        capability = csi.PluginCapability(service=service)
        return csi.GetPluginCapabilitiesResponse(capabilities=[capability])

    def Probe(self, request: csi.ProbeRequest) -> csi.ProbeResponse:  # noqa: N802
        """Return that the plugin answers. Mounts that don't are no reason to restart it."""
        return csi.ProbeResponse(ready=BoolValue(value=True))
