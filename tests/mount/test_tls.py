"""A mount of a store that speaks TLS and has a private CA."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.seaweedfs import SeaweedFS
from tests.servers.tls_front import TlsFront


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "right")


@pytest.fixture
def site(tmp_path: Path, seaweedfs: SeaweedFS, certificates: Certificates) -> Iterator[Site]:
    site = Site(tmp_path, "s3://behind-tls")
    site.options = PATIENT
    with TlsFront(certificates, int(seaweedfs.endpoint.rpartition(":")[2])) as front:
        site.environment = {
            **seaweedfs.environment,
            "AWS_ENDPOINT_URL": f"https://127.0.0.1:{front.port}",
        }
        yield site
        site.tear_down()


def test_a_private_ca_is_accepted_only_if_it_is_named(
    site: Site, seaweedfs: SeaweedFS, certificates: Certificates
) -> None:
    seaweedfs.make_bucket("behind-tls")
    objects = {"small": b"a" * 100_000, "large": b"b" * (3 << 20)}
    for name, body in objects.items():
        seaweedfs.put("behind-tls", name, body)
    said = site.refused()
    assert "is refused (its CA is unknown): give the PEM file of its CA with --ca-file" in said
    assert seaweedfs.secret_key not in said
    site.mount("--ca-file", certificates.ca)
    assert sorted(path.name for path in site.mountpoint.iterdir()) == sorted(objects)
    for name, body in objects.items():
        assert (site.mountpoint / name).read_bytes() == body
