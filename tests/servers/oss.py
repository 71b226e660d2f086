"""SeaweedFS addressed as OSS is: the bucket in the host name, as in bucket.localhost:8333.

Names below `localhost` are resolved on few machines. So clients are told that the server is their
HTTP proxy too, which needs no resolving: requests come with the whole URL in the first line.
"""

from pathlib import Path

from tests.servers.seaweedfs import SeaweedFS


class SeaweedOss(SeaweedFS):
    """Answers as S3 does too: `endpoint` and `environment` are for that."""

    @property
    def oss_environment(self) -> dict[str, str]:
        port = self.endpoint.rpartition(":")[2]
        return {
            "OSS_ACCESS_KEY_ID": self.access_key,
            "OSS_ACCESS_KEY_SECRET": self.secret_key,
            "OSS_ENDPOINT": f"http://localhost:{port}",
            "http_proxy": self.endpoint,
            "no_proxy": "127.0.0.1",
        }

    def _arguments(self, data: Path, ports: list[int], grpc: list[int]) -> list[str]:
        return [*super()._arguments(data, ports, grpc), "-s3.domainName=localhost"]
