"""The configuration: every key, its default and its text.

Rules:
    - A default stands here and nowhere else; the reference page docs/configuration.md is made from this file.
    - Objects are frozen and built once, in a program's `main()`; constructors get the part they need.
    - Durations are float seconds and sizes int bytes, whatever way the file spells them (`30s`, `64MiB`).
    - What one key alone cannot tell (a fallback that exists, an alias used twice) is checked by `conf.check`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ENGINES = ("vllm", "sglang", "llamacpp", "sim")
FILTERS = ("health", "draining", "excluded")
SCORERS = ("inflight", "queue", "kv")
PICKERS = ("max-score", "p2c", "round-robin", "softmax")
# Contract fields that `router.metrics` may map to an engine's own names.
METRIC_FIELDS = (
    "waiting",
    "running",
    "kv_usage",
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "block_size",
    "num_blocks",
    "kv_tokens",
    "max_context",
    "lora",
)

ENDPOINT_ID = r"^[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,127}$"

# What the shared segment has room for.
MAX_BANDS = 16

# What `Meta.extra` says of a key: how the file spells it, and what a reload does with it.
KIND = "kind"
RESTART = "restart"

Duration = Annotated[float, Meta(ge=0, extra={KIND: "duration"})]
Size = Annotated[int, Meta(ge=1, extra={KIND: "size"})]
Listen = Annotated[str, Meta(extra={KIND: "listen"})]
_NEEDS_RESTART = Meta(extra={RESTART: True})


def _text(description: str) -> Meta:
    return Meta(description=description)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the configuration file."""


