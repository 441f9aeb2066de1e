"""The ledger of the cluster in Redis: rows of instances, and who holds which share of a hard cap.

Keys (the hash tag keeps them in one slot of a Redis Cluster); all are hashes:

    llmgw:{CLUSTER}:life     run: id of the server's run; born: its ms when that run was first seen
    llmgw:{CLUSTER}:rows     instance -> row (coordinator.core.peer_rows)
    llmgw:{CLUSTER}:seen     instance -> "NUMBER MS": number of the row, and the server's ms when it came
    llmgw:{CLUSTER}:shares   "INSTANCE/POOL" -> share

One script does an exchange, so that nothing comes between. Rules:
    - A statement whose number is not above the last one's is late or repeated, and changes nothing.
    - What an instance says it uses is a fact and always written; only what nobody holds is granted on top.
    - A server that has lost its memory, or has an old one (a restart, a fail-over), grants nothing until
      every living instance had the time to say what it uses (`SETTLE_MS`). A server's run id tells.
    - An instance is removed, its shares with it, only if its row is still the one that was found dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from conf.errors import LlmgwError
from conf.schema import Redis
from coordinator.core.peer_rows import SILENT_S, Peer, decode
from coordinator.core.shares import Statement

SETTLE_MS = int(SILENT_S * 1000)
TIMEOUT_S = 0.5
_KEPT_MS = 3_600_000  # nothing is left of a cluster that is gone for an hour
_SERVER_ERRORS = (redis.RedisError, OSError)

# ARGV: instance, number, run, row, dead (count, then name and number each), pools (count, then name, floor,
# want, cap each). Answer: is it settled, rows, seen, shares (each flat).
SCRIPT = """
local life, rows, seen, shares = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local me, number, run, row = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local settle_ms, silent_ms, kept_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if redis.call('HGET', life, 'run') ~= run then
  redis.call('HSET', life, 'run', run, 'born', now)
end
local born = tonumber(redis.call('HGET', life, 'born'))
if born > now then
  born = now
  redis.call('HSET', life, 'born', now)
end
local is_settled = now - born >= settle_ms

local function last(name)
  local text = redis.call('HGET', seen, name)
  if not text then return -1, 0 end
  local a, b = string.match(text, '^(%d+) (%d+)$')
  return tonumber(a), tonumber(b)
end
-- Splits INSTANCE/POOL at the first slash: an instance's name has none.
local function owner(field)
  local at = string.find(field, '/', 1, true)
  return string.sub(field, 1, at - 1), string.sub(field, at + 1)
end

