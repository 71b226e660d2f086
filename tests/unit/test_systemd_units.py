"""The units as `cachefs install-systemd` puts them in place."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cachefs.cli.install_systemd import link_helper, units
from cachefs.config import load_mount_config

CACHEFS = Path(sys.executable).with_name("cachefs")
NAMES = {"cachefs@.service", "cachefs-load@.service", "cachefs-load@.timer"}
SYSTEM_NAMES = {"cachefs-keeper.service"}
PROJECT = Path(__file__).parents[2]

MAKES_A_MOUNT_NAMESPACE = (
    "Private(Mounts|Tmp|Devices|Users)|Protect(System|Home|Proc|Hostname|Kernel\\w+|ControlGroups)|"
    "(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|TemporaryFileSystem|"
    "MountFlags|DynamicUser|RootDirectory|RootImage|LogNamespace"
)


def install(*args: object, **environment: str) -> str:
    done = subprocess.run(
        [CACHEFS, "install-systemd", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("user", [False, True])
def test_systemd_has_nothing_to_say_against_the_units(tmp_path: Path, user: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    install(*(["--user"] if user else []), "--dir", tmp_path)
    names = NAMES if user else NAMES | SYSTEM_NAMES
    assert {file.name for file in tmp_path.iterdir()} == names
    instances = [tmp_path / name.replace("@", "@data") for name in sorted(names)]
    done = subprocess.run(
        ["systemd-analyze", *(["--user"] if user else []), "verify", *instances],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    # Its exit code is 0 even for unknown keys and unreadable values.
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_nothing_hides_the_mount_from_the_host() -> None:
    text = units(False, CACHEFS)["cachefs@.service"]
    assert not re.search(f"^({MAKES_A_MOUNT_NAMESPACE})=", text, re.MULTILINE)


def test_a_users_unit_lets_fusermount_gain_privileges() -> None:
    """Each of these implies NoNewPrivileges in a user's service manager, or is it."""
    text = units(True, CACHEFS)["cachefs@.service"]
    keys = "NoNewPrivileges|SystemCall|Restrict|LockPersonality|MemoryDeny|Capability|Ambient"
    assert not re.search(f"^({keys})", text, re.MULTILINE)


def test_the_command_of_this_installation_is_started(tmp_path: Path) -> None:
    install("--dir", tmp_path)
    text = (tmp_path / "cachefs@.service").read_text()
    assert f"ExecStart={CACHEFS} mount --foreground --config /etc/cachefs/%i.toml\n" in text
    odd = units(True, Path('/a b/50%/"c"/cachefs'))["cachefs@.service"]
    assert 'ExecStart="/a b/50%%/\\"c\\"/cachefs" mount' in odd


def test_a_users_units_and_directory(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}
    said = install("--user", "--dry-run", **home)
    assert not list(tmp_path.iterdir())
    assert f"would write {tmp_path}/.config/systemd/user/cachefs@.service" in said
    said = install("--user", **home)
    assert "systemctl --user enable --now cachefs@NAME" in said
    assert (tmp_path / ".config/cachefs").stat().st_mode & 0o777 == 0o700
    text = (tmp_path / ".config/systemd/user/cachefs@.service").read_text()
    assert "%h/.config/cachefs/%i.toml" in text
    assert "/etc/cachefs" not in text
    assert install("--user", **home).count("is up to date") == len(NAMES)


def test_what_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [CACHEFS, "install-systemd", "--dir", tmp_path / "file"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cachefs: error: can't write ")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_an_installed_wheel_has_the_units(tmp_path: Path) -> None:
    """Built from a copy, as setuptools leaves things behind in the tree, and without the compiled
    part, which takes long and is not asked for here."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, tree)
    (tree / "scripts").mkdir()
    for name in ("version", "fetch"):
        shutil.copy(PROJECT / "scripts" / name, tree / "scripts")
    shutil.copytree(
        PROJECT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    (tree / "src/cachefs/_version.py").write_text('__version__ = "1.2.3.dev4+g5"\n')
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    without_relay = os.environ | {"CC": "true"}
    subprocess.run(build, check=True, timeout=600, capture_output=True, env=without_relay)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "import cachefs; from cachefs.cli.install_systemd import units\n"
        "assert cachefs.__file__.startswith(sys.argv[1])\n"
        "assert cachefs.__version__ == '1.2.3.dev4+g5'\n"
        "print(*[*units(False, Path('/x')), *units(True, Path('/x'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert sorted(done.stdout.split()) == sorted([*NAMES, *NAMES, *SYSTEM_NAMES])
    entry_points = tmp_path / "site/cachefs-1.2.3.dev4+g5.dist-info/entry_points.txt"
    assert "mount.cachefs = cachefs.cli.mount_helper:main" in entry_points.read_text()


def test_the_link_for_mount(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, link = tmp_path / "mount.cachefs", tmp_path / "sbin"
    target.write_text("")
    link_helper(link, target, dry_run=True)
    assert not link.exists()
    link.symlink_to(tmp_path / "gone")
    for said in ("linked", "up to date"):
        link_helper(link, target, dry_run=False)
        assert said in capsys.readouterr().out
        assert link.resolve() == target
    link.unlink()
    link.write_text("somebody else's")
    link_helper(link, target, dry_run=False)
    assert "left" in capsys.readouterr().out
    assert link.read_text() == "somebody else's"


def test_the_instance_in_the_document_is_one(tmp_path: Path) -> None:
    text = (PROJECT / "docs/SYSTEMD.md").read_text().partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "data.toml"
    file.write_text(text)
    config = load_mount_config(None, None, {}, file)
    assert config.mountpoint == Path("/mnt/data")
