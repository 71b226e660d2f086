"""The specification and the progress of a load job. Both are stored and sent as JSON."""

from dataclasses import asdict, dataclass, field, fields
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

from cachefs.config.fields import CHOICE, SWITCH, TEXTS, optional_count
from cachefs.config.record import FieldError, Record
from cachefs.errors import UsageError

MOST_JOBS = 256
NEAR_JOBS, FAR_JOBS = 32, 64
"""Most requests under way of a job that names no number, for an origin nearby and a far one."""


class LoadSpec(Record):
    """What a user requests. `paths` are relative to the mount's root; "" is the whole mount."""

    paths: Annotated[tuple[str, ...], TEXTS] = ()
    has_list: Annotated[bool, SWITCH] = False
    """The job has a file with more paths, one per line."""
    include: Annotated[tuple[str, ...], TEXTS] = ()
    exclude: Annotated[tuple[str, ...], TEXTS] = ()
    mode: Annotated[Literal["load", "metadata", "check", "dry-run"], CHOICE] = "load"
    """load: fetch the files; metadata: look up names and attributes only; check: report what is
    cached; dry-run: report what a load would fetch."""
    pin: Annotated[bool, SWITCH] = False
    jobs: Annotated[int | None, optional_count(1, MOST_JOBS)] = None
    """Most requests under way at a time; None for `NEAR_JOBS` or `FAR_JOBS`."""


class State(StrEnum):
    """The state of a job. The last four are final, except that `resume` runs the job again."""

    NEW = "new"
    """Not accepted yet: its list may be incomplete."""
    QUEUED = "queued"
    EXPANDING = "expanding"
    LOADING = "loading"
    VERIFYING = "verifying"
    DONE = "done"
    INCOMPLETE = "incomplete"
    """The job has ended, and not everything is cached."""
    FAILED = "failed"
    """The job could not run."""
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (State.DONE, State.INCOMPLETE, State.FAILED, State.CANCELLED)


@dataclass(slots=True)
class TierRoom:
    """How much of a job fits into a cache directory, in bytes of slots, if only pinned blocks stay
    there besides."""

    path: str
    medium: str
    room_bytes: int
    wanted_bytes: int
    """The part of the job for this tier: what does not fit into faster tiers, up to
    `room_bytes`."""


@dataclass(slots=True)
class Progress:
    """Counts of files, and of their bytes."""

    directories: int = 0
    """Directories listed."""
    files: int = 0
    bytes: int = 0
    """Files that the job has found, and their bytes."""
    cached_files: int = 0
    cached_bytes: int = 0
    """The part of `bytes` that was cached before the job fetched anything."""
    wanted_files: int = 0
    wanted_bytes: int = 0
    """The part of `bytes` that was missing."""
    fetched_files: int = 0
    fetched_bytes: int = 0
    excess_files: int = 0
    excess_bytes: int = 0
    """The part of `wanted_bytes` that is not fetched because there is no room."""
    failed_files: int = 0
    verified_files: int = 0
    verified_bytes: int = 0
    """The part of `bytes` that was in the cache at the end."""
    waiting_for: str | None = None
    """Why the job makes no progress at the moment; None if it does."""
    tiers: list[TierRoom] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class JobReport:
    """The report that `cachefs jobs` shows about a job. Times are seconds since 1970."""

    id: str
    spec: LoadSpec
    state: State = State.NEW
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    problem: str | None = None
    progress: Progress = field(default_factory=Progress)

    def values(self) -> dict[str, Any]:
        """Return the report as it is stored and sent: only what JSON has."""
        return {**asdict(self), "spec": self.spec.values()}


def load_spec(values: object) -> LoadSpec:
    """Check the fields of a JSON request and return the specification. Raises `UsageError`."""
    try:
        return LoadSpec(values)
    except FieldError as error:
        where = ".".join(str(part) for part in error.place) or "a load job"
        raise UsageError(f"{where}: {error}") from None


def read_report(values: Any) -> JobReport:
    """Return the report that `JobReport.values` has made, of this version or another one. Raises
    `TypeError` or `ValueError` for anything else."""
    report: JobReport = _read(JobReport, values)
    return report


def _read(kind: Any, value: Any) -> Any:
    """Return the value of a field of type `kind`. Leaves out fields that this version doesn't
    have."""
    if kind in (JobReport, Progress, TierRoom):
        kinds = {each.name: each.type for each in fields(kind)}
        known = {name: _read(kinds[name], value[name]) for name in kinds if name in value}
        return kind(**known)
    if get_origin(kind) is list:
        return [_read(get_args(kind)[0], each) for each in value]
    if isinstance(kind, type) and issubclass(kind, Record | Enum):
        return kind(value)
    if isinstance(value, int) and not isinstance(value, kind):
        value = float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value
