"""What can be changed while mounted: `cachefs set` and `cachefs reload`, as a user would."""

from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually


@pytest.fixture
def file(site: Site) -> Path:
    file = site.mountpoint.parent / "data.toml"
    file.write_text('list_ttl = "1h"\nnegative_ttl = "1h"\n[load]\npaths = ["a"]\n')
    return file


def test_shorter_ttls_show_new_names(site: Site) -> None:
    site.mount("--list-ttl", "1h", "--entry-ttl", "1h", "--negative-ttl", "1h")
    said = site.cli("set", site.mountpoint, "list-ttl=0", "negative-ttl=100ms", "hedge=on").stdout
    assert [line.partition(" until")[0] for line in said.splitlines()] == [
        "list-ttl was 1h and is 0s",
        "negative-ttl was 1h and is 100ms",
        "hedge was false and is true",
    ]
    assert not (site.mountpoint / "later").exists()
    (site.files / "later").write_text("later")
    eventually((site.mountpoint / "later").exists)


def test_the_file_is_read_again(site: Site, file: Path) -> None:
    place = site.mountpoint
    site.mount("-c", file, "--entry-ttl", "5m", "--stale-if-error", "indefinite")
    assert f"nothing has changed in {file}" in site.cli("reload", place).stdout
    site.cli("set", place, "readahead=0", "limit-uid=7=1MiB", "max-downloads=3", "debug=true")
    file.write_text(
        'list_ttl = "2h"\nentry_ttl = "1m"\nmetrics = "off"\n'
        "stale_if_error = 1\nmax_downloads = 5\n"
    )
    said = site.cli("reload", place).stdout.splitlines()
    assert set(said) == {
        "list-ttl was 1h and is 2h",
        "negative-ttl was 1h and is 1m",
        "readahead was 0 B and is 64 MiB",
        "max-downloads was 3 and is 5",
        "limit-uid of 7 was 1 MiB/s and is unlimited",
        "debug was true and is false",
        "metrics needs a new mount: it is the default, the file says off",
    }
    limits = site.status()["limits"]
    assert (limits["entry_ttl"], limits["stale_if_error"]) == (300, "indefinite"), "as was said"
    assert [line.partition(" ")[0] for line in site.cli("reload", place).stdout.splitlines()] == [
        "metrics"
    ]
    file.write_text('lisst_ttl = "2h"\n')
    assert 'did you mean "list_ttl"' in site.cli("reload", place, code=2).stderr
    file.unlink()
    assert "can't read the configuration file" in site.cli("reload", place, code=2).stderr


def test_a_mount_without_a_file(site: Site) -> None:
    site.mount()
    assert "without a configuration file" in site.cli("reload", site.mountpoint, code=1).stderr
