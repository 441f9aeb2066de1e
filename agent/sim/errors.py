"""Errors of the simulated engine, in vLLM's words and shapes. Pure."""

from __future__ import annotations

import orjson

from conf.errors import LlmgwError


class EngineError(LlmgwError):
    """A request is refused; becomes an OpenAI-shaped body.

    Args:
        status: HTTP status, and `code` of the body.
        message: for people.
        type: the body's `type`.
        param: the field at fault.
    """

    def __init__(self, status: int, message: str, type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param

    def body(self) -> bytes:
        """Return `{"error": {...}}`."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


def invalid_field(kind: str, field: str, message: str, given: str) -> EngineError:
    """Return vLLM's 400 for a field that pydantic refuses.

    Args:
        kind: pydantic's name of the fault.
        given: how the value is shown.
    """
    shown = f"{{'type': '{kind}', 'loc': '{field}', 'msg': '{message}', 'input': {given}}}"
    return EngineError(400, f"1 validation error:\n  {shown}", "Bad Request", field)


def unknown_model(name: str, known: tuple[str, ...]) -> EngineError:
    """Return vLLM's 404 for a model it does not serve."""
    text = f"The model `{name}` does not exist. Valid aliases: {', '.join(known)}."
    return EngineError(404, text, "NotFoundError", "model")


def prompt_too_long(tokens: int, limit: int) -> EngineError:
    """Return vLLM's 400 for a prompt beyond the context."""
    text = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} "
        "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of "
        f"the input prompt. (parameter=input_tokens, value={tokens})"
    )
    return EngineError(400, text, "BadRequestError", "input_tokens")
