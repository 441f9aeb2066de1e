"""Prompts, tokens and text of the simulated engine. Pure.

A token is four bytes of text, whatever they are, or one id of a token array. So prompts are cut without a
tokenizer, `/tokenize` and `/detokenize` invert each other, and the tokens of an answer (each four bytes long)
are the same tokens when the answer comes back in the next turn's prompt: multi-turn chats find their prefix.
For that, each message is padded to whole tokens.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import msgspec
import orjson
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
# Prime, so that no power of two lines up with it.
VOCABULARY_SIZE = 251
# What text from real models holds and relays trip over: characters of 2, 3 and 4 bytes, quotes, backslashes,
# line breaks. Four bytes each.
_AWKWARD = ("🙂", "猫 ", "né ", " éo", ' "a"', "\n\n- ", " \\n ", "\tif ", "ß; ", " </b", "}\n{\n")


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the engine sees it.

    Attributes:
        data: 4 bytes per token, the last token perhaps fewer.
        tokens: their number.
        hashes: of its full blocks, each over everything before; see `agent.sim.blocks`.
    """

    data: bytes
    tokens: int
    hashes: list[int]


def make_prompt(data: bytes, block_size: int, salt: int = 0) -> Prompt:
    """Cut a prompt into tokens and blocks.

    Args:
        data: rendered text, or token ids by `from_ids`.
        block_size: tokens per block.
        salt: prompts with different salts share nothing.
    """
    size = block_size * TOKEN_BYTES
    link = salt
    hashes = [
        link := xxh3_64_intdigest(data[start : start + size], link)
        for start in range(0, len(data) - size + 1, size)
    ]
    return Prompt(data, max(1, -(-len(data) // TOKEN_BYTES)), hashes)


def continue_hashes(prompt: Prompt, answer: bytes, block_size: int) -> list[int]:
    """Return the hashes of the full blocks behind the prompt's, filled by its rest and `answer`.

    None of them where the prompt ends inside a token: what follows would be cut differently the next time.
    """
    if len(prompt.data) % TOKEN_BYTES or not prompt.hashes:
        return []
    rest = prompt.data[len(prompt.hashes) * block_size * TOKEN_BYTES :] + answer
    return make_prompt(rest, block_size, prompt.hashes[-1]).hashes


def from_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as prompt data."""
    try:
        return array("I", ids).tobytes()
    except OverflowError:
        return array("I", [token & 0xFFFFFFFF for token in ids]).tobytes()


def to_ids(data: bytes) -> list[int]:
    """Return prompt data as token ids."""
    return array("I", data + bytes(-len(data) % TOKEN_BYTES)).tolist()


def salt_of(*parts: str) -> int:
    """Return a salt that depends on every part."""
    return xxh3_64_intdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def to_bytes(text: str) -> bytes:
    """Encode text; unpaired surrogates, which JSON can carry, too."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def padded(text: str) -> bytes:
    """Encode text and fill it up to whole tokens."""
    data = to_bytes(text)
    return data + b" " * (-len(data) % TOKEN_BYTES)


class Vocabulary:
    """Words of an engine, each of four bytes and all different, in an order that depends on the seed.

    An answer walks through them from a place that depends on the prompt: a lost, doubled or misplaced token
    shows, and whoever knows seed and prompt can say what the answer must be.

    Attributes:
        words: text of each token.
        raw: the same in UTF-8.
        escaped: the same as it stands inside a JSON string.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        spoken = [
            f" {first}{vowel}{last}"
            for first in "bcdfghjklmnprstvwz"
            for vowel in "aeiou"
            for last in "dklmnrst"
        ]
        self.words = [*_AWKWARD, *rng.sample(spoken, VOCABULARY_SIZE - len(_AWKWARD))]
        rng.shuffle(self.words)
        self.raw = [word.encode() for word in self.words]
        self.escaped = [orjson.dumps(word)[1:-1] for word in self.words]

    def start(self, prompt: Prompt, seed: int, index: int = 0) -> int:
        """Return where the answer to `prompt` begins.

        Args:
            seed: the request's own.
            index: of the choice, for `n` > 1.
        """
        return (xxh3_64_intdigest(prompt.data, seed & 0xFFFFFFFF) + index * 17) % VOCABULARY_SIZE

    def answer(self, start: int, tokens: int) -> bytes:
        """Return `tokens` tokens from `start` on, in UTF-8."""
        return _walk(self.raw, start, tokens)

    def answer_escaped(self, start: int, tokens: int) -> bytes:
        """Return the same for the inside of a JSON string."""
        return _walk(self.escaped, start, tokens)


def _walk(words: list[bytes], start: int, tokens: int) -> bytes:
    rounds = (start + tokens) // VOCABULARY_SIZE + 1
    return b"".join((words * rounds)[start : start + tokens])
