"""What clients ask of the simulated engine: bodies read, checked, and turned into prompts. Pure.

As strict as vLLM where clients and gateways meet it (model, messages, numbers, context), blind to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from agent.sim.errors import EngineError, invalid_field, prompt_too_long, unknown_model
from agent.sim.prompt import TOKEN_BYTES, Prompt, from_ids, make_prompt, padded, salt_of, to_bytes

# A decoded JSON object; read here and nowhere else.
Body = Mapping[str, Any]

_ROLE_HEADS = {
    role: padded(f"<|{role}|>") for role in ("system", "developer", "user", "assistant", "tool", "function")
}
# What an image costs a vision model, roughly; as prompt data that two images share only if they are equal.
_IMAGE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine accepts.

    Attributes:
        models: names it answers to, the first being its own.
        max_model_len: tokens of prompt and answer together.
        output_tokens: of an answer, where the request does not say.
        block_size: tokens per block.
    """

    models: tuple[str, ...]
    max_model_len: int
    output_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The call an answer will consist of.

    Attributes:
        name: of the function.
        arguments: a JSON object that the function's schema accepts, roughly.
    """

    name: str
    arguments: str


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A request for text.

    Attributes:
        model: as the client named it.
        is_chat: chat completion, else completion.
        prompts: one, or several for a completion with a list.
        tokens: of the answer; per choice.
        is_cut: the answer ends because it reached the limit the client gave ("length", else "stop").
        choices: `n`.
        seed: the request's own.
        is_stream: send every token when it comes.
        with_usage: end a stream with a usage chunk.
        with_running_usage: put usage in every chunk.
        tool_call: answer with it instead of with text.
    """

    model: str
    is_chat: bool
    prompts: tuple[Prompt, ...]
    tokens: int
    is_cut: bool
    choices: int
    seed: int
    is_stream: bool
    with_usage: bool
    with_running_usage: bool
    tool_call: ToolCall | None


def decode(body: bytes) -> Body:
    """Decode a request body.

    Raises:
        EngineError: it is no JSON object.
    """
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        loc = f"body.{error.pos}"
        raise invalid_field("json_invalid", loc, f"JSON decode error: {error.msg}", "...") from error
    if not isinstance(decoded, dict):
        raise invalid_field(
            "model_attributes_type",
            "body",
            "Input should be a valid dictionary",
            f"<{type(decoded).__name__}>",
        )
    return decoded


