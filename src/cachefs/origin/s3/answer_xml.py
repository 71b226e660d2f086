"""Parses the XML of answers: a root with texts, and rows that have texts.

Expat does it in one pass, so the time is proportional to the length. Nothing but known texts is
kept, and of the rows only one at a time: Python's objects for very short tags would need 30 times
the memory of the answer. A document type is refused, and with it all entities but the five of XML.
"""

from collections.abc import Callable
from typing import NamedTuple
from xml.parsers import expat

from cachefs.errors import BadDataError

_MOST_TAGS = 100_000
"""1,000 rows of 10 texts have 22,000."""
_TEXTS = frozenset(
    (
        *("Key", "Size", "LastModified", "ETag", "Prefix", "EncodingType", "IsTruncated"),
        *("Code", "UploadId", "PartNumber", "NextPartNumberMarker", "Initiated"),
    )
)
"""The names of all texts that an answer may be asked for. Others are not kept."""
_MOST_DEPTH = 20
_ROW_DEPTH = 2
_TEXT_DEPTH = 3


class Document(NamedTuple):
    """A parsed answer, without its rows. Of several texts of the same name the first one counts.
    Names have no namespace prefix."""

    root: str
    """The name of the root."""
    texts: dict[str, str]
    """The texts of the children of the root, by name."""


TakeRow = Callable[[str, dict[str, str]], None]
"""Called with the name of each child of the root, and the texts of its children by name. The next
row overwrites them."""


class _RootFound(Exception):
    pass


def parse(
    body: bytes, take_row: TakeRow = lambda name, texts: None, most_tags: int = _MOST_TAGS
) -> Document:
    """Return the document, and give its rows to `take_row`. White space may stand before it. Raises
    `BadDataError`."""
    builder = _Builder(take_row)
    parser = _parser()
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.text
    try:
        if body.count(b"<") > most_tags:
            raise ValueError
        parser.Parse(body.lstrip(), True)
    except (expat.ExpatError, ValueError):
        raise BadDataError("the answer is not valid XML of S3") from None
    return Document(builder.root, builder.texts)


def root_of(body: bytes) -> str | None:
    """Return the name of the root, even if the document is broken after it. None if there is no
    root."""

    def start(name: str, _: dict[str, str]) -> None:
        raise _RootFound(_local(name))

    parser = _parser()
    parser.StartElementHandler = start
    try:
        parser.Parse(body.lstrip(), True)
    except _RootFound as found:
        return str(found)
    except (expat.ExpatError, ValueError):
        pass
    return None


def _parser() -> expat.XMLParserType:
    parser = expat.ParserCreate("utf-8", intern=None)  # else each other name would be kept
    parser.StartDoctypeDeclHandler = _refuse
    return parser


def _refuse(*_: object) -> None:
    raise ValueError


def _local(name: str) -> str:
    return name.rpartition(":")[2]


class _Builder:
    def __init__(self, take_row: TakeRow) -> None:
        self.root = ""
        self.texts: dict[str, str] = {}
        self._take_row = take_row
        self._row: dict[str, str] = {}
        self._depth = 0
        self._pieces: list[str] = []

    def start(self, name: str, _: dict[str, str]) -> None:
        self._depth += 1
        self._pieces = []
        if self._depth == 1:
            self.root = _local(name)
        elif self._depth > _MOST_DEPTH:
            raise ValueError

    def text(self, piece: str) -> None:
        self._pieces.append(piece)

    def end(self, name: str) -> None:
        if self._depth == _ROW_DEPTH:
            self._keep(self.texts, name)
            self._take_row(_local(name), self._row)
            self._row.clear()
        elif self._depth == _TEXT_DEPTH:
            self._keep(self._row, name)
        self._pieces = []
        self._depth -= 1

    def _keep(self, texts: dict[str, str], name: str) -> None:
        name = _local(name)
        if name in _TEXTS:
            texts.setdefault(name, "".join(self._pieces))
