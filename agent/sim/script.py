"""What an answer looks like on the wire, token by token or whole, in vLLM's shapes. Pure.

An event is `data: ...` and the empty line behind it. Source: recordings of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import orjson

from agent.sim.prompt import TOKEN_BYTES, VOCABULARY_SIZE, Vocabulary
from agent.sim.requests import Generation, ToolCall

DONE = b"data: [DONE]\n\n"
_FINGERPRINT = b"llmgw-sim"


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a request."""

    prompt: int
    completion: int
    cached: int = 0

    def encode(self) -> bytes:
        """Return the `usage` object."""
        return (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d}}'
            % (self.prompt, self.prompt + self.completion, self.completion, self.cached)
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a choice that differ between the two kinds of completion."""

    chunk_object: bytes
    whole_object: bytes
    id_prefix: bytes
    text_open: bytes
    reasoning_open: bytes
    text_close: bytes
    going_on: bytes
    ended: bytes


CHAT = Shape(
    chunk_object=b"chat.completion.chunk",
    whole_object=b"chat.completion",
    id_prefix=b"chatcmpl-",
    text_open=b'{"index":%d,"delta":{"content":"',
    reasoning_open=b'{"index":%d,"delta":{"reasoning_content":"',
    text_close=b'"}',
    going_on=b',"logprobs":null,"finish_reason":null,"token_ids":null}',
    ended=b',"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null}',
)
TEXT = Shape(
    chunk_object=b"text_completion",
    whole_object=b"text_completion",
    id_prefix=b"cmpl-",
    text_open=b'{"index":%d,"text":"',
    reasoning_open=b'{"index":%d,"text":"',
    text_close=b'"',
    going_on=b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}',
    ended=(
        b',"logprobs":null,"finish_reason":"%b","stop_reason":null,"prompt_token_ids":null,"token_ids":null}'
    ),
)


class Script:
    """The answer to one request, known from its start.

    Choice `part * n + i` is the i-th answer to prompt `part`.

    Args:
        generation: the request.
        request_id: in the answer's id.
        created: wall-clock seconds.
        vocabulary: the engine's words.
        reasoning_tokens: how many tokens of a chat answer are reasoning.

    Attributes:
        is_plain: every step but the first and the last is one event that differs in its text alone.
    """

    __slots__ = (
        "_call", "_choices", "_chunk_heads", "_chunk_tail", "_ended", "_envelope", "_going_on", "_head",
        "_id", "_reasoning", "_shape", "_starts", "_words", "created", "generation", "is_plain", "vocabulary",
    )  # fmt: skip

    def __init__(
        self,
        generation: Generation,
        request_id: bytes,
        created: int,
        vocabulary: Vocabulary,
        reasoning_tokens: int = 0,
    ) -> None:
        self.generation = generation
        self.created = created
        self.vocabulary = vocabulary
        shape = self._shape = CHAT if generation.is_chat else TEXT
        self._choices = generation.choices
        self._id = shape.id_prefix + request_id
        self._words = vocabulary.escaped
        self._starts = [
            vocabulary.start(prompt, generation.seed, index)
            for prompt in generation.prompts
            for index in range(generation.choices)
        ]
        self._call = generation.tool_call
        self._reasoning = min(reasoning_tokens, generation.tokens - 1) if generation.is_chat else 0
        self._envelope = b'data: {"id":"%b","object":"%b","created":%d,"model":%b,"choices":[' % (
            self._id,
            shape.chunk_object,
            created,
            orjson.dumps(generation.model),
        )
        reason = b"length" if generation.is_cut else b"stop"
        if self._call is not None:
            reason = b"tool_calls"
        self._ended = shape.ended % reason
        # Length of a token -> chunk size and everything before the token.
        self._chunk_heads: dict[int, bytes] = {}
        self._going_on = shape.text_close + shape.going_on + b"]}\n\n"
        self._chunk_tail = self._going_on + b"\r\n"
        self._head = self._envelope + shape.text_open % 0
        self.is_plain = (
            len(self._starts) == 1
            and self._call is None
            and not self._reasoning
            and not generation.with_running_usage
        )

    def answer(self, part: int) -> bytes:
        """Return what will be generated for a prompt's first choice, 4 bytes per token."""
        if self._call is not None or self._reasoning:
            return b""
        return self.vocabulary.answer(self._starts[part * self._choices], self.generation.tokens)

    def events(self, part: int, produced: int, usage: Usage | None) -> list[bytes]:
        """Return the events of one step.

        Args:
            part: which prompt.
            produced: tokens produced with this step; from 1.
            usage: so far; put into the events if not None.
        """
        generation = self.generation
        close = b"]}\n\n" if usage is None else b'],"usage":%b}\n\n' % usage.encode()
        choices = range(part * self._choices, (part + 1) * self._choices)
        events = []
        if produced == 1 and generation.is_chat:
            role = (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            )
            events += [self._envelope + role % choice + close for choice in choices]
        end = self._ended if produced >= generation.tokens else self._shape.going_on
        events += [self._envelope + self._delta(choice, produced) + end + close for choice in choices]
        return events

    def middle_chunk(self, produced: int) -> bytes:
        """Return the one event of a step between first and last as an HTTP chunk; only if `is_plain`."""
        word = self._words[(self._starts[0] + produced - 1) % VOCABULARY_SIZE]
        head = self._chunk_heads.get(len(word))
        if head is None:
            length = len(self._head) + len(word) + len(self._going_on)
            head = self._chunk_heads[len(word)] = b"%x\r\n%b" % (length, self._head)
        return head + word + self._chunk_tail

    def text_event(self, text: bytes) -> bytes:
        """Return an event with any text (already escaped) for the first choice."""
        return self._head + text + self._going_on

    def ending(self, usage: Usage | None) -> list[bytes]:
        """Return what follows the last token: the usage chunk, if wanted, and `[DONE]`."""
        if usage is None:
            return [DONE]
        last = b'%b],"usage":%b,"system_fingerprint":"%b"}\n\n'
        return [last % (self._envelope, usage.encode(), _FINGERPRINT), DONE]

    def whole(self, usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = b",".join(map(self._whole_choice, range(len(self._starts))))
        return (
            b'{"id":"%b","object":"%b","created":%d,"model":%b,"choices":[%b],"service_tier":null,'
            b'"system_fingerprint":"%b","usage":%b}'
            % (
                self._id,
                self._shape.whole_object,
                self.created,
                orjson.dumps(self.generation.model),
                choices,
                _FINGERPRINT,
                usage.encode(),
            )
        )

    def _delta(self, choice: int, produced: int) -> bytes:
        if self._call is not None:
            return self._call_delta(self._call, choice, produced)
        shape = self._shape
        word = self._words[(self._starts[choice] + produced - 1) % len(self._words)]
        opening = shape.reasoning_open if produced <= self._reasoning else shape.text_open
        return opening % choice + word + shape.text_close

    def _call_delta(self, call: ToolCall, choice: int, produced: int) -> bytes:
        if produced == 1:
            function = b'{"name":%b,"arguments":""}' % orjson.dumps(call.name)
            return (
                b'{"index":%d,"delta":{"tool_calls":[{"id":"%b","type":"function","index":0,"function":%b}]}'
                % (
                    choice,
                    self._call_id(choice),
                    function,
                )
            )
        start = (produced - 2) * TOKEN_BYTES
        piece = orjson.dumps(call.arguments[start : start + TOKEN_BYTES])
        return b'{"index":%d,"delta":{"tool_calls":[{"index":0,"function":{"arguments":%b}}]}' % (
            choice,
            piece,
        )

    def _call_id(self, choice: int) -> bytes:
        return b"chatcmpl-tool-%b-%d" % (self._id, choice)

    def _whole_choice(self, choice: int) -> bytes:
        tokens = self.generation.tokens
        start, ended = self._starts[choice], self._ended
        if not self.generation.is_chat:
            return b'{"index":%d,"text":"%b"%b' % (
                choice,
                self.vocabulary.answer_escaped(start, tokens),
                ended,
            )
        content, calls, reasoning = b"null", b"", b"null"
        if self._call is not None:
            calls = b'"tool_calls":[{"id":"%b","type":"function","function":{"name":%b,"arguments":%b}}],' % (
                self._call_id(choice),
                orjson.dumps(self._call.name),
                orjson.dumps(self._call.arguments),
            )
        else:
            thought = self._reasoning
            text = self.vocabulary.answer_escaped(start + thought, tokens - thought)
            content = b'"%b"' % text
            if thought:
                reasoning = b'"%b"' % self.vocabulary.answer_escaped(start, thought)
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,%b"refusal":null,"annotations":null,'
            b'"audio":null,"function_call":null,"reasoning_content":%b}%b'
            % (choice, content, calls, reasoning, ended)
        )
