"""What the S3 test servers have in common: buckets and objects put straight into them."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class S3Server:
    """A running S3 server and a client for it. No pytest here: demo and bench use it too."""

    endpoint: str
    access_key: str
    secret_key: str
    region = "us-east-1"

    def __init__(self) -> None:
        self._client: Any = None

    @property
    def client(self) -> Any:
        """A botocore client that can do what cachefs can't: write."""
        if self._client is None:
            import botocore.session
            from botocore.config import Config

            self._client = botocore.session.Session().create_client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                region_name=self.region,
                config=Config(
                    s3={"addressing_style": "path"},
                    max_pool_connections=16,
                    retries={"max_attempts": 2},
                    proxies={},
                ),
            )
        return self._client

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which any S3 client finds the server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> str:
        """Create an empty bucket and return its name."""
        self.client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Write one object, whatever its key looks like; returns the ETag."""
        etag: str = self.client.put_object(Bucket=bucket, Key=key, Body=data)["ETag"]
        return etag

    def put_many(self, bucket: str, objects: dict[str, bytes]) -> None:
        """Write many objects, eight at a time, through obstore: botocore is slow at it."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            bucket,
            endpoint=self.endpoint,
            region=self.region,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(obstore.put, store, k, v) for k, v in objects.items()]:
                done.result()

    def delete(self, bucket: str, key: str) -> None:
        """Remove one object."""
        self.client.delete_object(Bucket=bucket, Key=key)

    def close_client(self) -> None:
        """Close the client's connections."""
        if self._client is not None:
            self._client.close()
            self._client = None


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that we started: its data is thrown away, so it need not tidy up."""
    process.kill()
    process.wait()
