"""Panics of libraries that are written in Rust: no `Exception`, so nothing that expects one holds
them, and one of them would end the daemon."""


def is_panic(error: BaseException) -> bool:
    """Whether a library has given up over what it was asked, or answered."""
    return type(error).__name__ == "PanicException"
