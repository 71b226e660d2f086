"""Protects the mount from an origin that is slow, overloaded or unreachable.

`resilient.py` wraps any origin. Its parts are small state machines that get the time as a
parameter (`breaker.py`, `limiter.py`, `bandwidth.py`, `pace.py`), `prober.py` and `hedge.py`.

tenacity and stamina provide only the retry loop. Each step here depends on more than the number of
the try: a deadline that pauses while the origin answers others, Retry-After, one slot per try, and
the breaker. aiolimiter, aiobreaker and purgatory need asyncio.
"""

from cachefs.origin.resilience.resilient import ResilientOrigin
from cachefs.origin.resilience.settings import OriginState, Resilience

__all__ = ["OriginState", "Resilience", "ResilientOrigin"]