def read_generation(body: Body, limits: Limits, *, is_chat: bool) -> Generation:
    """Check a chat completion's or completion's body.

    Raises:
        EngineError: as vLLM would refuse it.
    """
    model = read_model(body, limits)
    salt = salt_of(model, str(body.get("cache_salt") or ""))
    if is_chat:
        prompts: tuple[Prompt, ...] = (make_prompt(render_chat(body), limits.block_size, salt),)
    else:
        prompts = tuple(make_prompt(data, limits.block_size, salt) for data in _prompt_data(body, "prompt"))
    longest = max(prompt.tokens for prompt in prompts)
    if longest >= limits.max_model_len:
        raise prompt_too_long(longest, limits.max_model_len)
    _number(body, "temperature", float)
    _number(body, "top_p", float)
    wanted = _number(body, "max_completion_tokens", int)
    if wanted is None:
        wanted = _number(body, "max_tokens", int)
    if wanted is not None and wanted < 0:
        raise EngineError(
            400, f"max_tokens must be at least 0, got {wanted}.", "BadRequestError", "max_tokens"
        )
    tool_call = _tool_call(body) if is_chat and body.get("tools") else None
    tokens = limits.output_tokens if wanted is None else max(1, wanted)
    if tool_call is not None:
        tokens = 1 + -(-len(tool_call.arguments) // TOKEN_BYTES)
    choices = _number(body, "n", int)
    if choices is not None and not 1 <= choices <= 128:
        raise EngineError(400, f"n must be between 1 and 128, got {choices}.", "BadRequestError", "n")
    seed = _number(body, "seed", int)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid_field("dict_type", "body.stream_options", "Input should be a valid dictionary", "...")
    is_stream = _flag(body, "stream")
    if options is not None and not is_stream:
        raise EngineError(
            400,
            "1 validation error:\n  Value error, Stream options can only be defined when `stream=True`.",
            "Bad Request",
            "stream_options",
        )
    with_usage = bool(options and options.get("include_usage"))
    return Generation(
        model=model,
        is_chat=is_chat,
        prompts=prompts,
        # vLLM cuts what goes past the context, it does not refuse it.
        tokens=min(tokens, limits.max_model_len - longest),
        is_cut=wanted is not None and tool_call is None,
        choices=choices or 1,
        seed=seed or 0,
        is_stream=is_stream,
        with_usage=with_usage,
        with_running_usage=with_usage and bool(options and options.get("continuous_usage_stats")),
        tool_call=tool_call,
    )


def read_model(body: Body, limits: Limits, *, is_required: bool = True) -> str:
    """Return the model a body names.

    Raises:
        EngineError: it names none (if required), or one that is not served.
    """
    model = body.get("model")
    if model is None:
        if is_required:
            raise _missing(body, "model")
        return limits.models[0]
    if not isinstance(model, str):
        raise invalid_field("string_type", "body.model", "Input should be a valid string", repr(model))
    if model not in limits.models:
        raise unknown_model(model, limits.models)
    return model


def read_inputs(body: Body, limits: Limits, field: str) -> tuple[Prompt, ...]:
    """Return the prompts of an embedding: texts, token ids, or (chat embeddings) messages.

    Raises:
        EngineError: there are none, or one is too long.
    """
    items = [render_chat(body)] if "messages" in body else _prompt_data(body, field)
    return _within_context(items, limits)


def read_pairs(body: Body, limits: Limits, first: str, second: str) -> tuple[tuple[Prompt, ...], list[str]]:
    """Return the prompts of a rerank or score request, one per pair, and the second texts.

    Raises:
        EngineError: a field is missing, or a pair is too long.
    """
    for field in (first, second):
        if field not in body:
            raise _missing(body, field)
    ones = [_text_of(one) for one in _listed(body[first])]
    others = [_text_of(one) for one in _listed(body[second])]
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise EngineError(400, "Input lengths must be either 1:1, 1:N or N:N", "BadRequestError")
    items = [padded(one) + padded(other) for one, other in zip(ones, others, strict=True)]
    return _within_context(items, limits), others


def read_tokenize(body: Body) -> bytes:
    """Return the prompt data of a `/tokenize` body.

    Raises:
        EngineError: it has neither prompt nor messages.
    """
    return render_chat(body) if "messages" in body else _prompt_data(body, "prompt")[0]


def render_chat(body: Body) -> bytes:
    """Put tools and messages into one prompt, every part in whole tokens.

    Raises:
        EngineError: there are no messages, or one is none.
    """
    messages = body.get("messages")
    if messages is None:
        raise _missing(body, "messages")
    if not isinstance(messages, list):
        raise invalid_field("list_type", "body.messages", "Input should be a valid list", "...")
    parts = []
    tools = body.get("tools")
    if tools:
        parts.append(padded("<|tools|>" + orjson.dumps(tools).decode()))
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid_field("missing", f"body.messages.{index}.role", "Field required", "...")
        role = message["role"]
        parts.append(_ROLE_HEADS.get(role) or padded(f"<|{role}|>"))
        content = message.get("content")
        if content is not None:
            parts.append(padded(content) if isinstance(content, str) else padded(_text_of(content)))
        if message.get("tool_calls"):
            parts.append(padded(orjson.dumps(message["tool_calls"]).decode()))
    parts.append(_ROLE_HEADS["assistant"])
    return b"".join(parts)


def _text_of(content: Any) -> str:
    """Return the text of a message's content, of a list of parts, or of a document."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return str(content["text"])
        if content.get("type") in ("image_url", "input_audio", "video_url"):
            mark = f"<{salt_of(orjson.dumps(content).decode()):016x}>"
            return (mark * (_IMAGE_TOKENS * TOKEN_BYTES // len(mark) + 1))[: _IMAGE_TOKENS * TOKEN_BYTES]
        return orjson.dumps(content).decode()
    if isinstance(content, list):
        return "".join(map(_text_of, content))
    return str(content)


def _prompt_data(body: Body, field: str) -> list[bytes]:
    """Return one prompt's data per item of a text, list of texts, list of ids, or list of lists of ids."""
    value = body.get(field)
    if value is None:
        raise _missing(body, field)
    if isinstance(value, str):
        return [to_bytes(value)]
    if isinstance(value, list) and value:
        if all(isinstance(item, int) for item in value):
            return [from_ids(value)]
        if all(isinstance(item, str) for item in value):
            return [to_bytes(item) for item in value]
        if all(isinstance(item, list) and item and all(isinstance(i, int) for i in item) for item in value):
            return [from_ids(item) for item in value]
    raise invalid_field(
        "string_type", f"body.{field}", "Input should be a text, a list of texts or token ids", "..."
    )


def _within_context(items: list[bytes], limits: Limits) -> tuple[Prompt, ...]:
    prompts = tuple(make_prompt(data, limits.block_size) for data in items)
    longest = max(prompt.tokens for prompt in prompts)
    if longest > limits.max_model_len:
        raise prompt_too_long(longest, limits.max_model_len)
    return prompts


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _missing(body: Body, field: str) -> EngineError:
    return invalid_field("missing", f"body.{field}", "Field required", f"'<dict of {len(body)} items>'")


def _number(body: Body, field: str, kind: type[int] | type[float]) -> Any:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        name, what = ("int_parsing", "integer") if kind is int else ("float_parsing", "number")
        message = f"Input should be a valid {what}, unable to parse string as a {what}"
        raise invalid_field(name, f"body.{field}", message, repr(value))
    return value


def _flag(body: Body, field: str) -> bool:
    value = body.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid_field("bool_parsing", f"body.{field}", "Input should be a valid boolean", repr(value))
    return value


def _tool_call(body: Body) -> ToolCall | None:
    """Return the call to answer with; None for text.

    With tools and a `tool_choice` that allows it there is always a call, except that `auto` behind a tool's
    result gives text, so that an agent's loop comes to its end.
    """
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return None
    messages = body["messages"]
    if choice == "auto" and messages and messages[-1]["role"] in ("tool", "function"):
        return None
    offered: list[Any] = [tool.get("function") for tool in _listed(body["tools"]) if isinstance(tool, dict)]
    functions = [one for one in offered if isinstance(one, dict) and isinstance(one.get("name"), str)]
    if isinstance(choice, dict):
        wanted = choice.get("function")
        name = wanted.get("name") if isinstance(wanted, dict) else None
        functions = [one for one in functions if one["name"] == name]
        if not functions:
            raise EngineError(
                400, f"Tool {name!r} in `tool_choice` is not in `tools`.", "Bad Request", "tool_choice"
            )
    if not functions:
        return None
    return ToolCall(
        name=functions[0]["name"], arguments=orjson.dumps(_example(functions[0].get("parameters"))).decode()
    )


def _example(schema: Any, depth: int = 0) -> Any:
    """Return a value that a JSON schema accepts, as far as type, enum and properties go."""
    if not isinstance(schema, dict):
        return {} if depth == 0 else None
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object" or "properties" in schema or depth == 0:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or depth > 4:
            return {}
        return {name: _example(part, depth + 1) for name, part in properties.items()}
    if kind == "array":
        return [_example(schema.get("items"), depth + 1)]
    return {"integer": 7, "number": 0.5, "boolean": True, "null": None}.get(str(kind), 'Zürich "HB"')
