"""`cachefs load` and `cachefs jobs`, as a user runs them."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.mount.harness import CLI, Site, eventually

FILES = 40
SLOW = "128KiB"
"""A download limit. The small files take half a minute with it."""


@pytest.fixture
def content(site: Site) -> dict[str, bytes]:
    noise = random.Random(5)
    content = {f"d{n % 3}/file-{n:02}.jpg": noise.randbytes(100_000 + n) for n in range(FILES)}
    content["large.bin"] = noise.randbytes(9_500_000)
    content["empty"] = b""
    for name, data in content.items():
        path = site.files / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return content


def load(site: Site, *args: object, code: int = 0) -> str:
    done = site.cli("load", *args, code=code)
    return done.stdout + done.stderr


def report_of(site: Site, *args: object, code: int = 0) -> dict[str, object]:
    """The job's report."""
    report: dict[str, object] = json.loads(site.cli("load", *args, "--json", code=code).stdout)
    return report


def assert_readable(site: Site, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        assert (site.mountpoint / name).read_bytes() == data


def test_all_of_a_mount(site: Site, content: dict[str, bytes]) -> None:
    site.mount()
    said = load(site, site.mountpoint)
    assert f"{len(content)} files (12.9 MiB) of {len(content)} files" in said
    sent = site.origin()["gets"]
    assert sent == FILES + 2  # the large one in two pieces, the empty one in none
    assert_readable(site, content)
    assert site.origin()["gets"] == sent


def test_only_what_changed_is_fetched_again(site: Site, content: dict[str, bytes]) -> None:
    site.mount()
    load(site, site.mountpoint)
    sent = site.origin()["gets"]
    assert "fetched 0 files" in load(site, site.mountpoint)
    assert site.origin()["gets"] == sent
    changed = [name for name in content if name.startswith("d1/")][:5]
    for name in changed:
        content[name] = content[name][::-1]
        (site.files / name).write_bytes(content[name])
    assert "fetched 5 files" in load(site, site.mountpoint)
    assert site.origin()["gets"] == sent + 5
    assert_readable(site, content)
    assert site.origin()["gets"] == sent + 5


def test_paths_are_inside_the_mount_or_relative_to_it(
    site: Site, content: dict[str, bytes]
) -> None:
    site.mount()
    for path in (site.mountpoint / "d0", "d0", f"{site.source}/d0"):
        report = report_of(site, path, "-m", site.mountpoint)
        assert report["progress"]["verified_files"] == 14, path  # type: ignore[index]
    assert "lies in no mount" in site.cli("load", "/etc", code=2).stderr
    assert "leads out" in site.cli("load", "../x", "-m", site.mountpoint, code=2).stderr
    assert "is not mounted" in site.cli("load", "d0", "-m", "/etc", code=1).stderr
    assert "nothing to load" in site.cli("load", code=2).stderr
    said = load(site, "nothing/here", "-m", site.mountpoint, code=1)
    assert "nothing/here: " in said
    assert "does not exist" in said


def test_a_list(site: Site, content: dict[str, bytes], tmp_path: Path) -> None:
    site.mount()
    names = [name for name in content if name.startswith("d2/")]
    lines = [names[0], "", str(site.mountpoint / names[1]), f"{site.source}/{names[2]}"]
    lines += [json.dumps({"path": names[3], "size": 3}), "d1"]
    listed = tmp_path / "list"
    listed.write_text("\n".join(lines))
    report = report_of(site, "-f", listed, "-m", site.mountpoint)
    assert report["progress"]["verified_files"] == 4 + 13  # type: ignore[index]
    assert site.origin()["gets"] == 4 + 13
    said = site.cli("load", "-f", tmp_path / "missing", "-m", site.mountpoint, code=1).stderr
    assert "can't read the list" in said


def test_failures_can_be_fed_back(site: Site, content: dict[str, bytes], tmp_path: Path) -> None:
    site.mount()
    listed = tmp_path / "list"
    listed.write_bytes(b'late\nodd-\xff\n{"size": 3}\nd0/file-00.jpg\n../up\n')
    report = report_of(site, "-f", listed, "-m", site.mountpoint, code=1)
    assert report["progress"]["failed_files"] == 4  # type: ignore[index]
    said = site.cli("jobs", "failures", report["id"]).stdout
    failed = {json.loads(line)["path"] for line in said.splitlines()}
    assert failed == {"late", "odd-\udcff", '{"size": 3}', "../up"}
    (site.files / "late").write_text("here")
    (site.files / os.fsdecode(b"odd-\xff")).write_text("here too")
    again = "".join(line + "\n" for line in said.splitlines() if "late" in line or "odd" in line)
    done = subprocess.run(
        [*CLI, "load", "-f", "-", "-m", str(site.mountpoint)], input=again.encode(), check=False
    )
    assert done.returncode == 0


def test_patterns(site: Site, content: dict[str, bytes]) -> None:
    site.mount()
    args = ("--include", "*.jpg", "--exclude", "d1/*", "--exclude", "*-00.jpg")
    report = report_of(site, site.mountpoint, *args)
    wanted = [n for n in content if n.endswith(".jpg") and "d1/" not in n and "-00" not in n]
    assert report["progress"]["verified_files"] == len(wanted)  # type: ignore[index]


def test_metadata_alone(site: Site, content: dict[str, bytes]) -> None:
    site.mount()
    assert "4 directories listed" in load(site, site.mountpoint, "--metadata")
    sent = site.origin()
    found = [path for path in site.mountpoint.rglob("*") if path.is_file()]
    assert len(found) == len(content)
    assert site.origin() == sent
    assert sent["gets"] == 0


def test_check_and_dry_run_fetch_nothing(site: Site, content: dict[str, bytes]) -> None:
    site.mount()
    assert "1 file (0 B) of 42 files (12.9 MiB) are cached" in load(
        site, site.mountpoint, "--check", code=1
    )
    said = load(site, site.mountpoint, "--dry-run")
    assert "would fetch 41 files (12.9 MiB)" in said
    assert site.origin()["gets"] == 0
    load(site, "d0", "-m", site.mountpoint)
    assert "would fetch 27 files" in load(site, site.mountpoint, "--dry-run")
    load(site, site.mountpoint)
    load(site, site.mountpoint, "--check")
    assert "exclude each other" in load(site, "d0", "--check", "--dry-run", code=2)


def test_what_does_not_fit_is_said_and_not_fetched(site: Site, content: dict[str, bytes]) -> None:
    noise = random.Random(6)
    for number in range(100):
        (site.files / f"big-{number:02}").write_bytes(noise.randbytes(1_000_000))
    site.mount("--cache-size", "64MiB")
    said = load(site, site.mountpoint, code=1)
    assert "no room for" in said
    assert f"SSD {site.cache} takes" in said
    report = json.loads(site.cli("jobs", "ls", site.mountpoint, "--json").stdout)[-1]
    progress = report["progress"]
    assert progress["failed_files"] <= 3  # the estimate knows nothing of half-empty slabs
    not_cached = progress["excess_files"] + progress["failed_files"]
    assert progress["verified_files"] == progress["files"] - not_cached
    assert 60 < progress["excess_files"] < 100
    assert report["state"] == "incomplete"


def test_detached_jobs_can_be_followed(site: Site, content: dict[str, bytes]) -> None:
    site.mount()
    assert site.cli("jobs", "ls", site.mountpoint).stdout == "no load jobs\n"
    job_id = load(site, site.mountpoint, "--detach").strip()
    assert f"{len(content)} files" in site.cli("jobs", "attach", job_id).stdout
    assert "done" in site.cli("jobs", "show", job_id).stdout
    assert job_id in site.cli("jobs").stdout
    assert "there is no load job" in site.cli("jobs", "show", "nonono", code=2).stderr
    site.umount()
    site.mount()
    assert "done" in site.cli("jobs", "show", job_id).stdout
    sent = site.origin()["gets"]
    assert "fetched 0 files" in site.cli("jobs", "resume", job_id).stdout
    assert site.origin()["gets"] == sent


@pytest.fixture
def small(site: Site, content: dict[str, bytes]) -> dict[str, bytes]:
    """Without the large file, of which each piece takes half a minute at a low limit. At
    `SLOW` all of them take half a minute."""
    (site.files / "large.bin").unlink()
    return {name: data for name, data in content.items() if name != "large.bin"}


def test_cancelled_jobs_can_be_resumed(site: Site, small: dict[str, bytes]) -> None:
    site.mount("--download-limit", SLOW)
    job_id = load(site, site.mountpoint, "--detach", "--jobs", "4").strip()
    eventually(lambda: site.origin()["gets"] >= 5)
    assert "cancelled" in site.cli("jobs", "cancel", job_id).stdout
    site.cli("set", site.mountpoint, "download-limit=0")
    assert f"{len(small)} files (3.8 MiB) of" in site.cli("jobs", "resume", job_id).stdout


def test_ctrl_c_cancels(site: Site, small: dict[str, bytes]) -> None:
    site.mount("--download-limit", SLOW)
    process = subprocess.Popen(
        [*CLI, "load", str(site.mountpoint)], stderr=subprocess.PIPE, text=True
    )
    with process:
        eventually(lambda: site.origin()["gets"] >= 3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "is cancelled; what it loaded stays" in said
    assert said.count("\n") == 1
    (job,) = json.loads(site.cli("jobs", "ls", "--json", site.mountpoint).stdout)
    assert job["state"] == "cancelled"


def test_readers_go_before_a_load_with_a_download_limit(site: Site) -> None:
    noise = random.Random(6)
    (site.files / "large").write_bytes(noise.randbytes(64 << 20))
    (site.files / "small").mkdir()
    content = {f"small/{number}": noise.randbytes(8_000) for number in range(60)}
    for name, data in content.items():
        (site.files / name).write_bytes(data)
    site.mount("--download-limit", "256KiB")
    load(site, site.mountpoint / "large", "--detach")
    eventually(lambda: site.origin()["get_bytes"] > 0)
    assert_readable(site, content)
    small_bytes = sum(map(len, content.values()))
    assert site.origin()["get_bytes"] - small_bytes <= 8 << 20, "the load was held back"


def test_a_killed_daemon_s_job_goes_on(site: Site, content: dict[str, bytes]) -> None:
    site.expected_trouble = ("which a dead cachefs had left",)
    site.mount("--download-limit", "4MiB")
    in_flight = 4
    job_id = load(site, site.mountpoint, "--detach", "--jobs", in_flight).strip()
    eventually(lambda: site.origin()["gets"] >= 15)
    time.sleep(0.1)
    stored = site.status()["cache"]["blocks"]
    site.crash()
    site.mount()
    # What the index did not have yet is found in the slabs, after the start.
    eventually(lambda: site.status()["cache"]["blocks"] >= stored)
    site.cli("jobs", "resume", job_id)
    blocks = FILES + 10
    assert site.origin()["gets"] <= blocks - stored + in_flight
    load(site, site.mountpoint, "--check")
    assert_readable(site, content)


def test_an_instance_file_says_what_to_load(
    site: Site, content: dict[str, bytes], tmp_path: Path
) -> None:
    file = tmp_path / "data.toml"
    text = (
        f'source = "{site.source}"\nmountpoint = "{site.mountpoint}"\ncache_dir = "{site.cache}"\n'
        f'cache_size = "256MiB"\nfree_space_ratio = 0\nlog_file = "{site.log}"\n'
    )
    file.write_text(text + '[load]\npaths = ["d0", "d1"]\nexclude = ["*-00.jpg"]\n')
    site.cli("mount", "--config", file)
    report = report_of(site, "--config", file)
    assert report["progress"]["verified_files"] == 26  # type: ignore[index]
    file.write_text(text + "[load]\npath = 3\n")
    said = site.cli("load", "--config", file, code=2).stderr
    assert 'unknown key "path"; did you mean "paths"?' in said
    file.write_text(text)
    assert "neither paths nor a list" in site.cli("load", "--config", file, code=2).stderr


def test_readers_see_new_versions_after_a_load(site: Site, content: dict[str, bytes]) -> None:
    site.mount("--entry-ttl", "indefinite", "--attr-ttl", "indefinite", "--list-ttl", "indefinite")
    load(site, site.mountpoint)
    name = "d0/file-00.jpg"
    assert (site.mountpoint / name).read_bytes() == content[name]
    (site.files / name).write_bytes(b"new")
    (site.files / "d0/added").write_bytes(b"added")
    load(site, "d0", "-m", site.mountpoint)
    eventually(lambda: (site.mountpoint / name).read_bytes() == b"new")
    assert (site.mountpoint / "d0/added").read_bytes() == b"added"


def test_pinned_files_stay(site: Site, content: dict[str, bytes]) -> None:
    noise = random.Random(9)
    for number in range(80):
        (site.files / f"big-{number:02}").write_bytes(noise.randbytes(1_000_000))
    site.mount("--cache-size", "64MiB")
    load(site, "d0", "d1", "d2", "-m", site.mountpoint, "--pin")
    assert "pinned    1.3 MiB, 100 %" in site.cli("info", site.mountpoint / "d0").stdout
    for path in site.mountpoint.glob("big-*"):  # more than there is room for
        path.read_bytes()
    for directory in ("d0", "d1", "d2"):
        load(site, directory, "-m", site.mountpoint, "--check")
    assert site.status()["tiers"][0]["pinned_bytes"] > 4_000_000
