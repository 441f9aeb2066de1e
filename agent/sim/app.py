"""What the simulated engine answers."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec
import orjson

from agent.sim.connection import Connection
from agent.sim.engine import Engine, Timing, Work
from agent.sim.errors import EngineError
from agent.sim.exposition import exposition
from agent.sim.faults import REPLY_FAULTS, Fault, FaultKind, Faults
from agent.sim.http import BadRequestError, Request
from agent.sim.prompt import Prompt, Vocabulary, to_ids
from agent.sim.reply import BatchReply, Envelope, GenerationReply, HungReply, respond
from agent.sim.requests import (
    Limits,
    decode,
    read_generation,
    read_inputs,
    read_model,
    read_pairs,
    read_tokenize,
)
from agent.sim.script import Script, Usage
from conf.version import __version__

_EMBEDDING_SIZE = 8
_KEPT_REQUESTS = 256
_KEPT_BODY_BYTES = 4 * 1024 * 1024
_GARBAGE = b"\x16\x03\x01\x02\x00 this is not HTTP\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine behaves; sizes that cannot change later are `Engine`'s own.

    Attributes:
        limits: what it accepts.
        api_key: wanted as a bearer on `/v1/*`; empty: none.
        reasoning_tokens: at the beginning of a chat answer.
        sends_head_first: send a stream's head when the request came, as vLLM does, not with the first token.
    """

    limits: Limits
    api_key: str = ""
    reasoning_tokens: int = 0
    sends_head_first: bool = True