class ClientTimeouts(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines on the client's side of a request."""

    header: Annotated[Duration, _text("From the first byte of a request to the end of its headers.")] = 30.0
    body: Annotated[Duration, _text("Longest pause while a request body arrives.")] = 60.0
    keepalive: Annotated[Duration, _text("How long an idle connection stays open.")] = 75.0
    write: Annotated[Duration, _text("Longest pause in which a client takes none of its response.")] = 60.0


class Auth(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use the gateway."""

    enabled: Annotated[
        bool, _text("Ask every request for a key. This version has no keys yet, so it must be `false`.")
    ] = True


class Log(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the processes write. Request lines go to standard output, all others to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _text("Lowest level that is written.")] = (
        "info"
    )
    format: Annotated[
        Literal["auto", "json", "human"],
        _text("`json`: one object per line. `human`: for reading. `auto`: human on a terminal, else json."),
    ] = "auto"


class Picker(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one of the scored endpoints is taken."""

    type: Annotated[
        Literal["max-score", "p2c", "round-robin", "softmax"],
        _text(
            "`max-score`: the best, ties at random. `p2c`: the better of two drawn at random. "
            "`round-robin`: in turn, scores ignored. `softmax`: at random, better ones more often."
        ),
    ] = "max-score"
    temperature: Annotated[
        float,
        Meta(gt=0, description="Only for `softmax`: the smaller, the more the best endpoint is preferred."),
    ] = 0.2


class RoutingProfile(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an endpoint is chosen for a request: filter, score, pick."""

    scorers: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        _text(
            "Weight of each scorer. `inflight`: few requests of this gateway under way. `queue`: few waiting "
            "at the engine. `kv`: KV cache free."
        ),
    ] = msgspec.field(default_factory=lambda: {"inflight": 1.0})
    filters: Annotated[
        tuple[str, ...],
        _text("Which endpoints are left out. `health`: not usable. `draining`. `excluded`: tried already."),
    ] = FILTERS
    picker: Annotated[Picker, _text("Who is taken of those that are scored.")] = Picker()


class Timeouts(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines on the engine's side of a request; 0 switches one off."""

    connect: Annotated[Duration, _text("Opening the connection, TLS included.")] = 5.0
    headers: Annotated[Duration, _text("From the sent request to the response headers.")] = 600.0
    first_token: Annotated[Duration, _text("From the sent request to the first byte of the body.")] = 600.0
    first_token_per_token: Annotated[
        Duration, _text("Added to `first_token` and `headers` for each estimated token of the prompt.")
    ] = 0.0
    idle: Annotated[Duration, _text("Longest pause between two pieces of a response body.")] = 120.0
    total: Annotated[Duration, _text("The whole request.")] = 3600.0


class StreamPing(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signs of life on a stream whose engine is silent."""

    mode: Annotated[
        Literal["off", "comment", "chunk"],
        _text("`comment`: an SSE comment, which clients ignore. `chunk`: an event with no choices."),
    ] = "off"
    interval: Annotated[Duration, _text("Silence after which one is sent.")] = 15.0


class Band(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A priority class of requests."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$",
            description="Name in logs, metrics and the `x-llmgw-band` header; unique.",
        ),
    ]
    priority: Annotated[int, _text("The band with the highest goes first; unique.")]
    saturation_ceiling: Annotated[
        float,
        Meta(
            gt=0,
            description="Saturation up to which its requests start; no lower than that of a band with less "
            "priority. 1 is the healthy limit; a band that must never wait needs more, such as 1000.",
        ),
    ]


class Admission(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests may run; those that may not yet wait in queues, one per band, pool and model."""

    enabled: Annotated[
        bool, _text("Hold requests back; with `false` every request goes to an engine at once.")
    ] = True
    target_waiting_per_replica: Annotated[
        float,
        Meta(gt=0, description="Requests waiting in an engine's own queue that count as a saturation of 1."),
    ] = 4.0
    kv_ceiling: Annotated[
        float, Meta(gt=0, le=1, description="KV cache use of an engine that counts as a saturation of 1.")
    ] = 0.9
    aggregate: Annotated[
        Literal["p90", "mean"],
        _text("Saturation of a pool: `p90`: the one that nine of ten replicas do not exceed. `mean`."),
    ] = "p90"
    assumed_batch_capacity: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests an engine is taken to run at a time until it has shown how many it does.",
        ),
    ] = 8
    queue_ttl: Annotated[Duration, _text("Longest wait in a queue; then the request fails with 504.")] = 30.0
    queue_capacity_per_band: Annotated[
        int, Meta(ge=1, description="Longest queue of one band; requests beyond it fail with 503.")
    ] = 2000
    queue_capacity: Annotated[
        int,
        Meta(
            ge=1,
            description="Longest queue of all bands together. Where it is full, a request takes the place of "
            "the newest one of the lowest band below its own.",
        ),
    ] = 5000
    fairness: Annotated[
        Literal["request", "service"],
        _text(
            "Turns of the tenants within a band. `request`: one request each. `service`: the tenant first "
            "that got least lately (input + 2 x output tokens, halved every minute)."
        ),
    ] = "request"
    soft_ceilings: Annotated[
        bool, _text("Past its ceiling, close a band by and by up to a saturation of 1, not at once.")
    ] = False
    bands: Annotated[tuple[Band, ...], _NEEDS_RESTART, _text("Priority classes, 1 to 16.")] = (
        Band(name="platinum", priority=400, saturation_ceiling=1.0),
        Band(name="gold", priority=300, saturation_ceiling=0.85),
        Band(name="silver", priority=200, saturation_ceiling=0.6),
        Band(name="bronze", priority=100, saturation_ceiling=0.3),
    )
    default_band: Annotated[str, _text("Band of requests that name none.")] = "gold"

    @property
    def bands_by_rank(self) -> tuple[Band, ...]:
        """The bands with the highest priority first; everywhere else a band is its index in this."""
        return tuple(sorted(self.bands, key=lambda band: -band.priority))


class Router(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests reach endpoints."""

    scrape_interval: Annotated[Duration, _text("How often each endpoint's metrics are read.")] = 2.0
    inject_usage: Annotated[
        bool,
        _text("Ask engines for token counts on every stream; withheld from clients that did not ask."),
    ] = True
    retries: Annotated[
        int, Meta(ge=0, le=10, description="Further endpoints tried before a byte reached the client.")
    ] = 2
    cooldown_seconds: Annotated[
        Duration, _text("How long a failing endpoint leaves the candidates. Seconds, or `15s`.")
    ] = 15.0
    endpoint_cache_max_age: Annotated[
        Duration, _text("How long the endpoint table is used while the coordinator is away.")
    ] = 300.0
    admission: Annotated[Admission, _text("When requests may run.")] = Admission()
    default_profile: Annotated[str, _text("Routing profile of models that name none.")] = "chat"
    profiles: Annotated[
        dict[str, RoutingProfile],
        _text("Routing profiles by name. `chat` exists without being named here."),
    ] = msgspec.field(default_factory=lambda: {"chat": RoutingProfile()})
    timeouts: Annotated[Timeouts, _text("Deadlines towards engines.")] = Timeouts()
    response_model: Annotated[
        Literal["requested", "served"],
        _text("Name in a response's `model`: the one the client asked for, or the engine's own."),
    ] = "requested"
    stream_ping: Annotated[StreamPing, _text("Signs of life on silent streams.")] = StreamPing()
    max_event_bytes: Annotated[Size, _text("Longest SSE event of an engine.")] = 64 * 2**20
    metrics: Annotated[
        dict[str, dict[str, str | tuple[str, ...]]],
        _text(
            "Per engine: which of its metrics (one name, or several in order) is a contract field. `NAME`, "
            '`NAME{LABEL}` for the value of a label, `NAME{LABEL="VALUE"}` for one series.'
        ),
    ] = msgspec.field(default_factory=dict)


class Model(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that clients can ask for."""

    name: Annotated[str, Meta(min_length=1, description="What clients send as `model`.")]
    aliases: Annotated[tuple[str, ...], _text("Further names of the same model.")] = ()
    fallbacks: Annotated[
        tuple[str, ...], _text("Models tried in this order when no endpoint can serve this one.")
    ] = ()
    routing_profile: Annotated[str | None, _text("Routing profile; without it `router.default_profile`.")] = (
        None
    )
    timeouts: Annotated[
        Timeouts | None, _text("Deadlines of this model; keys left out are taken from `router.timeouts`.")
    ] = None


class Pool(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is particular to one group of endpoints."""

    max_concurrent: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _text("Requests that may run in it at a time, all instances together; none: no limit."),
    ] = None
    target_waiting_per_replica: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _text("In place of `router.admission.target_waiting_per_replica`."),
    ] = None
    kv_ceiling: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, _text("In place of `router.admission.kv_ceiling`.")
    ] = None
    stuck_after: Annotated[
        Duration,
        _text(
            "An endpoint with a request that made no progress for this long leaves the candidates; 0: never. "
            "Longer than the longest answer that is not streamed."
        ),
    ] = 0.0


class EndpointTls(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS towards an `https` endpoint."""

    ca: Annotated[str | None, _text("File of the authority to trust (PEM); without it the system's own.")] = (
        None
    )
    verify: Annotated[bool, _text("Check the certificate and its name.")] = True


class Endpoint(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An address that the gateway can send requests to."""

    model: Annotated[str, _text("The model it serves: a `models[].name`.")]
    url: Annotated[
        str,
        Meta(description="`http://` or `https://`, host, port; without `/v1`.", extra={KIND: "url"}),
    ]
    id: Annotated[
        str,
        Meta(
            pattern=ENDPOINT_ID,
            description="Name in logs, metrics and the `x-llmgw-replica` header; unique. Empty: host and "
            "port of `url`.",
        ),
    ] = ""
    engine: Annotated[
        Literal["vllm", "sglang", "llamacpp", "sim"],
        _text("Program behind it; decides how metrics are read."),
    ] = "vllm"
    pool: Annotated[str, Meta(min_length=1, description="Group of endpoints it counts to.")] = "default"
    served_model: Annotated[
        str | None, _text("Name by which the engine knows the model; without it `model`.")
    ] = None
    api_key: Annotated[str | None, _text("Sent to the engine as `Authorization: Bearer`.")] = None
    tls: Annotated[EndpointTls | None, _text("TLS settings for an `https` address.")] = None
    weight: Annotated[float, Meta(gt=0, description="Its capacity in relation to the others'.")] = 1.0
    batch_capacity: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _text("Requests it runs at a time at least; none: learned from its metrics."),
    ] = None
    probe: Annotated[
        bool,
        _text(
            "Ask it for its health and metrics. With `false` it always counts as usable, and requests under "
            "way alone say how busy it is."
        ),
    ] = True

    def __repr__(self) -> str:
        """Show what tells endpoints apart, and never the key."""
        return f"Endpoint(id={self.id!r}, model={self.model!r}, url={self.url!r})"


class RedisTls(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS towards a `rediss://` address."""

    ca: Annotated[str | None, _text("File of the authority to trust (PEM); without it the system's own.")] = (
        None
    )
    verify: Annotated[bool, _text("Check the certificate and its name.")] = True


class Redis(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What several instances share their state through; one instance alone needs none."""

    url: Annotated[
        Annotated[str, Meta(extra={KIND: "redis_url"})] | None,
        _text(
            "`redis://` or `rediss://` (TLS), host, port and number of the database; none: this instance is "
            "the only one."
        ),
    ] = None
    password: Annotated[str | None, _text("Password, where it is not in `url`.")] = None
    tls: Annotated[RedisTls | None, _text("TLS settings for a `rediss` address.")] = None
    cluster_name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="Instances of the same name share pools and limits; it is part of every key.",
        ),
    ] = "default"
    exchange_interval: Annotated[
        Duration,
        _text("How often instances tell each other what they run and who waits; 10 ms to 500 ms."),
    ] = 0.1

    def __repr__(self) -> str:
        """Show where it is, and never a password."""
        scheme, _, rest = (self.url or "").partition("://")
        where = f"{scheme}://{rest.rpartition('@')[2]}" if self.url else None
        return f"Redis(url={where!r}, cluster_name={self.cluster_name!r})"


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an instance is told by its operator."""

    listen: Annotated[
        Listen,
        _NEEDS_RESTART,
        _text(
            "Address for clients: `host:port`, `[IPv6]:port`, `:port` for all addresses; port 0: any free."
        ),
    ] = "127.0.0.1:8080"
    admin_listen: Annotated[
        Listen, _NEEDS_RESTART, _text("Address for metrics and the management API; keep it private.")
    ] = "127.0.0.1:9090"
    workers: Annotated[
        int, _NEEDS_RESTART, Meta(ge=1, le=256, description="Worker processes; one per core is usual.")
    ] = 2
    state_dir: Annotated[
        str,
        _NEEDS_RESTART,
        Meta(min_length=1, description="Folder for what survives a restart; from where the program starts."),
    ] = ".cache/llmgw"
    instance: Annotated[
        str, _NEEDS_RESTART, _text("Name of this host in logs and metrics; empty: the host's name.")
    ] = ""
    max_body_bytes: Annotated[Size, _text("Longest request body, after decompression.")] = 64 * 2**20
    max_connections: Annotated[
        int, _NEEDS_RESTART, Meta(ge=1, description="Open client connections of one worker.")
    ] = 16384
    drain_timeout: Annotated[Duration, _text("How long running requests may finish after SIGTERM.")] = 120.0
    client: Annotated[ClientTimeouts, _text("Deadlines on the client's side.")] = ClientTimeouts()
    plain_proxy: Annotated[
        bool,
        _NEEDS_RESTART,
        _text(
            "Relay every request as it is to the model `default`, and `/synthesis/v1/*` to the model "
            "`synthesis`. Not for files: set by `GATEWAY_UPSTREAM_URL`, see plain-proxy.md."
        ),
    ] = False
    auth: Annotated[Auth, _text("Who may use the gateway.")] = Auth()
    log: Annotated[Log, _NEEDS_RESTART, _text("What the processes write.")] = Log()
    router: Annotated[Router, _text("How requests reach endpoints.")] = Router()
    redis: Annotated[Redis, _NEEDS_RESTART, _text("What several instances share.")] = Redis()
    pools: Annotated[
        dict[str, Pool],
        _text("Pools by name, where they differ from `router.admission`. A pool is named by its endpoints."),
    ] = msgspec.field(default_factory=dict)
    models: Annotated[tuple[Model, ...], _text("Models that clients can ask for.")] = ()
    endpoints: Annotated[tuple[Endpoint, ...], _text("Where models are served.")] = ()
