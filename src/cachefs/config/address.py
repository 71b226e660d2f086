"""Check and split listening addresses `HOST:PORT`."""

from cachefs.config.record import Check

OFF = "off"
_FORMS = "such as 127.0.0.1:9567 or [::1]:9567, or off"


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port. Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f'"{address}" is no address; write HOST:PORT, {_FORMS}')
    if (":" in bare) != (host != bare):
        raise ValueError(f'"{address}" is no address; write {_FORMS}')
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value} is no address; write HOST:PORT, {_FORMS}")
    return value if value == OFF else join_address(*split_address(value.strip()))


ADDRESS = Check(_check)