class KeptRequest(msgspec.Struct, frozen=True):
    """A request as it came, for those who ask later."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class App:
    """Answers requests; owns faults and what is counted about requests and connections.

    Args:
        engine: shared with the loop, which steps it.
        vocabulary: of the answers.
        refuse: called with whether connections are to be refused.

    Attributes:
        control: answers `/sim/*`; set by whoever wires the two.
        connections: of the engine's port, by descriptor.
        kept: the last POSTs.
        accepted: connections since the start or reset.
        received: POSTs; faults included.
        refused: POSTs answered with a 4xx.
        hung: requests that wait for an answer which never comes.
    """

    def __init__(
        self, engine: Engine, settings: Settings, vocabulary: Vocabulary, refuse: Callable[[bool], None]
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.control: Callable[[Connection, Request, Envelope], None] = _no_control
        self.faults = Faults()
        self._vocabulary = vocabulary
        self._refuse = refuse
        self._ids = count(1)
        self._id_prefix = os.urandom(4).hex().encode()
        self.kept: deque[KeptRequest] = deque(maxlen=_KEPT_REQUESTS)
        self.connections: dict[int, Connection] = {}
        self.accepted = 0
        self.received = 0
        self.refused = 0
        self.hung = 0
        self._api: dict[str, dict[str, Callable[[Connection, Request, Envelope], None]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._complete},
            "/v1/embeddings": {"POST": self._embed},
            "/v1/rerank": {"POST": self._rerank},
            "/rerank": {"POST": self._rerank},
            "/v1/score": {"POST": self._score},
            "/score": {"POST": self._score},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
        }

    # What the connections tell.

    def on_accept(self, connection: Connection) -> None:
        """Count a client; reset it, if that is the fault."""
        if connection.is_control:
            return
        self.connections[connection.fd] = connection
        self.accepted += 1
        if self.faults and self.faults.take(FaultKind.RESET_ACCEPT):
            connection.close(reset=True)

    def on_closed(self, connection: Connection) -> None:
        """Count it out."""
        self.connections.pop(connection.fd, None)

    def on_bad_request(self, connection: Connection, error: BadRequestError) -> None:
        """Answer as uvicorn does."""
        envelope = Envelope(self._next_id(), is_keep_alive=False)
        respond(connection, error.status, envelope, str(error).encode(), b"text/plain; charset=utf-8")

    def on_request(self, connection: Connection, request: Request) -> None:
        """Answer, or let a fault do so."""
        request_id = request.headers.get(b"x-request-id") or self._next_id()
        envelope = Envelope(request_id, request.is_keep_alive)
        path = request.path
        if path.startswith("/sim/"):
            self.control(connection, request, envelope)
            return
        if connection.is_control:
            respond(connection, 404, envelope, b'{"detail":"Only /sim/* here"}')
            return
        if request.method == "POST":
            self.received += 1
            if len(request.body) <= _KEPT_BODY_BYTES:
                self.kept.append(
                    KeptRequest(request.method, request.target, request.raw_headers, request.body)
                )
        if self.faults and self._strike(connection, request, envelope):
            return
        methods = self._api.get(path)
        if methods is None:
            respond(connection, 404, envelope, b'{"detail":"Not Found"}')
            return
        answer = methods.get(request.method)
        if answer is None:
            allow = b"allow: %b\r\n" % ", ".join(methods).encode()
            respond(connection, 405, envelope, b'{"detail":"Method Not Allowed"}', fields=allow)
            return
        key = self.settings.api_key
        if key and path.startswith("/v1/") and not _has_key(request, key):
            respond(connection, 401, envelope, b'{"error":"Unauthorized"}')
            return
        try:
            answer(connection, request, envelope)
        except EngineError as error:
            self.refused += 1
            respond(connection, error.status, envelope, error.body())

    def reset(self) -> None:
        """Forget counts, kept requests and cached prompts; connections and works go on."""
        self.engine.reset()
        self.kept.clear()
        self.received = self.refused = 0
        self.accepted = len(self.connections)

    # Faults.

    def _strike(self, connection: Connection, request: Request, envelope: Envelope) -> bool:
        """Let a fault answer in the engine's place; whether one did."""
        faults, method, path = self.faults, request.method, request.path
        if connection.requests > 1 and faults.take(FaultKind.CLOSE_ON_REUSE, method, path):
            connection.close(reset=True)
            return True
        if faults.take(FaultKind.RESET, method, path):
            connection.close(reset=True)
            return True
        if faults.take(FaultKind.GARBAGE, method, path):
            connection.write(_GARBAGE)
            connection.close_when_sent()
            return True
        status = faults.take(FaultKind.STATUS, method, path)
        if status is not None:
            _respond_with_fault(connection, status, envelope)
            return True
        if faults.take(FaultKind.HANG_HEADERS, method, path):
            self.hung += 1
            connection.reply = HungReply(self._on_hung_gone)
            return True
        if faults.is_set(FaultKind.HEALTH_LIES) and method == "POST":
            faults.take(FaultKind.HEALTH_LIES, method, path)
            error = EngineError(500, "EngineCore encountered an issue.", "InternalServerError")
            respond(connection, 500, envelope, error.body())
            return True
        return False

    def _on_hung_gone(self) -> None:
        self.hung -= 1
        self.engine.counts.aborted += 1

    def _reply_faults(self, request: Request) -> dict[FaultKind, Fault]:
        if not self.faults:
            return {}
        taken = {kind: self.faults.take(kind, request.method, request.path) for kind in REPLY_FAULTS}
        return {kind: fault for kind, fault in taken.items() if fault is not None}

    def set_fault(self, fault: Fault) -> None:
        """Set a fault and bring about what it means at once."""
        self.faults.add(fault)
        if fault.kind is FaultKind.STUCK:
            self.engine.freeze(time.monotonic())
        elif fault.kind is FaultKind.REFUSE:
            self._refuse(True)
            # A dead engine keeps no connection open either; streams under way end by themselves.
            for connection in [one for one in self.connections.values() if one.is_idle]:
                connection.close()

    def clear_faults(self, kind: FaultKind | None = None) -> None:
        """Take faults back, with what they brought about."""
        self.faults.clear(kind)
        if not self.faults.is_set(FaultKind.STUCK):
            self.engine.thaw(time.monotonic())
        if not self.faults.is_set(FaultKind.REFUSE):
            self._refuse(False)

    # The engine's API.

    def _chat(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        self._generate(connection, request, envelope, is_chat=True)

    def _complete(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        self._generate(connection, request, envelope, is_chat=False)

    def _generate(
        self, connection: Connection, request: Request, envelope: Envelope, *, is_chat: bool
    ) -> None:
        settings = self.settings
        generation = read_generation(decode(request.body), settings.limits, is_chat=is_chat)
        faults = self._reply_faults(request)
        slow = faults.pop(FaultKind.SLOW, None)
        script = Script(
            generation, envelope.request_id, int(time.time()), self._vocabulary, settings.reasoning_tokens
        )
        reply = GenerationReply(
            connection, self.engine, envelope, script, faults, sends_head_first=settings.sends_head_first
        )
        works = [
            Work(
                prompt,
                generation.tokens,
                reply.part_sink(part),
                sequences=generation.choices,
                is_stepwise=generation.is_stream,
                slow_factor=slow.number() if slow is not None else 1.0,
                answer=script.answer(part),
            )
            for part, prompt in enumerate(generation.prompts)
        ]
        self._submit(connection, reply, works)

    def _embed(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        body = decode(request.body)
        model = read_model(body, self.settings.limits)
        prompts = read_inputs(body, self.settings.limits, "input")
        as_base64 = body.get("encoding_format") == "base64"

        def answer(usage: Usage) -> bytes:
            data: list[dict[str, object]] = [
                {"index": index, "object": "embedding", "embedding": _embedding(prompt, as_base64)}
                for index, prompt in enumerate(prompts)
            ]
            return _list("embd-", envelope, model, data, usage)

        self._batch(connection, envelope, prompts, answer)

    def _rerank(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        body = decode(request.body)
        model = read_model(body, self.settings.limits)
        prompts, documents = read_pairs(body, self.settings.limits, "query", "documents")
        scored = sorted(
            ((_score(prompt), index) for index, prompt in enumerate(prompts)),
            key=lambda pair: (-pair[0], pair[1]),
        )
        top = body.get("top_n")
        results = [
            {"index": index, "document": {"text": documents[index]}, "relevance_score": score}
            for score, index in scored[: top if isinstance(top, int) and top > 0 else None]
        ]

        def answer(usage: Usage) -> bytes:
            return orjson.dumps(
                {
                    "id": "rerank-" + envelope.request_id.decode("latin-1"),
                    "model": model,
                    "usage": {"total_tokens": usage.prompt, "prompt_tokens": usage.prompt},
                    "results": results,
                }
            )

        self._batch(connection, envelope, prompts, answer)

    def _score(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        body = decode(request.body)
        model = read_model(body, self.settings.limits)
        prompts, _ = read_pairs(body, self.settings.limits, "text_1", "text_2")

        def answer(usage: Usage) -> bytes:
            data: list[dict[str, object]] = [
                {"index": index, "object": "score", "score": _score(prompt)}
                for index, prompt in enumerate(prompts)
            ]
            return _list("score-", envelope, model, data, usage)

        self._batch(connection, envelope, prompts, answer)

    def _batch(
        self,
        connection: Connection,
        envelope: Envelope,
        prompts: tuple[Prompt, ...],
        answer: Callable[[Usage], bytes],
    ) -> None:
        reply = BatchReply(connection, self.engine, envelope, answer)
        works = [Work(prompt, 1, reply, generates=False, is_stepwise=False) for prompt in prompts]
        self._submit(connection, reply, works)

    def _submit(self, connection: Connection, reply: GenerationReply | BatchReply, works: list[Work]) -> None:
        reply.works = works
        # Sending the head may have shown that nobody is there any more.
        if connection.is_closed:
            return
        connection.reply = reply
        now = time.monotonic()
        for work in works:
            self.engine.submit(work, now)

    def _models(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        limits = self.settings.limits
        names = () if self.faults.is_set(FaultKind.HEALTH_LIES) else limits.models
        models = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "llmgw-sim",
                "root": limits.models[0],
                "parent": None,
                "max_model_len": limits.max_model_len,
            }
            for name in names
        ]
        respond(connection, 200, envelope, orjson.dumps({"object": "list", "data": models}))

    def _health(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        respond(connection, 200, envelope, b"", b"")

    def _metrics(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        text = exposition(self.engine, self.settings.limits.models[0])
        respond(connection, 200, envelope, text, b"text/plain; version=0.0.4; charset=utf-8")

    def _version(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        respond(connection, 200, envelope, orjson.dumps({"version": f"{__version__}-sim"}))

    def _load(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        load = self.engine.running + self.engine.waiting
        respond(connection, 200, envelope, orjson.dumps({"server_load": load}))

    def _tokenize(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        body = decode(request.body)
        limits = self.settings.limits
        read_model(body, limits, is_required=False)
        tokens = to_ids(read_tokenize(body))
        answer = {
            "count": len(tokens),
            "max_model_len": limits.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        respond(connection, 200, envelope, orjson.dumps(answer))

    def _detokenize(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        body = decode(request.body)
        read_model(body, self.settings.limits, is_required=False)
        (prompt,) = read_inputs(body, self.settings.limits, "tokens")
        text = prompt.data.rstrip(b"\0").decode("utf-8", "replace")
        respond(connection, 200, envelope, orjson.dumps({"prompt": text}))

    def _reset_prefix_cache(self, connection: Connection, request: Request, envelope: Envelope) -> None:
        self.engine.pool.forget()
        respond(connection, 200, envelope, b"", b"")

    def _next_id(self) -> bytes:
        return b"%b%08x" % (self._id_prefix, next(self._ids))


def make_timing(*, ttft_ms: float, prefill_us_per_token: float, itl_ms: float, slow_factor: float) -> Timing:
    """Return the timing for values in the units of flags."""
    return Timing(
        ttft_s=ttft_ms / 1e3,
        prefill_s_per_token=prefill_us_per_token / 1e6,
        itl_s=itl_ms / 1e3,
        slow_factor=slow_factor,
    )


def _no_control(connection: Connection, request: Request, envelope: Envelope) -> None:
    respond(connection, 404, envelope, b'{"detail":"No control path"}')


def _has_key(request: Request, key: str) -> bool:
    scheme, _, value = request.headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and value.strip() == key.encode()


def _respond_with_fault(connection: Connection, fault: Fault, envelope: Envelope) -> None:
    status, kind, retry_after = [*fault.parts(), "", ""][:3]
    fields = b"retry-after: %b\r\n" % retry_after.encode() if retry_after else b""
    match kind:
        case "html":
            body, content_type = b"<html><body><h1>Service trouble</h1></body></html>", b"text/html"
        case "empty":
            body, content_type = b"", b""
        case "detail":
            body, content_type = b'{"detail":"trouble on request"}', b"application/json"
        case _:
            error = EngineError(int(float(status)), "The fault that was asked for.", "SimulatedError")
            body, content_type = error.body(), b"application/json"
    respond(connection, int(float(status)), envelope, body, content_type, fields)


def _list(prefix: str, envelope: Envelope, model: str, data: list[dict[str, object]], usage: Usage) -> bytes:
    return orjson.dumps(
        {
            "id": prefix + envelope.request_id.decode("latin-1"),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": orjson.Fragment(usage.encode()),
        }
    )


def _embedding(prompt: Prompt, as_base64: bool) -> list[float] | str:
    """Return a unit-like vector that depends on the prompt alone."""
    digest = hashlib.sha256(prompt.data).digest()
    vector = [(byte - 127.5) / 255 for byte in digest[:_EMBEDDING_SIZE]]
    if not as_base64:
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _score(prompt: Prompt) -> float:
    """Return a score in [0, 1) that depends on the pair alone."""
    return int.from_bytes(hashlib.sha256(prompt.data).digest()[:4], "big") / 2**32
