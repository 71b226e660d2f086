import logging
import subprocess
import sys
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


def test_a_log_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--log-file"):
        log.open_log_file(tmp_path)
