"""What to replace, and whether to: one file a policy, one interface (`base.py`). Pure.

A mount has one `History` and, for each tier, one policy object that shares it.
"""

from cachefs.cache.policies.base import EvictionPolicy, History
from cachefs.cache.policies.epoch import EpochPolicy, ReuseHistory
from cachefs.cache.policies.lru import LruPolicy
from cachefs.cache.policies.none import NoReplacement
from cachefs.cache.policies.sieve import SievePolicy
from cachefs.cache.policies.two_random import TwoRandomPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (EpochPolicy, LruPolicy, SievePolicy, TwoRandomPolicy, NoReplacement)
}

DEFAULT_POLICY = EpochPolicy.name


def make_history(name: str) -> History:
    """What all tiers of a mount share under the policy `name`."""
    return ReuseHistory() if name == EpochPolicy.name else History()


def make_policy(name: str, history: History) -> EvictionPolicy:
    """Raises `KeyError` for a name that isn't in `POLICIES`; the configuration checks it."""
    return POLICIES[name](history)


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "EvictionPolicy",
    "History",
    "make_history",
    "make_policy",
]
