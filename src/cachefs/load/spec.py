"""The specification and the progress of a load job. Both are stored and sent as JSON."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cachefs.errors import UsageError

MOST_JOBS = 256
NEAR_JOBS, FAR_JOBS = 32, 64
"""Most requests under way of a job that names no number, for an origin nearby and a far one."""


class LoadSpec(BaseModel):
    """What a user requests. `paths` are relative to the mount's root; "" is the whole mount."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: tuple[str, ...] = ()
    has_list: bool = False
    """The job has a file with more paths, one per line."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    mode: Literal["load", "metadata", "check", "dry-run"] = "load"
    """load: fetch the files; metadata: look up names and attributes only; check: report what is
    cached; dry-run: report what a load would fetch."""
    pin: bool = False
    jobs: Annotated[int, Field(ge=1, le=MOST_JOBS)] | None = None
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


class TierRoom(BaseModel):
    """How much of a job fits into a cache directory, in bytes of slots, if only pinned blocks stay
    there besides."""

    path: str
    medium: str
    room_bytes: int
    wanted_bytes: int
    """The part of the job for this tier: what does not fit into faster tiers, up to
    `room_bytes`."""


class Progress(BaseModel):
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
    tiers: list[TierRoom] = []


class JobReport(BaseModel):
    """The report that `cachefs jobs` shows about a job. Times are seconds since 1970."""

    id: str
    spec: LoadSpec
    state: State = State.NEW
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    problem: str | None = None
    progress: Progress = Progress()


def load_spec(fields: object) -> LoadSpec:
    """Validate `fields` of a JSON request and return the specification. Raises `UsageError`."""
    try:
        return LoadSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "a load job"
        raise UsageError(f"{where}: {first['msg']}") from None
