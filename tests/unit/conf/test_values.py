"""Spellings of durations, sizes and addresses."""

import pytest

from conf.values import (
    ListenAddress,
    format_duration,
    format_size,
    parse_duration,
    parse_endpoint_url,
    parse_listen,
    parse_redis_url,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("15", 15.0),
        ("0.25", 0.25),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("0", 0.0),
    ],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "5 m", "5 minutes", "1e3", "nan", "inf", "30S", "٣s", "9" * 400, "1s\n"]
)
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 * 2**20), ("1.5KiB", 1536), ("10MB", 10**7), ("1kB", 1000), ("7", 7), ("7 B", 7)],
)
def test_a_size_is_read_in_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "64M", "64mib", "-1", "0.5", "1.3B", "MiB", "1e6"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="needs a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "500ms"), (30, "30s"), (90, "90s"), (300, "5m"), (3600, "1h"), (0, "0s")]
)
def test_a_duration_is_spelled_in_the_largest_whole_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(64 * 2**20, "64MiB"), (2**30, "1GiB"), (1000, "1000"), (0, "0")])
def test_a_size_is_spelled_in_the_largest_whole_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ListenAddress("127.0.0.1", 8080)),
        ("[::]:8080", ListenAddress("::", 8080)),
        ("[fe80::1%eth0]:1", ListenAddress("fe80::1%eth0", 1)),
        (":8080", ListenAddress("", 8080)),
        ("gateway.internal:0", ListenAddress("gateway.internal", 0)),
    ],
)
def test_a_listen_address_is_split(text: str, address: ListenAddress) -> None:
    assert parse_listen(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8080", "needs an address"),
        ("localhost", "needs an address"),
        ("::1:8080", "needs an address"),
        ("http://127.0.0.1:8080", "needs an address"),
        ("127.0.0.1:65536", "not between 0 and 65535"),
        ("[nonsense]:80", "not an IPv6 address"),
        ("[127.0.0.1]:80", "not an IPv6 address"),
        ("a b:80", "needs an address"),
    ],
)
def test_a_bad_listen_address_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_listen(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "http://10.0.0.1:8000"),
        ("https://node.internal", "https://node.internal"),
        ("http://[::1]:8000/engines/a/", "http://[::1]:8000/engines/a"),
    ],
)
def test_an_endpoint_url_loses_only_the_slash_at_its_end(text: str, url: str) -> None:
    assert parse_endpoint_url(text) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.1:8000", "http://"),
        ("ftp://a:1", "http://"),
        ("http:/a:1", "http://"),
        ("http://", "names no host"),
        ("http://a:99999", "not a URL"),
        ("http://a:0", "port 0"),
        ("http://a:8000/v1", "ends in /v1"),
        ("http://a:8000/v1/", "ends in /v1"),
        ("http://user:secret@a:8000", "api_key"),
        ("http://a:8000/?x=1", "query"),
        ("http://a:8000/#x", "query"),
        ("http://a b:8000", "space"),
        ("http://a:8000\n", "space"),
        ("http://[::1:8000", "not a URL"),
    ],
)
def test_a_bad_endpoint_url_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        parse_endpoint_url(text)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["redis://h", "redis://:pw@h:6379/0", "rediss://user:pw@[::1]:6380/12", "redis://h:1/"]
)
def test_addresses_of_redis(text: str) -> None:
    assert parse_redis_url(text) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://:secret@h:1", "redis://"),
        ("unix:///secret", "redis://"),
        ("redis:secret", "redis://"),
        ("redis://", "host"),
        ("redis://:secret@h:99999", "URL"),
        ("redis://:secret@h:0", "port 0"),
        ("redis://:secret@h/0?timeout=1", "query"),
        ("redis://:secret@h/zero", "database"),
        ("redis://:secret@h h", "space"),
    ],
)
def test_bad_addresses_of_redis_are_refused_and_not_quoted(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        parse_redis_url(text)
    assert "secret" not in str(error.value)
