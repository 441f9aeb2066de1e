"""Spellings of single values: durations, sizes, addresses.

Every `parse_*` is pure and raises `ValueError` whose text says what is allowed.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_NUMBER = r"\d+(?:\.\d+)?"
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|d)", re.ASCII)
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|s|m|h|d))+", re.ASCII)
_SIZE = re.compile(rf"({_NUMBER})\s*({'|'.join(_BYTES)})?", re.ASCII)
_LISTEN = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]*)):(\d{1,5})", re.ASCII)
_METRIC_PLACE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{(?P<labels>[^{}]*)\})?", re.ASCII)
_METRIC_LABEL = re.compile(r'[a-zA-Z_][a-zA-Z0-9_]*(?P<value>="[^"]*")?', re.ASCII)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a listener binds.

    Attributes:
        host: name or address without brackets; empty for all addresses of the host, IPv4 and IPv6.
        port: 0 for any free one.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_duration(text: str) -> float:
    """Read `30s`, `500ms`, `1h30m` or a number of seconds, and return seconds."""
    if re.fullmatch(_NUMBER, text, re.ASCII):
        seconds = float(text)
    elif _DURATION.fullmatch(text):
        seconds = math.fsum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    else:
        raise ValueError("needs a duration such as 500ms, 30s, 5m, 2h or a number of seconds")
    if not math.isfinite(seconds):
        raise ValueError("is longer than any duration")
    return seconds


def format_duration(seconds: float) -> str:
    """Spell seconds in the largest unit that leaves a whole number."""
    for unit in ("h", "m", "s", "ms"):
        number = round(seconds / _SECONDS[unit], 6)  # 0.3 / 0.001 is not quite 300
        if number and number.is_integer():
            return f"{int(number)}{unit}"
    return f"{seconds:g}s"


def parse_size(text: str) -> int:
    """Read `64MiB`, `10MB` or a number of bytes, and return bytes."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _BYTES[match[2] or "B"] if match else math.nan
    if not match or size != int(size):
        raise ValueError("needs a size such as 512KiB, 64MiB, 1GiB or a whole number of bytes")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Spell bytes in the largest binary unit that leaves a whole number."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _BYTES[unit] == 0:
            return f"{size_bytes // _BYTES[unit]}{unit}"
    return str(size_bytes)


def parse_listen(text: str) -> ListenAddress:
    """Read `host:port`, `[IPv6]:port` or `:port`."""
    match = _LISTEN.fullmatch(text)
    if not match:
        raise ValueError("needs an address such as 127.0.0.1:8080, [::1]:8080 or :8080 (all addresses)")
    ipv6, host, port = match[1], match[2], int(match[3])
    if port > 65535:
        raise ValueError(f"port {port} is not between 0 and 65535")
    if ipv6 is not None:
        try:
            ipaddress.IPv6Address(ipv6)
        except ValueError:
            raise ValueError(f"[{ipv6}] is not an IPv6 address") from None
    return ListenAddress(ipv6 or host or "", port)


def parse_endpoint_url(text: str) -> str:
    """Check the address of an engine, and return it without a slash at its end."""
    if re.search(r"[\s\x00-\x20\x7f]", text):
        raise ValueError("contains a space or a control character")
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not text.lower().startswith(f"{url.scheme}://"):
        raise ValueError("needs to begin with http:// or https://")
    if not url.hostname:
        raise ValueError("names no host; such as http://node1:8000")
    if port == 0:
        raise ValueError("port 0 is not a port")
    if url.username is not None or url.password is not None:
        raise ValueError("carries a user or a password; the engine's key belongs into api_key")
    if "?" in text or "#" in text:
        raise ValueError("carries a query or a fragment; only http(s)://host:port/path is allowed")
    path = url.path.rstrip("/")
    if path == "/v1" or path.endswith("/v1"):
        raise ValueError("ends in /v1; leave it away, the gateway puts it there itself")
    return text.rstrip("/")


def parse_redis_url(text: str) -> str:
    """Check the address of a Redis. Messages never quote it: it may carry a password."""
    if re.search(r"[\s\x00-\x20\x7f]", text):
        raise ValueError("contains a space or a control character")
    try:
        url = urlsplit(text)
        port, host = url.port, url.hostname
    except ValueError:
        raise ValueError("is not a URL; such as redis://host:6379/0") from None
    if url.scheme not in ("redis", "rediss") or not text.lower().startswith(f"{url.scheme}://"):
        raise ValueError("needs to begin with redis:// or rediss:// (TLS)")
    if not host:
        raise ValueError("names no host; such as redis://host:6379/0")
    if port == 0:
        raise ValueError("port 0 is not a port")
    if url.query or url.fragment or "?" in text or "#" in text:
        raise ValueError(
            "carries a query or a fragment; only redis(s)://user:password@host:port/number is allowed"
        )
    if not re.fullmatch(r"/?|/[0-9]{1,4}", url.path, re.ASCII):
        raise ValueError("has a path that is not the number of a database, such as /0")
    return text


def check_metric_place(text: str) -> None:
    """Check where a number stands in an engine's metrics; an empty text is "nowhere"."""
    allowed = 'allowed: NAME, NAME{LABEL}, NAME{LABEL="VALUE"}'
    match = _METRIC_PLACE.fullmatch(text)
    if text and not match:
        raise ValueError(f"is no metric name; {allowed}")
    parts = [part for part in ((match and match["labels"]) or "").split(",") if part.strip()]
    labels = [_METRIC_LABEL.fullmatch(part.strip()) for part in parts]
    if None in labels or sum(label is not None and label["value"] is None for label in labels) > 1:
        raise ValueError(f"has labels that cannot be read; {allowed}")
