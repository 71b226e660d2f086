"""The command line without a mount: help, nonsense, and how errors are told."""

import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cachefs import __version__
from cachefs.cli import main
from cachefs.cli import status as status_module
from cachefs.cli import umount as umount_module
from cachefs.cli.mounting.mount_words import parse_mount_words
from cachefs.cli.mounts import all_mounts
from cachefs.cli.views import status as status_view
from cachefs.config import flags
from cachefs.errors import CachefsError, UsageError
from cachefs.halt_polling import POLL_NS, SETTING, advice
from cachefs.mounts import FSTYPE, MountHealth, RuntimeEntry
from cachefs.mounts.table import MountEntry

CACHEFS = Path(sys.executable).with_name("cachefs")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def error_of(*args: str, code: int = 2) -> str:
    """The one line on stderr of a command that fails."""
    result = run(*args)
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("cachefs: error: ")
    assert result.stdout == ""
    return lines[0].removeprefix("cachefs: error: ")


def console_script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CACHEFS, *args], capture_output=True, text=True, check=False)


def test_the_console_script_works() -> None:
    done = console_script("--version")
    assert (done.returncode, done.stdout) == (0, f"cachefs {__version__}\n")
    done = console_script("mount", "s3://b", "/mnt", "--cache-size", "lots")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('cachefs: error: --cache-size: "lots" is not a size')


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, cachefs.cli\n"
        "try: cachefs.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('pydantic', 'trio', 'rich', 'pyfuse3', 'obstore', 'asyncio')"
        " if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("HEAVY []\n")


def test_help_lists_the_verbs() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for verb in ("mount", "umount", "status", "tier"):
        assert f"\n  {verb} " in result.stdout
        assert run(verb, "--help").exit_code == 0


def test_no_verb_shows_the_help() -> None:
    result = run()
    assert result.exit_code == 2
    assert "cachefs mount s3://bucket/prefix /mnt/data" in result.stderr


def test_mount_help_shows_every_option_with_its_default() -> None:
    text = run("mount", "--help").stdout
    for flag in flags().values():
        for name in flag.names:
            assert name.partition("/")[0] in text
    for default in (
        "[100GiB]",
        "[0.97]",
        "[10m]",
        "[1m]",
        "[300MiB]",
        "else 644]",
        "else 755]",
        "[epoch]",
        "[7d]",
    ):
        assert default in " ".join(text.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["mnt"], "no such command 'mnt'; did you mean 'mount'?"),
        (["zzz"], "no such command 'zzz' ("),
        (["mount"], "there is no source"),
        (["mount", "s3://b"], "there is no mountpoint"),
        (["mount", "s3://b", "/mnt", "extra"], "extra"),
        (["mount", "s3://b", "/mnt", "--cach-size", "1"], "--cache-size"),
        (["mount", "s3://b", "/mnt", "--cache-size"], "requires an argument"),
        (["mount", "s3://b", "/mnt", "--cache-size", "10 parsecs"], '"10 parsecs" is not a size'),
        (["mount", "s3://b", "/mnt", "--attr-cache", "soon"], '--attr-ttl: "soon"'),
        (["mount", "s3://b", "/mnt", "--max-downloads", "-3"], '--max-downloads: "-3"'),
        (["mount", "s3://b", "/mnt", "--file-mode", "rw"], '--file-mode: "rw"'),
        (["mount", "s3://b", "/mnt", "--endpoint", ""], "--endpoint"),
        (["mount", "/data", "/mnt"], 'SOURCE: "/data" is no URL'),
        (["mount", "", "/mnt"], "SOURCE"),
        (["mount", "s3://b", ""], "mountpoint is empty"),
        (["mount", "s3://b", "/mnt", "-d", "-f"], "contradict"),
        (["mount", "s3://b", "/mnt", "-o", "rw"], "--rw or -o writable"),
        (["mount", "s3://b", "/mnt", "-o", "writeable"], 'did you mean "writable"?'),
        (["mount", "s3://b", "/mnt", "-o", "ro,writable"], "contradict each other"),
        (["mount", "s3://b", "/mnt", "-o", "writable", "-o", "ro"], "contradict each other"),
        (["mount", "s3://b", "/mnt", "-o", "ro", "--rw"], "the opposite; leave one out"),
        (["mount", "s3://b", "/mnt", "-o", "writable", "--read-only"], "the opposite"),
        (["mount", "s3://b", "/mnt", "-o", "ro,fast"], '"fast" is unknown'),
        (["mount", "s3://b", "/mnt", "-o", "uid=me"], '--uid: "me"'),
        (["mount", "s3://b", "/mnt", "-c", "/no/such/file"], "/no/such/file"),
        (["umount"], "there is no mountpoint"),
        (["umount", ""], "mountpoint is empty"),
        (["status", "--yaml"], "--yaml"),
        (["mount", "s3://b", "/mnt", "--mem-size", "1MiB"], "64 MiB, or 0 for none"),
        (["mount", "s3://b", "/mnt", "--mem-dir", "/m"], "mem_dir needs mem_size"),
        (["mount", "s3://b", "/mnt", "--verify-cache-checksum", "no"], "--verify: "),
    ],
)
def test_nonsense_is_told_in_one_line(args: list[str], said: str) -> None:
    assert said in error_of(*args)


