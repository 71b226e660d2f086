"""A private HDFS: `with Hdfs(directory) as server: ...`, a NameNode and a DataNode.

Apache Hadoop from Maven Central, which is brought once for all checkouts of a user into
`$XDG_CACHE_HOME/cachefs-tests`. All ports are free ones on the loopback interface. No pytest here.
"""

import contextlib
import fcntl
import getpass
import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.ports import free_ports, wait_until
from tests.servers.room import need_room

START_TIMEOUT_S = 90
DOWNLOAD_TIMEOUT_S = 500
NEEDED_BYTES = 1 << 30
"""Free space for the files of the tests. The NameNode itself stops writes below 100 MiB."""

POM = Path(__file__).with_name("hadoop") / "pom.xml"
_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_JVM = [
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # starts a third faster, and never runs long
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",  # WebHDFS needs it since Java 16
]
_LOG4J = """\
log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c: %m%n
"""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def what_is_missing() -> str | None:
    """Why there can be no HDFS here, in a sentence, or None."""
    missing = [name for name in ("java", "mvn") if shutil.which(name) is None]
    if not missing:
        return None
    return f"no HDFS: {' and '.join(missing)} not found; install a JDK (17 or newer) and Maven"


def hadoop() -> Path:
    """The directory with Hadoop's jars in `lib` and a formatted NameNode directory in `name`;
    downloaded and made if it isn't there yet. Raises `RuntimeError`."""
    found = re.search(r"<hadoop.version>(.+?)<", POM.read_text())
    assert found
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(home, "cachefs-tests")
    ready = base / f"hadoop-{found[1]}"
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{ready.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            with tempfile.TemporaryDirectory(dir=base, prefix=f"{ready.name}.") as scratch:
                _make_hadoop(Path(scratch, "made"))
                Path(scratch, "made").rename(ready)
    return ready


def _make_hadoop(into: Path) -> None:
    copy = ["dependency:copy-dependencies", f"-DoutputDirectory={into / 'lib'}"]
    _run(["mvn", "--batch-mode", "--quiet", f"--file={POM}", *copy, "-DincludeScope=runtime"])
    conf = _write_conf(into / "conf", {"dfs.namenode.name.dir": (into / "name").as_uri()})
    _run([*_java(into, conf, into), _NAMENODE, "-format", "-nonInteractive"])


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DOWNLOAD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        tail = done.stdout.decode(errors="replace")[-1000:]
        raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}: {tail}")


def _java(hadoop_dir: Path, conf: Path, temporary: Path) -> list[str]:
    """The start of a command line. Jetty unpacks its pages into `temporary` and leaves them."""
    words = [f"-Djava.io.tmpdir={temporary}", "-cp", f"{conf}:{hadoop_dir / 'lib'}/*"]
    return ["java", *_JVM, *words]


def _write_conf(conf: Path, properties: dict[str, str]) -> Path:
    """A configuration directory that is also the part of the class path which isn't in jars."""
    for name in ("hdfs", "datanode"):
        (conf / "webapps" / name).mkdir(parents=True, exist_ok=True)
    body = "".join(
        f"<property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
        for name, value in properties.items()
    )
    (conf / "hdfs-site.xml").write_text(f"<configuration>\n{body}</configuration>\n")
    (conf / "log4j.properties").write_text(_LOG4J)
    return conf


