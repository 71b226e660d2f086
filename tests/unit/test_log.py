import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from cachefs import log
from cachefs.errors import UsageError


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("cachefs.x", logging.INFO, "f.py", 1, message, (), exc_info)


def raised() -> ValueError:
    try:
        raise ValueError("broken")
    except ValueError as error:
        return error


@pytest.mark.parametrize("tracebacks", [True, False])
def test_a_record_is_one_line(tracebacks: bool) -> None:
    line = log.LineFormatter(tracebacks).format(record("two\nlines", raised()))
    assert len(line.splitlines()) == 1
    assert "INFO cachefs.x: two | lines" in line
    assert "ValueError: broken" in line
    assert ("Traceback" in line) == tracebacks


def test_warn_once_warns_once_per_key(caplog: pytest.LogCaptureFixture, expect_log: object) -> None:
    expect_log("odd key")
    logger = logging.getLogger("cachefs.test")
    for key in ("a", "b", "a"):
        log.warn_once(logger, key, "odd key %s", key)
    assert [r.getMessage() for r in caplog.records] == ["odd key a", "odd key b"]


def test_setup_appends_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cachefs.log"
    program = (
        "import logging, sys; from pathlib import Path; from cachefs import log\n"
        "log.setup(log_file=Path(sys.argv[1]))\n"
        "logging.getLogger('cachefs.x').info('hello'); logging.getLogger('cachefs.x').debug('no')\n"
        "logging.getLogger('other').info('no')\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program, str(file)], check=True)
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    assert all(line.endswith("Z INFO cachefs.x: hello") for line in lines)


def test_a_name_that_is_no_utf_8_is_logged(tmp_path: Path) -> None:
    file = tmp_path / "cachefs.log"
    program = (
        "import logging, sys; from pathlib import Path; from cachefs import log\n"
        "log.setup(log_file=Path(sys.argv[1]))\n"
        "logging.getLogger('cachefs.x').info('no %s', 'a' + chr(0xdcff))\n"
    )
    command = [sys.executable, "-c", program, str(file)]
    assert subprocess.run(command, check=True, capture_output=True).stderr == b""
    assert file.read_text().endswith("no a\\udcff\n")


def test_a_log_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--log-file"):
        log.open_log_file(tmp_path)


def test_json_is_one_object_a_line() -> None:
    text = log.JsonFormatter(tracebacks=True).format(record('two\nlines "and" ünïcödé', raised()))
    assert "\n" not in text
    fields = json.loads(text)
    assert fields["message"] == 'two\nlines "and" ünïcödé'
    assert (fields["level"], fields["logger"]) == ("INFO", "cachefs.x")
    assert fields["error"] == "ValueError: broken"
    assert "Traceback" in fields["traceback"]
    assert datetime.fromisoformat(fields["time"]).tzinfo is not None
    brief = json.loads(log.JsonFormatter(tracebacks=False).format(record("text", raised())))
    assert set(brief) == {"time", "level", "logger", "message", "error"}


LOGGING = (
    "import logging, os, sys; from pathlib import Path; from cachefs import log\n"
    "logger = logging.getLogger('cachefs.x')\n"
)


def run(program: str, *args: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOGGING + program, *map(str, args)]
    return subprocess.run(command, check=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_journald_is_told_levels_and_no_times(tmp_path: Path, log_format: str) -> None:
    """As a stream we take a file: what counts is that JOURNAL_STREAM names it."""
    program = (
        "info = os.fstat(2)\n"
        "os.environ['JOURNAL_STREAM'] = f'{info.st_dev}:{info.st_ino}'\n"
        "log.setup(log_format=sys.argv[1], debug=True)\n"
        "for level in (10, 20, 30, 40, 50): logger.log(level, 'hello')\n"
    )
    with (tmp_path / "stream").open("w") as stream:
        run(program, log_format, stderr=stream)
    lines = (tmp_path / "stream").read_text().splitlines()
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<3>"]
    rest = [line[3:] for line in lines]
    if log_format == "text":
        assert rest == ["cachefs.x: hello"] * 5
    else:
        assert [json.loads(line)["message"] for line in rest] == ["hello"] * 5


def test_another_stream_than_the_journals_has_times(tmp_path: Path) -> None:
    program = "os.environ['JOURNAL_STREAM'] = '1:2'\nlog.setup()\nlogger.info('hello')\n"
    said = run(program, stderr=subprocess.PIPE).stderr
    assert said.endswith("Z INFO cachefs.x: hello\n")


def test_a_file_is_rotated_and_stderr_follows(tmp_path: Path) -> None:
    file = tmp_path / "log"
    program = (
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "os.dup2(fd, 2)\n"
        "log.setup(log_file=Path(sys.argv[1]), max_bytes=1000)\n"
        "for number in range(100): logger.info('record %d', number)\n"
        "print('from elsewhere', file=sys.stderr)\n"
    )
    run(program, file)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"log", *(f"log.{number}" for number in range(1, log.KEPT_FILES + 1))}
    assert all(path.stat().st_size <= 1100 for path in tmp_path.iterdir())
    assert "record 99\nfrom elsewhere\n" in file.read_text()


@pytest.mark.parametrize("max_bytes", [0, 100_000])
def test_a_file_that_logrotate_moves_is_begun_anew(tmp_path: Path, max_bytes: int) -> None:
    file = tmp_path / "log"
    program = (
        "file = Path(sys.argv[1])\n"
        "log.setup(log_file=file, max_bytes=int(sys.argv[2]))\n"
        "logger.info('first'); file.rename(f'{file}.old'); logger.info('second')\n"
        "file.unlink(); logger.info('third')\n"
    )
    run(program, file, max_bytes)
    assert "first" in (tmp_path / "log.old").read_text()
    assert "second" not in (tmp_path / "log.old").read_text()
    assert file.read_text().endswith("third\n")
    assert "second" not in file.read_text()


def test_a_file_that_cannot_be_renamed_grows_and_says_so_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for number in range(1, log.KEPT_FILES + 1):
        (tmp_path / f"log.{number}").mkdir()
    program = (
        "log.setup(log_file=Path(sys.argv[1]), max_bytes=1000)\n"
        "for number in range(100): logger.info('record %d', number)\n"
    )
    run(program, file, stderr=subprocess.DEVNULL)
    lines = file.read_text().splitlines()
    assert sum("can't rename" in line for line in lines) == 1
    assert sum(" record " in line for line in lines) == 100
