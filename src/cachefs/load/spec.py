"""What a load job is to do, and how far it has come. Both are kept on disk and sent as JSON."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cachefs.errors import UsageError

MOST_JOBS = 256
DEFAULT_JOBS = 32


class LoadSpec(BaseModel):
    """What was asked for. `paths` are relative to the mount's root, "" for all of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: tuple[str, ...] = ()
    has_list: bool = False
    """More paths, one a line, stand in a file of the job."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    mode: Literal["load", "metadata", "check", "dry-run"] = "load"
    """All of it; names and attributes alone; say what is cached; say what would be fetched."""
    pin: bool = False
    jobs: Annotated[int, Field(ge=1, le=MOST_JOBS)] = DEFAULT_JOBS
    """Requests under way at a time."""


class State(StrEnum):
    """Of a job. The last four are final, but for `resume`."""

    NEW = "new"
    """Not accepted yet: its list is still coming."""
    QUEUED = "queued"
    EXPANDING = "expanding"
    LOADING = "loading"
    VERIFYING = "verifying"
    DONE = "done"
    INCOMPLETE = "incomplete"
    """It ended, and not everything is cached."""
    FAILED = "failed"
    """It could not be carried out."""
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (State.DONE, State.INCOMPLETE, State.FAILED, State.CANCELLED)


class TierRoom(BaseModel):
    """What a cache directory can take of a job, slots rounded up, if nothing else stays there."""

    path: str
    medium: str
    room_bytes: int
    wanted_bytes: int
    """Of the job, as far as faster tiers don't take it."""


class Progress(BaseModel):
    """Counts of files, and of their bytes."""

    directories: int = 0
    """Listed."""
    files: int = 0
    bytes: int = 0
    """Found: what the job is about."""
    cached_files: int = 0
    cached_bytes: int = 0
    """Of these, in the cache already before anything was fetched."""
    wanted_files: int = 0
    wanted_bytes: int = 0
    """To be fetched."""
    fetched_files: int = 0
    fetched_bytes: int = 0
    excess_files: int = 0
    excess_bytes: int = 0
    """Not fetched: there is no room for them."""
    failed_files: int = 0
    verified_files: int = 0
    verified_bytes: int = 0
    """Found in the cache at the end."""
    waiting_for: str | None = None
    """Why nothing goes on for the moment."""
    tiers: list[TierRoom] = []


class JobReport(BaseModel):
    """A job as `cachefs jobs` shows it. Times are seconds since 1970."""

    id: str
    spec: LoadSpec
    state: State = State.NEW
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    problem: str | None = None
    progress: Progress = Progress()


def load_spec(fields: object) -> LoadSpec:
    """Raises `UsageError`."""
    try:
        return LoadSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "a load job"
        raise UsageError(f"{where}: {first['msg']}") from None
