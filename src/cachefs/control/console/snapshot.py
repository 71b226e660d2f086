"""The figures that the console's pages poll: the values of `/metrics`, health and load jobs."""

import json
import math
import time
from collections.abc import Mapping
from typing import Literal

import trio

from cachefs.control.exporter import Exporter
from cachefs.control.mount_state import MountState
from cachefs.load.spec import JobReport
from cachefs.metrics import BOUNDS_S

_LEAST_AGE_S = 1.0
"""A snapshot is computed again when it is this old and a page asks."""

_OF_ERRORS: tuple[Literal["errno", "operation", "count", "last_at"], ...] = (
    "errno",
    "operation",
    "count",
    "last_at",
)
"""Without the path and the text, which names it."""
_ENDED_JOBS = 5
"""The number of ended jobs that are shown, the latest."""


class Snapshots:
    """Computes a snapshot at most once a second, however many pages ask, and none if none asks.
    It has no names of files: every user of the machine can read it."""

    def __init__(self, state: MountState, exporter: Exporter) -> None:
        self._state = state
        self._exporter = exporter
        self._computed_at = -math.inf
        self._content = b""

    def content(self) -> bytes:
        """Return the present snapshot as JSON."""
        now = trio.current_time()
        if now - self._computed_at >= _LEAST_AGE_S:
            self._content = json.dumps(self._snapshot(), separators=(",", ":")).encode()
            self._computed_at = now
        return self._content

    def _snapshot(self) -> Mapping[str, object]:
        state = self._state
        return {
            "at": time.time(),
            "unready": state.unready_reason(),
            "problem": state.unsent_problem(),
            "data_path": state.data_path.name.value,
            "bounds_s": BOUNDS_S,
            "metrics": self._exporter.figures(),
            "errors": [
                {name: error[name] for name in _OF_ERRORS}
                for error in state.requests.last_errors.report()
            ],
            "jobs": _shown_jobs(state.jobs.all()),
        }


def _shown_jobs(reports: list[JobReport]) -> list[Mapping[str, object]]:
    """Return the progress of the jobs that have not ended, and of the last ones that have."""
    ended = [report.id for report in reports if report.state.is_final]
    hidden = set(ended[:-_ENDED_JOBS])
    return [
        {
            "id": report.id,
            "state": report.state.value,
            "mode": report.spec.mode,
            "pin": report.spec.pin,
            "started_at": report.started_at,
            "ended_at": report.ended_at,
            **{name: getattr(report.progress, name) for name in _PROGRESS},
        }
        for report in reports
        if report.id not in hidden
    ]


_PROGRESS = (
    *("files", "bytes", "cached_files", "cached_bytes", "wanted_files", "wanted_bytes"),
    *("fetched_files", "fetched_bytes", "failed_files", "verified_files", "verified_bytes"),
)
