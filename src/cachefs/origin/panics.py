"""Panics of libraries that are written in Rust. A panic is no `Exception`, so `except Exception`
does not catch it, and an uncaught one would end the daemon."""


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a Rust panic, caused by the arguments or by the server's answer."""
    return type(error).__name__ == "PanicException"
