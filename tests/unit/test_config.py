import math
import os
from pathlib import Path

import pytest

from cachefs.config import MountConfig, flags, load_mount_config, mountpoint_in
from cachefs.config import load as load_module
from cachefs.config.transport import from_json, to_json
from cachefs.config.workloads import WORKLOADS
from cachefs.daemon.settings import origin_options, resilience
from cachefs.errors import UsageError


def load(toml: str = "", file: Path | None = None, **options: object) -> MountConfig:
    if file is not None:
        file.write_text(toml)
    return load_mount_config("s3://bucket/prefix", "/mnt/data", options, file)


def error_of(toml: str, file: Path, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(toml, file, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cachefs.toml"


def test_defaults() -> None:
    config = load()
    assert config.source == "s3://bucket/prefix"
    assert config.mountpoint == Path("/mnt/data")
    assert config.cache_size == 100 << 30
    assert (config.cache_high, config.cache_low, config.free_space_ratio) == (0.97, 0.92, 0.1)
    assert (config.attr_ttl, config.entry_ttl, config.list_ttl) == (600, 600, 600)
    assert config.negative_ttl == 60
    assert config.stale_if_error == math.inf, "the mount is read-only"
    assert (config.uid, config.gid, config.file_mode, config.dir_mode) == (None,) * 4
    assert (config.buffer_size, config.readahead) == (300 << 20, 64 << 20)
    assert config.allow_other == (os.geteuid() == 0)
    assert len(config.cache_dirs) == 1


def test_training_is_the_default_workload() -> None:
    config = load()
    assert config.workload == "training"
    assert config == load(workload="training")
    assert config.kernel_readahead == 1 << 20
    assert (config.publish_interval, config.prefetch) == (60, "order")


def test_a_workload_sets_defaults_and_single_options_win(file: Path) -> None:
    serving = load(workload="serving")
    assert (serving.attr_ttl, serving.entry_ttl, serving.list_ttl) == (3600, 3600, 3600)
    assert (serving.kernel_readahead, serving.negative_ttl) == (512 << 10, 60)
    assert (serving.cache_eviction, load().cache_eviction) == ("lru", "epoch")
    config = load('workload = "serving"\nattr_ttl = "5m"', file, list_ttl="1m")
    assert (config.attr_ttl, config.entry_ttl, config.list_ttl) == (300, 3600, 60)
    sent = from_json(to_json(config))
    assert sent == config
    assert sent.given == config.given, "the daemon applies its own defaults"
    assert load('workload = "serving"', file, workload="checkpoint").attr_ttl == 10
    assert "workload" in error_of('workload = "inference"', file)


def test_the_checkpoint_workload_reaches_the_daemon(file: Path) -> None:
    config = from_json(to_json(load('workload = "checkpoint"\nread_only = false', file)))
    assert not config.read_only
    assert resilience(config).write_timeout_s == 300
    assert resilience(config).write_request_s == resilience(load()).write_request_s
    assert (config.publish_interval, config.negative_ttl) == (3600, 1)
    assert (config.readahead, config.prefetch) == (64 << 20, "order"), "a restart reads whole files"
    assert (config.spool_size, config.kernel_readahead) == (20 << 30, 1 << 20)
    assert load('workload = "checkpoint"', file, write_timeout="90s").write_timeout == 90


def test_the_document_shows_what_workloads_set() -> None:
    text = (Path(__file__).parents[2] / "docs/OPTIONS.md").read_text()
    _, _, table = text.partition(
        "| option | training | serving | checkpoint |\n|---|---|---|---|\n"
    )
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    configs = [load(workload=workload) for workload in ("training", "serving", "checkpoint")]
    documented = {row[0].strip("`").removeprefix("--").replace("-", "_") for row in rows}
    changed = {name for values in WORKLOADS.values() for name in values}
    assert documented == changed
    for name, *cells in rows:
        field = name.strip("`").removeprefix("--").replace("-", "_")
        for config, cell in zip(configs, cells, strict=True):
            assert getattr(load(**{field: cell}), field) == getattr(config, field), (name, cell)


def test_the_default_cache_directory_is_the_sources_own() -> None:
    def default(source: str, **options: object) -> Path:
        return load_mount_config(source, "/mnt", options).cache_dirs[0]

    assert default("s3://a/b") == default("s3://a/b/")
    assert "a-b" in default("s3://a/b").name
    places = {default("s3://a/b"), default("s3://a-b"), default("s3://a/b", endpoint="http://x")}
    assert len(places) == 3


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_store_has_one_default_cache_wherever_its_endpoint_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def default(source: str = "s3://a/b", **options: object) -> Path:
        return load_mount_config(source, "/mnt", options).cache_dirs[0]

    given, plain, oss = default(endpoint="http://x"), default(), default("oss://a/b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://y")
    monkeypatch.setenv(name, "http://x")
    assert default() == given
    assert default(endpoint="http://x") == given
    assert default("oss://a/b") == oss
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert default() == plain


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="can't be changed"):
        load().cache_size = 1  # type: ignore[misc]


def test_the_command_line_wins_over_the_file(file: Path) -> None:
    toml = 'cache_size = "10GiB"\nattr_ttl = "indefinite"\nmax_downloads = 7\nanonymous = true\n'
    config = load(toml, file, cache_size="20GiB")
    assert config.cache_size == 20 << 30
    assert config.attr_ttl == math.inf
    assert config.max_downloads == 7
    assert config.anonymous


def test_toml_may_hold_numbers_and_lists(file: Path) -> None:
    toml = 'cache_size = 1073741824\nlist_ttl = 2.5\nnegative_ttl = inf\ncache_dir = ["/a", "/b"]\n'
    config = load(toml, file)
    assert config.cache_size == 1 << 30
    assert config.list_ttl == 2.5
    assert config.negative_ttl == math.inf
    assert config.cache_dirs == (Path("/a"), Path("/b"))


def test_several_cache_directories_stand_with_colons_between() -> None:
    assert load(cache_dirs="/a:/b/../c").cache_dirs == (Path("/a"), Path("/c"))


@pytest.mark.parametrize(
    ("toml", "field", "value", "fix"),
    [
        ('cache_size = "10 parsecs"', "cache_size", "10 parsecs", "300MiB"),
        ("cache_size = 1.5", "cache_size", "1.5", "300MiB"),
        ("cache_size = true", "cache_size", "True", "300MiB"),
        ("cache_size = -1", "cache_size", "-1", "300MiB"),
        ('cache_size = "1MiB"', "cache_size", "1MiB", "64 MiB"),
        ("buffer_size = []", "buffer_size", "[]", "300MiB"),
        ('attr_ttl = "never"', "attr_ttl", "never", "indefinite"),
        ("entry_ttl = -1", "entry_ttl", "-1", "indefinite"),
        ("list_ttl = nan", "list_ttl", "nan", "indefinite"),
        ("negative_ttl = 1979-05-27", "negative_ttl", "1979-05-27", "indefinite"),
        ("free_space_ratio = 2", "free_space_ratio", "2", "10%"),
        ("max_downloads = 0", "max_downloads", "0", "from 1 to"),
        ('max_downloads = "many"', "max_downloads", "many", "from 1 to"),
        ("uid = -1", "uid", "-1", "from 0 to"),
        ('cache_eviction = "mru"', "cache_eviction", "mru", "epoch, lru, sieve, 2-random, none"),
        ('verify = "always"', "verify", "always", "first, full"),
        ('scrub_interval = "often"', "scrub_interval", "often", "10m"),
        ('mem_size = "1MiB"', "mem_size", "1MiB", "64 MiB, or 0 for none"),
        ("addressing = 1", "addressing", "1", "auto, path, virtual"),
        ("file_mode = 644", "file_mode", "644", '"644"'),
        ('dir_mode = "999"', "dir_mode", "999", "octal"),
        ('anonymous = "yes"', "anonymous", "yes", "true or false"),
        ("requester_pays = 1", "requester_pays", "1", "true or false"),
        ("cache_dir = []", "cache_dir", "[]", "at least one"),
        ('cache_dir = ["/a", 1]', "cache_dir", "1", "path"),
        ('cache_dir = "/a:/a"', "cache_dir", "/a:/a", "twice"),
        ('endpoint = ""', "endpoint", '""', "at least one"),
        ('sse = "aes"', "sse", "aes", "AES256, aws:kms"),
        ('sse_kms_key = "a\\r\\nb"', "sse_kms_key", "a", "without spaces"),
        ('storage_class = "A B"', "storage_class", "A B", "STANDARD_IA"),
        ('storage_class = "GLACIER"', "storage_class", "GLACIER", "can't be read back"),
        ('acl = "mine"', "acl", "mine", "bucket-owner-full-control"),
        ('tags = "a"', "tags", '"a"', "KEY=VALUE&KEY=VALUE"),
        ('tags = "a=1&a=2"', "tags", "a=1", "KEY=VALUE&KEY=VALUE"),
        ('tags = "a=%0a"', "tags", "%0a", "of letters"),
        (f'tags = "a={"b" * 257}"', "tags", "bbb", "of letters"),
    ],
)
def test_a_wrong_value_is_named_with_file_field_and_fix(
    file: Path, toml: str, field: str, value: str, fix: str
) -> None:
    text = error_of(toml, file)
    assert text.startswith(f"{file}: {field}: ")
    assert value in text
    assert fix in text


def test_a_wrong_option_is_named_as_on_the_command_line(file: Path) -> None:
    text = error_of('cache_size = "10GiB"', file, cache_size="lots")
    assert text.startswith('--cache-size: "lots"')


def test_an_unknown_key_brings_the_nearest_known_one(file: Path) -> None:
    assert 'did you mean "cache_size"?' in error_of("cache-size = 1", file)
    assert 'did you mean "attr_ttl"?' in error_of("atr_ttl = 1", file)
    assert "cachefs mount --help" in error_of("zzz = 1", file)


@pytest.mark.parametrize(
    "key",
    ["aws_secret_access_key", "secret", "password", "aws_session_token", "access_key_id", "key"],
)
def test_credentials_are_refused_and_not_repeated(file: Path, key: str) -> None:
    text = error_of(f'{key} = "hunter2"', file)
    assert key in text
    assert "~/.aws/credentials" in text
    assert "hunter2" not in text


def test_no_option_looks_like_a_credential() -> None:
    found = [flag.key for flag in flags().values() if load_module.SECRET.search(flag.key)]
    assert found == ["credentials_dir", "shared_secret_file"], "the name of a file is no secret"


def test_a_password_in_the_source_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        load_mount_config("s3://key:hunter2@bucket", "/mnt", {})
    assert "hunter2" not in str(caught.value)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)


