"""`cachefs csi` as a process, and a client that calls it as the kubelet does."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from cachefs.csi.spec import csi_pb2 as csi
from tests.mount.harness import CLI, PATIENCE_S, eventually

WRITER = csi.VolumeCapability.AccessMode.MULTI_NODE_MULTI_WRITER
READER = csi.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY
_METHODS = {
    method.name: method
    for service in csi.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def capability(mode: int = WRITER, *flags: str) -> csi.VolumeCapability:
    return csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(mount_flags=flags),
        access_mode=csi.VolumeCapability.AccessMode(mode=mode),
    )


class Plugin:
    """The plugin for the mounts in `mounts`, with pods in `pods`. `enter` is what starts it in a
    mount namespace."""

    def __init__(
        self, root: Path, mounts: Path, *options: str, enter: Sequence[str] = (), node: str = "n"
    ) -> None:
        self.pods = root / "pods"
        self.pods.mkdir(exist_ok=True)
        self._socket = root / "csi.sock"
        self._command = [*enter, *CLI, "csi", "--endpoint", f"unix://{self._socket}"]
        self._command += ["--node-id", node, "--mounts", str(mounts), *options]
        self._log = root / "csi.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self.process = subprocess.Popen(self._command, stderr=log)
        eventually(lambda: self._socket.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self._log.read_text()
        # No backoff: the socket may be there before the server listens, or be that of a killed one.
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50)]
        self._channel = grpc.insecure_channel(f"unix://{self._socket}", options)
        grpc.channel_ready_future(self._channel).result(PATIENCE_S)

    def kill(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self._channel.close()
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def tear_down(self) -> None:
        if self.process.poll() is None:
            self.stop()
        text = self._log.read_text()
        print(f"--- log of the plugin\n{text}---")
        for mount in self.mounted():
            subprocess.run(["umount", "-l", mount], check=False)
        assert " ERROR " not in text
        assert "Traceback" not in text

    def call(self, name: str, /, **fields: Any) -> Any:
        method = _METHODS[name]
        request = getattr(csi, method.input_type.name)(**fields)
        answer = getattr(csi, method.output_type.name)
        path = f"/{method.containing_service.full_name}/{name}"
        serializer = type(request).SerializeToString
        function = self._channel.unary_unary(path, serializer, answer.FromString)
        return function(request, timeout=PATIENCE_S)

    def refused(self, name: str, /, **fields: Any) -> tuple[str, str]:
        """The code and the text of a call that fails."""
        try:
            answer = self.call(name, **fields)
        except grpc.RpcError as error:
            text = error.details()
            assert "\n" not in text
            return error.code().name, text
        raise AssertionError(f"it succeeded: {answer}")

    def volume(self, pod: str, handle: str = "data", mode: int = WRITER, **more: Any) -> Any:
        """The fields of NodePublishVolume."""
        return {
            "volume_id": handle,
            "target_path": str(self.pods / pod),
            "volume_capability": capability(mode),
            **more,
        }

    def publish(self, pod: str, handle: str = "data", mode: int = WRITER, **more: Any) -> Path:
        self.call("NodePublishVolume", **self.volume(pod, handle, mode, **more))
        return self.pods / pod

    def unpublish(self, pod: str, handle: str = "data") -> None:
        self.call("NodeUnpublishVolume", volume_id=handle, target_path=str(self.pods / pod))
        assert not os.path.lexists(self.pods / pod)

    def condition(self, pod: str) -> Any:
        path = str(self.pods / pod)
        return self.call("NodeGetVolumeStats", volume_id="data", volume_path=path).volume_condition

    def mounted(self) -> list[str]:
        """The mounts in pods."""
        places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [place for place in places if place.startswith(f"{self.pods}/")]


@contextmanager
def running(plugin: Plugin) -> Iterator[Plugin]:
    try:
        yield plugin
    finally:
        plugin.tear_down()
