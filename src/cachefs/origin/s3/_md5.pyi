from collections.abc import Iterable

from cachefs.types import Buffer

def of_each(buffers: Iterable[Buffer]) -> list[bytes]: ...
