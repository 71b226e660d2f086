"""Maps errors of hdfs-native to `cachefs.errors`.

If a NameNode refuses a request, hdfs-native raises a `RuntimeError`. Its text holds the name of a
Java class and a stack trace of the server; only the name is useful to users.
"""

import re

from cachefs.errors import (
    AccessDeniedError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
)

_KIND = re.compile(r'^(\w+)\("?([\w.$]+(?:Exception|Error))?')
_DENIED = ("AccessControlException", "AuthorizationException", "AuthenticationException")
_BUSY = ("RetriableException", "ServerTooBusyException")
_TEMPORARY = ("StandbyException", "SafeModeException", "LeaseExpiredException", "ConnectException")
_OF_ONE_FILE = (
    "BlocksNotFound",
    "ECError",
    "InvalidPath",
    "UnsupportedErasureCodingPolicy",
    "UnsupportedFeature",
)
"""Errors of hdfs-native that a retry does not change."""
_SECURITY = ("SASLError", "GSSAPIError", "NoSASLMechanism")


def is_of_the_namenode(error: BaseException) -> bool:
    """Whether another NameNode may succeed, because this one is standby or unreachable."""
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return False
    return isinstance(error, OSError) or "StandbyException" in str(error)


def from_hdfs_native(subject: str, error: BaseException) -> OriginError:
    """Return the exception for `error`. `subject` is the URL of the failed access. The server's
    stack trace is not shown."""
    if isinstance(error, OriginError):
        return error
    text = str(error)
    if isinstance(error, FileNotFoundError | UnicodeEncodeError):
        return NotFoundError(f"{subject} does not exist")
    if "(is not a directory)" in text:
        return NotFoundError(f"{subject} does not exist: a part of the path is a file")
    found = _KIND.match(text)
    kind, java = found.groups() if found else (type(error).__name__, None)
    java = (java or "").rpartition(".")[2]
    if java in _DENIED:
        return AccessDeniedError(
            f"access denied to {subject} ({java}): check the user (HADOOP_USER_NAME or Kerberos) "
            "and the permissions"
        )
    if java in _BUSY:
        return OriginBusyError(f"{subject} can't be read ({java})")
    if kind in _SECURITY:
        return AccessDeniedError(
            f"can't log in to read {subject} ({kind}): check the Kerberos ticket (klist) and "
            "HADOOP_CONF_DIR"
        )
    is_answer = bool(java) and java not in _TEMPORARY and not isinstance(error, OSError)
    if is_answer or kind in _OF_ONE_FILE or isinstance(error, NotImplementedError):
        return RefusedError(f"{subject} can't be read: HDFS refuses it ({java or kind})")
    if isinstance(error, OSError):
        return OriginUnavailableError(f"{subject} can't be read: {text.splitlines()[0]}")
    return OriginUnavailableError(f"{subject} can't be read ({java or kind})")