class Hdfs:
    """Started by `with`, gone after it. `directory` takes data and logs; it is not removed.

    `user` is the superuser, and whoever says so. The processes may be stopped, killed, and
    started again at the same ports (`start_namenode`, `start_datanode`)."""

    def __init__(self, directory: Path) -> None:
        self.user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        self._directory = directory
        self.namenode: subprocess.Popen[bytes] | None = None
        self.datanode: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the root directory, without the slash."""
        return f"hdfs://{self.address}"

    @property
    def webhdfs_url(self) -> str:
        return f"webhdfs://{self.http_address}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which any HDFS client is `user`, whatever the site says."""
        return {"HADOOP_USER_NAME": self.user, "HADOOP_CONF_DIR": str(self._conf)}

    def __enter__(self) -> Self:
        """Start, and return when a file can be written. Raises `RuntimeError`."""
        need_room(self._directory, NEEDED_BYTES, "HDFS")
        self._hadoop = hadoop()
        rpc, web, transfer, datanode_web, datanode_ipc = free_ports(5)
        self.address = f"127.0.0.1:{rpc}"
        self.http_address = f"127.0.0.1:{web}"
        name, data = self._directory / "name", self._directory / "data"
        shutil.copytree(self._hadoop / "name", name)
        self._conf = _write_conf(
            self._directory / "conf",
            {
                "fs.defaultFS": self.url,
                "hadoop.tmp.dir": str(self._directory / "tmp"),
                "dfs.namenode.rpc-address": self.address,
                "dfs.namenode.http-address": self.http_address,
                "dfs.namenode.name.dir": name.as_uri(),
                "dfs.namenode.safemode.extension": "0",
                "dfs.namenode.edits.noeditlogchannelflush": "true",
                "dfs.namenode.fs-limits.min-block-size": "1024",
                "dfs.datanode.hostname": "127.0.0.1",
                "dfs.datanode.address": f"127.0.0.1:{transfer}",
                "dfs.datanode.http.address": f"127.0.0.1:{datanode_web}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{datanode_ipc}",
                "dfs.datanode.data.dir": data.as_uri(),
                "dfs.datanode.du.reserved": "0",
                "dfs.replication": "1",
                # A writer asks whether its last block has arrived before it has, then waits.
                "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "2",
                "dfs.client.block.write.locateFollowingBlock.retries": "10",  # doubling: 2 s in all
            },
        )
        try:
            self.start_namenode()
            self.start_datanode()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill both: their data is thrown away. May be called twice."""
        for process in (self.datanode, self.namenode):
            if process is not None:
                process.kill()
                process.wait()

    def start_namenode(self) -> None:
        self.namenode = self._start(_NAMENODE, "namenode.log")

    def start_datanode(self) -> None:
        self.datanode = self._start(_DATANODE, "datanode.log")

    def wait_until_ready(self) -> None:
        """Until the DataNode is registered and the NameNode has left its safe mode."""
        wait_until(self._ready, START_TIMEOUT_S, "HDFS is not ready")

    def put(self, path: str, data: bytes, block_bytes: int = 1 << 27) -> None:
        """Write one file over WebHDFS: hdfs-native takes half a second for each."""
        try:
            self._put(path, data, block_bytes)
        except RuntimeError as error:
            # The DataNode writes through a client of its own, which keeps connections to a
            # NameNode that was killed since and tells the first writer that they are closed.
            if "EOFException" not in str(error):
                raise
            self._put(path, data, block_bytes)

    def _put(self, path: str, data: bytes, block_bytes: int) -> None:
        target = f"/webhdfs/v1{quote(path)}"
        question = (
            "op=CREATE&overwrite=true&noredirect=true"
            f"&user.name={self.user}&blocksize={block_bytes}"
        )
        answer = _request(self.http_address, "PUT", f"{target}?{question}", b"", 200)
        # What the NameNode says of the path is not quoted; the rest of the address is.
        there = urlsplit(json.loads(answer)["Location"])
        _request(there.netloc, "PUT", f"{target}?{there.query}", data, 201)

    def put_many(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Write many files, eight at a time."""
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda item: self.put(*item), files):
                pass

    def make_empty_files(self, paths: Iterable[str]) -> None:
        """Many times faster than `put_many`."""
        import hdfs_native

        client = hdfs_native.Client(self.url)
        with ThreadPoolExecutor(8) as pool:
            for writer in pool.map(client.create, paths):
                writer.close()

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it."""
        self._operate("DELETE", path, "DELETE", "&recursive=true")

    def make_dir(self, path: str, mode: str = "755") -> None:
        self._operate("PUT", path, "MKDIRS", f"&permission={mode}")

    def set_mode(self, path: str, mode: str) -> None:
        self._operate("PUT", path, "SETPERMISSION", f"&permission={mode}")

    def set_owner(self, path: str, owner: str, group: str) -> None:
        self._operate("PUT", path, "SETOWNER", f"&owner={quote(owner)}&group={quote(group)}")

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self._operate("PUT", path, "SETTIMES", f"&modificationtime={mtime_ms}&accesstime=-1")

    def make_snapshot(self, path: str, name: str) -> None:
        self._operate("PUT", path, "ALLOWSNAPSHOT", "")
        self._operate("PUT", path, "CREATESNAPSHOT", f"&snapshotname={name}")

    def delete_snapshot(self, path: str, name: str) -> None:
        self._operate("DELETE", path, "DELETESNAPSHOT", f"&snapshotname={name}")
        self._operate("PUT", path, "DISALLOWSNAPSHOT", "")

    def _operate(self, method: str, path: str, operation: str, more: str) -> None:
        target = f"/webhdfs/v1{quote(path)}?op={operation}&user.name={self.user}{more}"
        _request(self.http_address, method, target, b"", 200)

    def _start(self, main: str, log_name: str) -> subprocess.Popen[bytes]:
        with (self._directory / log_name).open("ab") as log:
            return subprocess.Popen(
                [*_java(self._hadoop, self._conf, self._directory), main],
                cwd=self._directory,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the one who started us
            )

    def _ready(self) -> bool:
        for name, process in (("namenode", self.namenode), ("datanode", self.datanode)):
            if process is None or process.poll() is not None:
                tail = (self._directory / f"{name}.log").read_text(errors="replace")[-1000:]
                raise RuntimeError(f"the {name} ended while starting: {tail}")
        query = "qry=Hadoop:service=NameNode,name=FSNamesystemState"
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            with _DIRECT.open(f"http://{self.http_address}/jmx?{query}", timeout=5) as answer:
                bean = json.load(answer)["beans"][0]
            # A DataNode is alive before it has said how much room it has.
            has_room = bean["NumLiveDataNodes"] == 1 and bean["CapacityRemaining"] > 0
            return bool(has_room and bean["FSState"] == "Operational")
        return False


def _request(host: str, method: str, target: str, body: bytes, wanted: int) -> bytes:
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        connection.request(method, target, body)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != wanted:
        raise RuntimeError(f"{method} {target}: {answer.status} {data[:500]!r}")
    return data