@pytest.mark.parametrize(
    "args",
    [
        ["du", "-m", "", "x"],
        ["jobs", "ls", ""],
        ["load", "-m", "", "x"],
        ["metadata", "export", "", "file"],
        ["profile", ""],
        ["stats", ""],
        ["status", ""],
        ["tier", "list", ""],
        ["upgrade", ""],
    ],
)
def test_every_command_refuses_an_empty_mountpoint(args: list[str]) -> None:
    assert error_of(*args) == "the mountpoint is empty; name a directory"


@pytest.mark.parametrize(
    "args", [["jobs", "ls"], ["metadata", "export"], ["stats"], ["status"], ["tier", "list"]]
)
def test_every_command_says_the_same_about_a_directory_that_is_no_mount(args: list[str]) -> None:
    file = ["file"] * (args[0] == "metadata")
    said = error_of(*args, "/nowhere", *file, code=1)
    assert said == "/nowhere is not mounted by cachefs; cachefs status shows what is"


def test_nonsense_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('cache_siz = "1GiB"\n')
    text = error_of("mount", "s3://b", "/mnt", "-c", str(file))
    assert text == f'{file}: unknown key "cache_siz"; did you mean "cache_size"?'


def test_mount_words() -> None:
    assert parse_mount_words("ro,allow_other,,attr_timeout=60,entry_timeout=5m,uid=7") == {
        "read_only": True,
        "allow_other": True,
        "attr_ttl": "60",
        "entry_ttl": "5m",
        "uid": "7",
    }
    assert parse_mount_words("limit_uid=1=1MiB,limit-uid=2=2MiB,nohedge,no_allow_other") == {
        "limit_uid": ("1=1MiB", "2=2MiB"),
        "hedge": False,
        "allow_other": False,
    }
    assert parse_mount_words("cache_dir=/a:/b,anonymous=true,attr-cache=1") == {
        "cache_dirs": "/a:/b",
        "anonymous": True,
        "attr_ttl": "1",
    }
    assert parse_mount_words("writable,uid=7") == {"read_only": False, "uid": "7"}
    wrong = ("attr_timeout", "attr_timeout=", "allow_other=1", "ro=1", "=", "nonempty,x", "noexec")
    for words in (*wrong, "rw", "nofail", "x-systemd.automount", "foreground", "remount", "nouid"):
        with pytest.raises(UsageError):
            parse_mount_words(words)


