"""Asks the admin listener of a running gateway."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, NewConnectionError

from coordinator.admin.views import View
from coordinator.ctl.outcome import CommandError

DEFAULT_ADMIN = "http://127.0.0.1:9090"
_TIMEOUT_S = 5.0

V = TypeVar("V", bound=View)


def fetch(admin: str, path: str, kind: type[V]) -> V:
    """GET a path of the management API. Blocks for up to five seconds.

    Args:
        admin: address of the admin listener; `http://` may be left away.
        path: with its slash.
        kind: what the answer is.

    Raises:
        CommandError: nobody answers there, or somebody else does.
    """
    base = (admin if "://" in admin else f"http://{admin}").rstrip("/")
    try:
        with urllib3.PoolManager(timeout=_TIMEOUT_S, retries=False) as pool:
            answer = pool.request("GET", base + path)
    except LocationParseError as exc:
        raise CommandError(f"{admin!r} is not an address; such as {DEFAULT_ADMIN}") from exc
    except NewConnectionError as exc:
        raise CommandError(
            f"no gateway answers at {base}. Is it running? Start it with `llmgw-gateway --config FILE`, "
            "or name its admin_listen address with --admin URL or LLMGW_ADMIN."
        ) from exc
    except HTTPError as exc:
        raise CommandError(f"{base} does not answer as a gateway's admin listener does: {exc}") from exc
    try:
        if answer.status != 200:
            raise CommandError(f"{base}{path} answered {answer.status}: another version, or not llmgw's?")
        return msgspec.json.decode(answer.data, type=kind)
    except msgspec.DecodeError as exc:
        raise CommandError(f"{base} is not the admin listener of this version of llmgw ({exc})") from exc
