"""Finds the NameNodes of an `hdfs://` URL from the site's `core-site.xml` and `hdfs-site.xml`."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from cachefs.errors import UsageError
from cachefs.origin.options import OriginOptions
from cachefs.trusted_path import read_file

DEFAULT_PORT = 8020
"""The RPC port of a NameNode, for a URL with a host but no port."""

_AUTHORITY = re.compile(r"[A-Za-z0-9_.-]+(:\d{1,5})?|\[[0-9A-Fa-f:]+\]:\d{1,5}")
_MOST_SITE_BYTES = 16 << 20
_PLAIN_FAILOVER = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"


@dataclass(frozen=True, slots=True)
class NameNode:
    """One NameNode. `config` has properties for hdfs-native that override the site's files."""

    address: str
    config: dict[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class HdfsTarget:
    """The mounted directory. `authority` is `host:port` or the name of a nameservice. `root` is the
    absolute path of the directory, empty for `/`."""

    authority: str
    root: str
    namenodes: tuple[NameNode, ...]

    @property
    def url(self) -> str:
        return f"hdfs://{self.authority}{self.root or '/'}"

    @property
    def endpoint(self) -> str:
        """The URL to which hdfs-native connects."""
        return f"hdfs://{self.authority}"


def resolve_target(location: str, options: OriginOptions) -> HdfsTarget:
    """Return the target for the text after `hdfs://`. An empty authority means `fs.defaultFS`.
    Raises `UsageError`."""
    authority, _, path = location.partition("/")
    site = read_site()
    if not authority:
        authority = _default_authority(site)
    if "@" in authority:
        raise UsageError("an hdfs:// URL takes no user name: set HADOOP_USER_NAME instead")
    if not _AUTHORITY.fullmatch(authority):
        raise UsageError(f"{authority!r} is no NameNode: write hdfs://HOST:PORT/DIR")
    root = "/".join(part for part in path.split("/") if part)
    common = _client_settings(site, options)
    ids = _namenode_ids(site, authority)
    if not ids and ":" not in authority:
        authority = f"{authority}:{DEFAULT_PORT}"
    namenodes: tuple[NameNode, ...] = (NameNode(authority, common),)
    if ids:
        # One client for each NameNode: the library has no timeout for a silent NameNode, and for
        # reads it always tries the first NameNode first, even if that one is standby.
        namenodes = tuple(
            NameNode(
                site.get(f"dfs.namenode.rpc-address.{authority}.{name}", name),
                common
                | {
                    f"dfs.ha.namenodes.{authority}": name,
                    f"dfs.client.failover.proxy.provider.{authority}": _PLAIN_FAILOVER,
                },
            )
            for name in ids
        )
    return HdfsTarget(authority, f"/{root}" if root else "", namenodes)


def read_site() -> dict[str, str]:
    """Return all properties of the site's files; empty if there are none. Raises `UsageError`."""
    directory = os.environ.get("HADOOP_CONF_DIR")
    if directory is None and "HADOOP_HOME" in os.environ:
        directory = os.path.join(os.environ["HADOOP_HOME"], "etc/hadoop")
    properties: dict[str, str] = {}
    if not directory:
        return properties
    for name in ("core-site.xml", "hdfs-site.xml"):
        file = Path(directory, name)
        try:
            root = ElementTree.fromstring(read_file(file, _MOST_SITE_BYTES))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"can't read {file}: {error.strerror}") from None
        except ElementTree.ParseError as error:
            raise UsageError(f"{file} is no valid XML: {error}") from None
        for found in root.findall("property"):
            key, value = found.findtext("name"), found.findtext("value")
            if key and value:
                properties[key.strip()] = value.strip()
    return properties


def _default_authority(site: dict[str, str]) -> str:
    scheme, _, rest = site.get("fs.defaultFS", "").partition("://")
    authority = rest.partition("/")[0]
    if scheme != "hdfs" or not authority:
        raise UsageError(
            "hdfs:/// needs fs.defaultFS in core-site.xml: write hdfs://HOST:PORT/DIR, or set "
            "HADOOP_CONF_DIR"
        )
    return authority


def _namenode_ids(site: dict[str, str], authority: str) -> list[str]:
    names = site.get(f"dfs.ha.namenodes.{authority}", "").split(",")
    return [name.strip() for name in names if name.strip()]


def _client_settings(site: dict[str, str], options: OriginOptions) -> dict[str, str]:
    """Return settings that disable the library's own retries, and with which it leaves a silent
    DataNode early enough to try the next replica."""
    settings = {
        "dfs.client.failover.max.attempts": "0",
        "dfs.client.failover.sleep.base.millis": "0",
        "dfs.client.failover.sleep.max.millis": "0",
    }
    if "dfs.client.socket-timeout" not in site:
        settings["dfs.client.socket-timeout"] = str(int(options.total_timeout_s * 1000 / 3))
    return settings
