"""What stands between the mount and an origin that is slow, overloaded or away.

`resilient.py` wraps any origin. The rest are its parts, each a small state machine that is told the
time: `breaker.py`, `limiter.py`, `bandwidth.py`, `pace.py`; and `hedge.py`.

tenacity and stamina would only give the loop of a retry, and every step of ours depends on more
than the number of the try (a deadline that stands still while the origin serves others,
Retry-After, a slot per try, the breaker); aiolimiter, aiobreaker and purgatory need asyncio.
"""

from cachefs.origin.resilience.resilient import ResilientOrigin
from cachefs.origin.resilience.settings import OriginHealth, Resilience

__all__ = ["OriginHealth", "Resilience", "ResilientOrigin"]