def test_a_source_must_be_a_url() -> None:
    with pytest.raises(UsageError, match=r'SOURCE: "/data" is no URL; write .*file:///DIR'):
        load_mount_config("/data", "/mnt", {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("https://data.s3.eu-west-1.amazonaws.com/p/", "write s3://data/p "),
        ("https://s3.cn-north-1.amazonaws.com.cn/data/p", "write s3://data/p "),
        ("https://s3.amazonaws.com", "write s3://BUCKET/PREFIX "),
        ("https://data.oss-cn-beijing.aliyuncs.com/p", "write oss://data/p with --endpoint oss-cn"),
        ("https://eu-west-1.console.aws.amazon.com/s3/buckets/data", "write s3://BUCKET/PREFIX"),
        ("arn:aws:s3:::data/p", "write s3://data/p$"),
    ],
)
def test_an_address_of_a_bucket_says_what_to_write(source: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        load_mount_config(source, "/mnt", {})
    assert "\n" not in str(caught.value)


def test_the_requester_pays() -> None:
    config = load_mount_config("s3://b", "/mnt", {"requester_pays": True})
    assert origin_options(config).requester_pays
    assert not origin_options(load_mount_config("s3://b", "/mnt", {})).requester_pays


def test_hadoops_names_of_a_scheme_are_the_same_source() -> None:
    one, other = (load_mount_config(f"{scheme}://b/p", "/mnt", {}) for scheme in ("s3a", "s3"))
    assert one.source == "s3://b/p"
    assert one.tiers == other.tiers


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read .*missing\.toml: No such file"):
        load(file=None) and load_mount_config("s3://b", "/mnt", {}, tmp_path / "missing.toml")


@pytest.mark.parametrize("content", [b"a = ", b"= 1", b"\xff = 1", b"[a\n", b"x = 1\nx = 2\n"])
def test_a_file_that_is_not_toml(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match="not valid TOML"):
        load_mount_config("s3://b", "/mnt", {}, file)


def test_options_that_contradict_each_other(file: Path) -> None:
    assert "cache_low (0.9) must be above 0 and below cache_high (0.8)" in error_of(
        "cache_low = 0.9\ncache_high = 0.8", file
    )
    assert "at least 128MiB for 2" in error_of('cache_size = "100MiB"\ncache_dir = "/a:/b"', file)
    for key, name in (("cache_dir", "cache directory"), ("log_file", "log_file")):
        text = error_of(f'{key} = "/mnt/data/x"', file)
        assert f"{name} /mnt/data/x lies below the mountpoint" in text


def test_every_option_is_described_once() -> None:
    names = [name for flag in flags().values() for name in flag.names]
    assert len(names) == len(set(names))
    for field in flags():
        assert MountConfig.fields[field].description


INSTANCE = 'source = "s3://other"\nmountpoint = "/mnt/other"\n[load]\npaths = ["today"]\n'


def test_a_file_describes_a_whole_instance(tmp_path: Path) -> None:
    file = tmp_path / "instance.toml"
    file.write_text(INSTANCE)
    config = load_mount_config(None, None, {}, file)
    assert (config.source, config.mountpoint) == ("s3://other", Path("/mnt/other"))
    config = load_mount_config("s3://mine", "/mnt/mine", {}, file)
    assert (config.source, config.mountpoint) == ("s3://mine", Path("/mnt/mine"))
    assert mountpoint_in(file) == Path("/mnt/other")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('source = "s3://b"', "there is no mountpoint; .*instance.toml"),
        ('mountpoint = "mnt"', 'instance.toml: mountpoint: "mnt" is not an absolute path'),
        ("mountpoint = 1", "instance.toml: mountpoint: 1 is not an absolute path"),
    ],
)
def test_a_file_without_a_usable_mountpoint(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "instance.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        mountpoint_in(file)


def test_a_wrong_source_in_a_file_is_named_with_it(tmp_path: Path) -> None:
    file = tmp_path / "instance.toml"
    file.write_text('source = "/data"')
    with pytest.raises(UsageError, match=r"instance.toml: source: .*is no URL"):
        load_mount_config(None, "/mnt", {}, file)


def test_source_and_mountpoint_must_come_from_somewhere() -> None:
    with pytest.raises(UsageError, match="there is no source"):
        load_mount_config(None, "/mnt", {})
    with pytest.raises(UsageError, match="there is no mountpoint"):
        load_mount_config("s3://b", None, {})


def test_squash_is_uid_and_gid() -> None:
    config = load(squash="1000:50")
    assert (config.uid, config.gid) == (1000, 50)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"squash": "1000"}, '"1000" is not UID:GID'),
        ({"squash": "me:us"}, '"me:us" is not UID:GID'),
        ({"squash": "1:99999999999"}, "gid"),
        ({"squash": "1:1", "uid": 2}, "leave them out"),
    ],
)
def test_squash_that_says_too_little_or_too_much(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_mount_config("s3://b", "/mnt", options)


def test_relative_paths_in_a_file_begin_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "etc/data.toml"
    file.parent.mkdir()
    monkeypatch.chdir(tmp_path)

    def config(toml: str, **options: object) -> MountConfig:
        file.write_text(toml)
        return load_mount_config("s3://a/b", "/mnt", options, Path("etc/data.toml"))

    here = file.parent
    assert config('cache_dir = "a:/b: ../c"').cache_dirs == (here / "a", Path("/b"), tmp_path / "c")
    assert config('cache_dir = ["a:b"]').cache_dirs == (here / "a:b",)
    assert config('cache_dir = "~/x"').cache_dirs == (Path("~/x").expanduser(),)
    assert config('cache_dir = "a"', cache_dirs="b").cache_dirs == (tmp_path / "b",)
    others = config('log_file = "l"\nmanifest = "m"\nmem_dir = "n"\nmem_size = "64MiB"')
    assert (others.log_file, others.mem_dir) == (here / "l", here / "n")
    assert others.manifest == str(here / "m")
    assert config('manifest = "s3://x/y"').manifest == "s3://x/y"
    (tier,) = config('[[tier]]\nmedium = "SSD"\npath = "a,b"\nquota = "1GiB"').tiers
    assert tier.paths == (here / "a", here / "b")


def test_options_of_writable_mounts(file: Path) -> None:
    config = load()
    assert (config.read_only, config.rename_limit, config.publish_interval) == (True, 100_000, 60)
    config = load('rename_limit = 0\npublish_interval = "5m"', file)
    assert (config.rename_limit, config.publish_interval) == (0, 300)
    assert "rename_limit" in error_of("rename_limit = -1", file)
    assert "publish_interval" in error_of('publish_interval = "soon"', file)
