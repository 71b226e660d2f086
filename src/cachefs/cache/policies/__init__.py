"""Eviction policies: which block to replace, and whether to. Pure: no I/O.

All share the interface in `base.py`. A mount has one `History`. Each tier has its own policy
object, which uses that `History`.
"""

from cachefs.cache.policies.base import EvictionPolicy, History
from cachefs.cache.policies.epoch import EpochPolicy, ReuseHistory
from cachefs.cache.policies.sieve import SievePolicy
from cachefs.cache.policies.simple import LruPolicy, NoReplacement, TwoRandomPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (EpochPolicy, LruPolicy, SievePolicy, TwoRandomPolicy, NoReplacement)
}

DEFAULT_POLICY = EpochPolicy.name


def make_history(name: str) -> History:
    """Return the history that all tiers of a mount share under the policy `name`."""
    return ReuseHistory() if name == EpochPolicy.name else History()


def make_policy(name: str, history: History) -> EvictionPolicy:
    """Return a policy object for one tier. Raises `KeyError` for a name that is not in `POLICIES`;
    the configuration checks names before."""
    return POLICIES[name](history)


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "EvictionPolicy",
    "History",
    "make_history",
    "make_policy",
]
