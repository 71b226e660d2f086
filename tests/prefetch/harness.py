"""What prefetchers need beside names, a cache and readers."""

import trio


class FreeThrottle:
    """Lets every request begin at once, and counts those under way."""

    def __init__(self) -> None:
        self.under_way = 0

    async def begin(self, size_bytes: int = 0, requests: int = 1) -> None:
        await trio.lowlevel.checkpoint()
        self.under_way += requests

    def end(self, size_bytes: int = 0, requests: int = 1) -> None:
        self.under_way -= requests
