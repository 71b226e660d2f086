"""Parses the XML of answers to writes: a root with texts, and rows that have texts.

Expat does it in one pass, so the time is proportional to the length. A document type is refused,
and with it all entities but the five of XML.
"""

from typing import NamedTuple
from xml.parsers import expat

from cachefs.errors import BadDataError

_MOST_TAGS = 100_000
"""1,000 rows of 10 texts have 22,000."""
_MOST_DEPTH = 20
_ROW_DEPTH = 2
_TEXT_DEPTH = 3


class Document(NamedTuple):
    """A parsed answer. Of several texts of the same name the first one counts. Names have no
    namespace prefix."""

    root: str
    """The name of the root."""
    texts: dict[str, str]
    """The text of each child of the root, by name."""
    rows: list[tuple[str, dict[str, str]]]
    """The name of each child of the root, and the texts of its children by name."""


class _RootFound(Exception):
    pass


def parse(body: bytes) -> Document:
    """Return the document. White space may stand before it. Raises `BadDataError`."""
    builder = _Builder()
    parser = _parser()
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.text
    try:
        if body.count(b"<") > _MOST_TAGS:
            raise ValueError
        parser.Parse(body.lstrip(), True)
    except (expat.ExpatError, ValueError):
        raise BadDataError("the answer to a write is not valid XML of S3") from None
    return builder.document


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
    parser = expat.ParserCreate("utf-8")
    parser.StartDoctypeDeclHandler = _refuse
    return parser


def _refuse(*_: object) -> None:
    raise ValueError


def _local(name: str) -> str:
    return name.rpartition(":")[2]


class _Builder:
    def __init__(self) -> None:
        self.document = Document("", {}, [])
        self._depth = 0
        self._pieces: list[str] = []

    def start(self, name: str, _: dict[str, str]) -> None:
        self._depth += 1
        self._pieces = []
        if self._depth == 1:
            self.document = self.document._replace(root=_local(name))
        elif self._depth == _ROW_DEPTH:
            self.document.rows.append((_local(name), {}))
        elif self._depth > _MOST_DEPTH:
            raise ValueError

    def text(self, piece: str) -> None:
        self._pieces.append(piece)

    def end(self, name: str) -> None:
        if self._depth == _ROW_DEPTH:
            self.document.texts.setdefault(_local(name), "".join(self._pieces))
        elif self._depth == _TEXT_DEPTH:
            self.document.rows[-1][1].setdefault(_local(name), "".join(self._pieces))
        self._pieces = []
        self._depth -= 1