if number > last(me) then
  local at = 8
  for _ = 1, tonumber(ARGV[at]) do
    local dead, its = ARGV[at + 1], tonumber(ARGV[at + 2])
    at = at + 2
    local found, came = last(dead)
    if found == its and now - came >= silent_ms then
      redis.call('HDEL', rows, dead)
      redis.call('HDEL', seen, dead)
      for _, field in ipairs(redis.call('HKEYS', shares)) do
        if owner(field) == dead then redis.call('HDEL', shares, field) end
      end
    end
  end
  at = at + 1
  local mine, others = {}, {}
  local flat = redis.call('HGETALL', shares)
  for i = 1, #flat, 2 do
    local name, pool = owner(flat[i])
    if name == me then
      mine[pool] = flat[i]
    else
      others[pool] = (others[pool] or 0) + tonumber(flat[i + 1])
    end
  end
  for _ = 1, tonumber(ARGV[at]) do
    local pool, floor = ARGV[at + 1], tonumber(ARGV[at + 2])
    local want, cap = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
    at = at + 4
    local held = floor
    if is_settled then
      local free = cap - (others[pool] or 0) - floor
      if free > 0 and want > floor then held = floor + math.min(want - floor, free) end
    end
    redis.call('HSET', shares, me .. '/' .. pool, held)
    mine[pool] = nil
  end
  for _, field in pairs(mine) do redis.call('HDEL', shares, field) end
  redis.call('HSET', rows, me, row)
  redis.call('HSET', seen, me, string.format('%.0f %.0f', number, now))
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, kept_ms) end
end
return {
  is_settled and 1 or 0,
  redis.call('HGETALL', rows), redis.call('HGETALL', seen), redis.call('HGETALL', shares)
}
"""

LEAVE_SCRIPT = """
local seen = redis.call('HGET', KEYS[3], ARGV[1])
if seen and tonumber(string.match(seen, '^%d+')) < tonumber(ARGV[2]) then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
  for _, field in ipairs(redis.call('HKEYS', KEYS[4])) do
    if string.sub(field, 1, #ARGV[1] + 1) == ARGV[1] .. '/' then redis.call('HDEL', KEYS[4], field) end
  end
end
"""


class LedgerAway(LlmgwError):
    """Redis gave no answer that can be used: go on with what there is. No secrets in the text."""


class Answer(NamedTuple):
    """What an exchange brought back.

    Attributes:
        held: this instance's shares, by pool.
        peers: the other instances.
        is_settled: whether shares are granted at present.
    """

    held: dict[str, int]
    peers: dict[str, Peer]
    is_settled: bool


class Ledger:
    """This instance's access to the ledger; one connection, used by one greenlet.

    Args:
        instance: its name in the ledger, without a slash; the same after a restart of the coordinator.
        clock: monotonic seconds of this host; numbers of rows come from it, so that they grow through
            restarts.

    Raises:
        LedgerAway: from every method that asks Redis; the connection is closed then.
    """

    def __init__(self, settings: Redis, instance: str, clock: Callable[[], float]) -> None:
        if "/" in instance:
            raise ValueError(f"an instance's name must have no slash: {instance!r}")
        assert settings.url is not None
        self._instance = instance
        self._clock = clock
        self._number = 0
        self._run = ""
        options: dict[str, Any] = {} if settings.password is None else {"password": settings.password}
        if settings.url.lower().startswith("rediss:"):
            tls = settings.tls
            verify = tls is None or tls.verify
            options["ssl_ca_certs"] = tls.ca if tls else None
            options["ssl_cert_reqs"] = "required" if verify else "none"
            options["ssl_check_hostname"] = verify
        self._redis = redis.Redis.from_url(
            settings.url,
            single_connection_client=False,
            max_connections=1,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            client_name="llmgw",
            **options,
        )
        prefix = f"llmgw:{{{settings.cluster_name}}}:"
        self._keys = [prefix + name for name in ("life", "rows", "seen", "shares")]
        self._exchange_sha = self._leave_sha = ""

    def connect(self) -> str:
        """Connect, and learn which run of the server this is; first, and after every `LedgerAway`.

        A server that was restarted knows no script, so no exchange reaches it under the old run's id.

        Returns:
            This host's address on the connection.
        """
        try:
            self._run = str(self._redis.info("server").get("run_id", ""))
            self._exchange_sha = self._redis.script_load(SCRIPT)
            self._leave_sha = self._redis.script_load(LEAVE_SCRIPT)
            connection = self._redis.connection_pool.get_connection()
            try:
                sock: Any = connection._sock
                return str(sock.getsockname()[0])
            finally:
                self._redis.connection_pool.release(connection)
        except _SERVER_ERRORS as exc:
            raise self._away(exc) from exc

    def exchange(self, row: bytes, statements: Mapping[str, Statement], dead: Mapping[str, int]) -> Answer:
        """Tell the cluster about this instance, and learn about the others.

        Args:
            row: see coordinator.core.peer_rows.
            statements: by pool.
            dead: instances found dead, with the numbers of the rows that showed it.
        """
        arguments: list[str | int | bytes] = [
            *(self._instance, self._next_number(), self._run, row, SETTLE_MS, SETTLE_MS, _KEPT_MS, len(dead))
        ]
        for name, number in dead.items():
            arguments += (name, number)
        arguments.append(len(statements))
        for pool, statement in statements.items():
            arguments += (pool, *statement)
        try:
            return self._answer(self._call(self._exchange_sha, arguments))
        except _SERVER_ERRORS as exc:
            raise self._away(exc) from exc

    def leave(self) -> None:
        """Take this instance out, its shares with it. Only when nothing runs any more."""
        try:
            self._call(self._leave_sha, [self._instance, self._next_number()])
        except _SERVER_ERRORS as exc:
            raise self._away(exc) from exc

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        self._redis.connection_pool.disconnect()

    def _call(self, sha: str, arguments: list[str | int | bytes]) -> Any:
        return self._redis.evalsha(sha, len(self._keys), *self._keys, *arguments)

    def _next_number(self) -> int:
        self._number = max(self._number + 1, math.floor(self._clock() * 1e6))  # Lua's numbers: below 2**53
        return self._number

    def _answer(self, reply: list[Any]) -> Answer:
        is_settled, flat_rows, flat_seen, flat_shares = reply
        rows = dict(zip(flat_rows[::2], flat_rows[1::2], strict=True))
        shares: dict[str, dict[str, int]] = {}
        for field, share in zip(flat_shares[::2], flat_shares[1::2], strict=True):
            name, _, pool = field.decode().partition("/")
            shares.setdefault(name, {})[pool] = int(share)
        peers = {}
        for field, seen in zip(flat_seen[::2], flat_seen[1::2], strict=True):
            name = field.decode()
            if name != self._instance:
                number = int(seen.split()[0])
                peers[name] = Peer(number, decode(rows.get(field, b"")), shares.get(name, {}))
        return Answer(shares.get(self._instance, {}), peers, bool(is_settled))

    def _away(self, exc: Exception) -> LedgerAway:
        self.close()
        return LedgerAway(f"{type(exc).__name__}: {exc}")
