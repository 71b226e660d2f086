"""The states of a staged file, and the progress of its upload to the origin."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from cachefs.errors import SpoolError


class FileState(Enum):
    """The states of a staged file. The numbers are stored in the journal."""

    OPEN = 1
    """It is being written, or waits for its upload."""
    SENDING = 2
    """An upload of its present content is under way. A restart makes it OPEN."""
    CONFLICT = 3
    """The origin refused the condition: the bytes are kept until a user saves or drops them."""
    FAILED = 4
    """An upload failed: the bytes are kept, and the upload is tried again."""
    HELD = 5
    """The bytes may not be what was written, or were never closed before a power cut. They are
    kept until a user saves, drops or releases them, and never uploaded before."""
    ENDED = 6
    """It is at the origin, or was dropped. The spool no longer has it."""


class Part(NamedTuple):
    """A part of an upload: the range [offset, offset + length) of the file as it was in a
    generation. `tag` is what the origin called it, "" until it is there."""

    number: int
    offset: int
    length: int
    generation: int
    tag: str = ""

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether the part has a byte of [begin, end)."""
        return self.offset < end and begin < self.offset + self.length


@dataclass(slots=True)
class Start:
    """A request to begin an upload in parts whose answer is not known. It was made between
    `began_ns` and `ended_ns` (wall clock); 0 while it runs."""

    path: str
    write_id: str
    began_ns: int
    ended_ns: int = 0


@dataclass(slots=True)
class UploadProgress:
    """What of a file the origin has already, of one upload (`origin.writable.Upload`).

    Only `StagedFile` changes it. `parts` has the finished parts whose content is still right;
    `under_way` those that are being read or sent and whose content is still right."""

    upload_id: str
    write_id: str
    path: str
    parts: dict[int, Part] = field(default_factory=dict)
    under_way: dict[int, Part] = field(default_factory=dict)
    end: int = 0
    """No part has a byte from here on."""
    changed: set[int] = field(default_factory=set)
    """Numbers of parts whose content changed after they were read."""
    asked_generation: int = 0
    """The generation that the origin was asked to store as a whole, and may have; 0 before. A
    smaller number than the generation of those bytes if only the attributes have changed since."""

    @property
    def sent_bytes(self) -> int:
        """How many bytes of the content the origin has."""
        return sum(part.length for part in self.parts.values())

    def note_other_attributes(self, generation: int) -> None:
        """Note that attributes or path have changed since the origin was asked, if it was asked to
        store this generation."""
        if self.asked_generation == generation:
            self.asked_generation -= 1

    def begin(self, part: Part) -> None:
        """Note that a part is read and sent from now on."""
        self.parts.pop(part.number, None)
        self.under_way[part.number] = part
        self.end = max(self.end, part.offset + part.length)

    def finish(self, part: Part) -> None:
        """Note that the origin has a part."""
        self.under_way.pop(part.number, None)
        self.parts[part.number] = part
        self.end = max(self.end, part.offset + part.length)

    def stale_parts(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the numbers of the finished parts with a byte of [begin, end)."""
        return _overlapping(self.parts.values(), begin, end) if begin < self.end else ()

    def forget(self, begin: int, end: int) -> None:
        """Forget all parts with a byte of [begin, end), because it changes."""
        if begin >= self.end:
            return
        for parts in (self.parts, self.under_way):
            for number in _overlapping(parts.values(), begin, end):
                del parts[number]
                self.changed.add(number)


class Changed(Protocol):
    """What a journal and a spool know of the changes of a file."""

    size_bytes: int
    generation: int
    is_sealed: bool
    expected_version: str | None
    upload: UploadProgress | None

    @property
    def extents(self) -> object | None:
        """See `StagedContent.extents`."""
        ...


def is_only_begun(file: Changed) -> bool:
    """Return whether the spool has no change of this file: a new one without a byte, or an object
    of which nothing was changed yet, that no user has closed or synced, and that the origin was not
    asked to store. Nothing is lost with it."""
    if file.is_sealed or file.upload is not None:
        return False
    if file.extents is not None:
        return file.generation == 1
    return not (file.size_bytes or file.expected_version)


def no_longer_here(path: str, freed_bytes: int) -> SpoolError:
    """Return the error for a read of bytes that only an upload has."""
    return SpoolError(
        f"{path}: its first {freed_bytes} bytes had no room in the spool, and can be "
        "read when it is closed and at the source: give the spool more room with --spool-size"
    )


def _overlapping(parts: Iterable[Part], begin: int, end: int) -> tuple[int, ...]:
    return tuple(part.number for part in parts if part.overlaps(begin, end))
