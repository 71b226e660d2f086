"""`Entries`: the table of the files whose content is in the spool, and what follows from an entry.

An entry begins with a file's first change. It ends when the origin and the cache have the content,
or when the bytes wait for a user. The name of an unsent file is held in the namespace, and the
relay passes its closes on.
"""

from collections.abc import Iterable

from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.writes.written_file import Marks, State, WrittenFile


class Entries:
    """The entries of one writable mount, by inode number. Loop thread only; all methods are
    atomic."""

    def __init__(
        self,
        namespace: Namespace,
        changes: OwnChanges,
        readers: Readers,
        marks: Marks | None,
    ) -> None:
        self._namespace = namespace
        self._changes = changes
        self._readers = readers
        self._marks = marks
        self._files: dict[int, WrittenFile] = {}

    def get(self, ino: int) -> WrittenFile | None:
        """Return the entry of an inode; None for a clean file."""
        return self._files.get(ino)

    def all(self) -> Iterable[WrittenFile]:
        """Return all entries."""
        return self._files.values()

    def has(self, file: WrittenFile) -> bool:
        """Return whether this is still the entry of its inode."""
        return self._files.get(file.ino) is file

    def is_stored(self, file: WrittenFile) -> bool:
        """Return whether this is still the entry of its inode, and the origin has its content."""
        return file.state is State.STORED and self.has(file)

    def add(self, file: WrittenFile) -> None:
        """Begin an entry with unsent changes."""
        self._files[file.ino] = file
        # The spool notes the end of a name first.
        file.is_named = bool(file.staged.path) and self._changes.is_named(file.ino)
        if file.is_named:
            self.mark(file, True)

    def mark(self, file: WrittenFile, is_unsent: bool) -> None:
        """Note that the file has unsent changes now, or has none any more."""
        if is_unsent:
            self._changes.hold(file.ino)
        if self._marks is not None:
            self._marks.mark_unsent(file.ino, is_unsent)

    def take_base(self, file: WrittenFile) -> None:
        """Read the rest of the file from the base of its staged file from now on, if it has one."""
        staged = file.staged
        if staged.base is not None:
            before = self._namespace.ref_at(staged.path, staged.base)
            file.base = self._readers.new(self._namespace.inode(file.ino), before)

    def end(self, file: WrittenFile) -> None:
        """Remove the entry and the bytes of a stored file."""
        self.remove(file)
        file.staged.discard()

    def remove(self, file: WrittenFile) -> None:
        """Remove the entry only."""
        del self._files[file.ino]

    def give_up(self, file: WrittenFile) -> None:
        """End the entry of a conflict, or of a file whose unsent changes a user has dropped. The
        name shows the origin's version from now on."""
        self.remove(file)
        self.mark(file, False)
        self._changes.give_up(file.ino)