def test_umount_of_what_its_daemon_unmounts_at_this_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [MountEntry(tmp_path, FSTYPE, "s3://b"), None]
    monkeypatch.setattr(umount_module, "find_mount", lambda place: there.pop(0))

    def unmount(place: Path, **how: bool) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(umount_module, "unmount", unmount)
    result = CliRunner().invoke(main, ["umount", "--force", str(tmp_path)])
    assert (result.exit_code, result.output, there) == (0, "", [])


def test_umount_of_what_is_not_mounted(tmp_path: Path) -> None:
    assert "is not mounted" in error_of("umount", str(tmp_path), code=1)
    assert "is not mounted" in error_of("umount", str(tmp_path / "missing"), code=1)
    assert "not of cachefs" in error_of("umount", "/proc", code=1)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CachefsError("it broke"), 1, "it broke"),
        (UsageError("you broke it"), 2, "you broke it"),
        (ValueError("two\nlines"), 1, "internal error: ValueError: two lines (--debug shows"),
    ],
)
def test_errors_are_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(status_module, "collect", fail)
    assert said in error_of("status", code=code).strip()


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status_module, "collect", interrupt)
    result = run("status")
    assert result.exit_code == 130
    assert result.stderr == "\ncachefs: error: interrupted\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CachefsError("it broke")

    monkeypatch.setattr(status_module, "collect", fail)
    result = run("status", "--debug")
    assert isinstance(result.exception, CachefsError)


NO_COUNTS = dict.fromkeys(
    "hits evicted demoted promoted rejected verified bad_blocks bad_slabs read_errors "
    "write_errors".split(),
    0,
)


def tier_of(medium: str, path: str, **changes: object) -> dict[str, Any]:
    sizes = {"quota_bytes": 101 << 30, "capacity_bytes": 100 << 30, "used_bytes": 3 << 29}
    marks = {"high_bytes": 95 << 30, "low_bytes": 85 << 30}
    tier = {"medium": medium, "path": path, "health": "normal", **sizes, **marks, **NO_COUNTS}
    return {**tier, **changes}


