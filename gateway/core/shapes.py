"""What is decoded of JSON bodies and events, and into what.

Apart from the modules that use it, because those are compiled: mypyc keeps neither the types nor the keywords
of a msgspec.Struct, and what is decoded into one depends on both.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class RequestShape(msgspec.Struct):
    """The members of a request that are looked at; all but one undecoded."""

    model: str
    stream: Raw = Raw()
    stream_options: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    tools: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    query: Raw = Raw()
    documents: Raw = Raw()
    max_tokens: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    n: Raw = Raw()
    user: Raw = Raw()
    prompt_cache_key: Raw = Raw()


class PeekShape(msgspec.Struct):
    """What plain proxy mode's log wants of a request; undecoded."""

    model: Raw = Raw()
    stream: Raw = Raw()


class StreamOptionsShape(msgspec.Struct):
    """The member `stream_options` of a request."""

    include_usage: Raw = Raw()


class EventShape(msgspec.Struct):
    """What is looked at in the data of an event that may be the usage chunk, or an error."""

    choices: list[Raw] | None = None
    usage: Raw = Raw()
    error: Raw = Raw()


class UsageDetails(msgspec.Struct):
    """Parts of the tokens of a prompt."""

    cached_tokens: int | None = None


class UsageShape(msgspec.Struct):
    """The member `usage` in all spellings."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: UsageDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: UsageDetails | None = None
    cache_read_input_tokens: int | None = None


class ResponseShape(msgspec.Struct):
    """A response, or an event's data: its usage, and the members that may wrap the object that has one."""

    usage: UsageShape | None = None
    response: Raw = Raw()
    message: Raw = Raw()


decode_request = msgspec.json.Decoder(RequestShape).decode
decode_peek = msgspec.json.Decoder(PeekShape).decode
decode_stream_options = msgspec.json.Decoder(StreamOptionsShape).decode
decode_event = msgspec.json.Decoder(EventShape).decode
decode_usage = msgspec.json.Decoder(UsageShape).decode
decode_response = msgspec.json.Decoder(ResponseShape).decode
decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