REPORT: dict[str, Any] = {
    "mountpoint": "/mnt/a",
    "source": "s3://b/[red]p",
    "pid": 42,
    "version": "1",
    "policy": "epoch",
    "stale": False,
    "stale_since": None,
    "tiers": [tier_of("MEM", "/m"), tier_of("SSD", "/s:1", hits=7), tier_of("SSD", "/s2")],
    "cache": {"capacity_bytes": 100 << 30, "used_bytes": 3 << 29, "blocks": 9, "dirs": ["/c"]},
    "reads": {"hits": 3, "misses": 1, "hit_bytes": 5, "fetched_bytes": 6},
    "origin": {"gets": 10, "heads": 2, "lists": 4, "get_bytes": 6, "errors": 0},
    "origin_health": {
        "down_since": None,
        "problem": None,
        "limit": 12,
        "in_flight": 3,
        "queued": 0,
        "retries": 5,
        "busy_answers": 2,
        "failed_calls": 1,
        "hedges": 0,
    },
    "limits": {"max_downloads": 64, "download_limit": 0, "limit_uid": {"1000": 50 << 20}},
    "errors": [
        {
            "errno": "EIO",
            "operation": "read",
            "path": "/d/f",
            "text": "archived: [red]restore it",
            "count": 7,
            "first_at": 0.0,
            "last_at": 0.0,
        }
    ],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with five mounts: serving, hanging, stale, another user's, one of which nothing is
    known; and one starting."""
    mounts = [MountEntry(Path(f"/mnt/{name}"), "fuse.cachefs", f"s3://{name}") for name in "abcdf"]
    mounts[3] = mounts[3]._replace(file_system_options="ro,user_id=4711,group_id=4711")
    entries = [
        RuntimeEntry(f"/mnt/{name}", f"s3://{name}", pid, 0.0, alive=name != "c")
        for name, pid in (("a", 42), ("b", 43), ("c", 44), ("e", 45))
    ]
    removed: list[str] = []

    def ask(path: Path) -> dict[str, Any]:
        if path != Path("/run/a"):
            raise CachefsError("the daemon did not answer")
        return {**REPORT, "started_at": time.time() - 3700}

    monkeypatch.setattr(status_view, "advice", lambda: None)
    module = all_mounts
    monkeypatch.setattr(module, "cachefs_mounts", lambda: mounts)
    monkeypatch.setattr(module, "read_entries", lambda: entries)
    monkeypatch.setattr(module, "socket_path", lambda place: Path("/run", place.name))
    monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(module, "remove_leftovers", lambda place: removed.append(str(place)))
    monkeypatch.setattr(
        module,
        "check_answers",
        lambda p, _: MountHealth.DEAD if p.name == "c" else MountHealth.FORBIDDEN,
    )
    return {"removed": removed, "entries": entries}


def test_status_shows_every_mount(machine: dict[str, Any]) -> None:
    result = run("status")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[1] == "/mnt/a s3://b/[red]p serving 42 1h 1m 1.5 GiB of 100 GiB 3 1 75.0% 10/2/4"
    assert lines[2] == "/mnt/b s3://b not answering 43 - - - - - -"
    assert lines[3] == "/mnt/c s3://c stale - - - - - - -"
    assert lines[4] == "/mnt/d s3://d another user's - - - - - - -"
    assert lines[5] == "/mnt/e s3://e starting 45 - - - - - -"
    assert lines[6] == "/mnt/f s3://f not known here - - - - - - -"
    assert lines[7] == "/mnt/b: the daemon did not answer"
    assert "cachefs umount /mnt/c" in lines[8]
    assert lines[9].startswith("/mnt/d: it belongs to uid 4711, and only that user")
    assert "it runs in another container" in lines[10]


def test_status_as_json(machine: dict[str, Any]) -> None:
    rows = json.loads(run("status", "--json").stdout)
    states = {row["mountpoint"]: row["state"] for row in rows}
    assert states == {
        "/mnt/a": "serving",
        "/mnt/b": "not answering",
        "/mnt/c": "stale",
        "/mnt/d": "another user's",
        "/mnt/e": "starting",
        "/mnt/f": "not known here",
    }
    assert rows[0]["reads"] == REPORT["reads"]


def lines_of(*args: str) -> list[str]:
    """What is printed, without the padding of tables."""
    result = run(*args)
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_status_of_one_mount_shows_its_tiers(machine: dict[str, Any]) -> None:
    lines = lines_of("status", "/mnt/a")
    assert lines[:5] == [
        "MOUNTPOINT /mnt/a",
        "SOURCE s3://b/[red]p",
        "STATE serving",
        "PID 42",
        "UP 1h 1m",
    ]
    assert lines[5] == "CACHED 1.5 GiB of 100 GiB"
    epoch = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    assert lines[10:] == [
        "EVICTION epoch",
        "REQUESTS 3 under way of at most 64, held at 12 by its answers",
        "TROUBLE 5 retried, 2 times too busy, 1 given up",
        "LIMIT 50 MiB/s for uid 1000",
        f"LAST ERROR {epoch} EIO, 7 times, the last read of /d/f: archived: [red]restore it",
        "",
        "TIER PATH HEALTH USED HIGH/LOW",
        "MEM /m normal 1.5 GiB of 101 GiB 95%/85%",
        "SSD1 /s:1 normal 1.5 GiB of 101 GiB 95%/85%",
        "SSD2 /s2 normal 1.5 GiB of 101 GiB 95%/85%",
        "",
        "TIER HITS EVICTED DEMOTED PROMOTED REJECTED VERIFIED BAD ERRORS",
        "MEM 0 0 0 0 0 0 0 0",
        "SSD1 7 0 0 0 0 0 0 0",
        "SSD2 0 0 0 0 0 0 0 0",
    ]
    assert lines_of("status", "/mnt/c")[-1].startswith("PROBLEM its daemon is gone")


def test_a_sick_tier_catches_the_eye(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [
        tier_of("MEM", "/m", hits=99_999, evicted=123_456, demoted=999_600, bad_blocks=3),
        tier_of("SSD", "/s", health="unstable", read_errors=2, write_errors=3),
        tier_of("HDD", "/h", health="down", bad_slabs=4),
    ]
    monkeypatch.setitem(REPORT, "tiers", tiers)
    notices = [
        "SSD /s is UNSTABLE: it gets no blocks, and reads go around it, until it has recovered",
        "HDD /h is DOWN: it is not used until it answers again",
        "HDD /h: 4 slab files were missing or damaged",
    ]
    lines = lines_of("status", "/mnt/a")
    assert "SSD /s UNSTABLE 1.5 GiB of 101 GiB 95%/85%" in lines
    assert "MEM 99999 123k 1M 0 0 0 3 0" in lines
    assert "SSD 0 0 0 0 0 0 0 5" in lines
    assert lines[-4:] == ["", *notices]
    overview = lines_of("status")
    for notice in notices:
        assert f"/mnt/a: {notice}" in overview


def test_stale_names_catch_the_eye(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPORT, "stale", True)
    monkeypatch.setitem(REPORT, "stale_since", time.time() - 3700)
    notice = "the origin does not answer: names are shown as last known, for 1h 1m now"
    assert lines_of("status", "/mnt/a")[-1] == notice
    assert f"/mnt/a: {notice}" in lines_of("status")


@pytest.mark.parametrize(
    ("driver", "governor", "poll_ns", "command"),
    [
        ("haltpoll", "haltpoll", "0", f"echo {POLL_NS} > /{SETTING}"),
        ("haltpoll", "menu", "200000", "echo haltpoll > /sys/devices/system/cpu/cpuidle/current_"),
        ("haltpoll", "haltpoll", "200000", None),
        ("haltpoll", "haltpoll", None, None),
        ("none", "menu", "0", None),
        ("intel_idle", "menu", "200000", None),
        (None, None, None, None),
    ],
)
def test_status_says_that_a_virtual_machine_does_not_poll(
    machine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    driver: str | None,
    governor: str | None,
    poll_ns: str | None,
    command: str | None,
) -> None:
    cpuidle = tmp_path / "sys/devices/system/cpu/cpuidle"
    for path, text in (
        (cpuidle / "current_driver", driver),
        (cpuidle / "current_governor", governor),
        (tmp_path / SETTING, poll_ns),
    ):
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    monkeypatch.setattr(status_view, "advice", lambda: advice(tmp_path))
    hints = [line for line in lines_of("status", "/mnt/a") if line.startswith("HINT")]
    hints += [line for line in lines_of("status") if line.startswith("hint: ")]
    assert len(hints) == (0 if command is None else 2)
    assert all("halts idle CPUs" in hint and (command or "") in hint for hint in hints)
    assert "halts" not in run("status", "--json").stdout
    monkeypatch.setattr(all_mounts, "cachefs_mounts", list)
    assert "hint" not in run("status").stdout, "nothing is served"


def test_status_of_one_mount_tells_by_its_code(machine: dict[str, Any]) -> None:
    assert run("status", "/mnt/a").exit_code == 0
    assert run("status", "/mnt/c").exit_code == 1
    assert "not mounted by cachefs" in error_of("status", "/mnt/x", code=1)
    assert len(json.loads(run("status", "/mnt/a", "--json").stdout)) == 1


def test_status_of_a_machine_without_mounts(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = RuntimeEntry("/mnt/z", "s3://z", 1, 0.0)
    monkeypatch.setattr(all_mounts, "cachefs_mounts", list)
    monkeypatch.setattr(all_mounts, "read_entries", lambda: [dead])
    assert run("status").stdout == "nothing is mounted\n"
    assert run("status", "--json").stdout == "[]\n"
    assert machine["removed"] == ["/mnt/z", "/mnt/z"]


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    command = f"{CACHEFS} mount --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_the_group_can_be_embedded() -> None:
    with pytest.raises(click.UsageError):
        main(["nonsense"], standalone_mode=False)
