"""Does an engine serve the model that the configuration says it serves? Reads `/v1/models`.

Rules:
    - vLLM answers a request for any other name with 404, so the name must be listed.
    - llama.cpp and SGLang take any name. There an empty list still means that nothing is loaded; any other
      list is trusted, and a name that is not in it is worth a word (`Listing.TRUSTED`).
    - A server without this route says nothing about its models, and is trusted as well.

Sources: recordings of vLLM 0.32, SGLang 0.5.23 and llama.cpp; case B103.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from coordinator.core.look import Answer

# Engines that answer for a model by whatever name it is asked for.
_TAKES_ANY_NAME = frozenset({"llamacpp", "sglang"})
_NAMES_TOLD = 5  # of a long list, in messages
_NO_ROUTE = frozenset({404, 405, 501})


class Listing(Enum):
    """What the list says about a model."""

    LISTED = "listed"
    TRUSTED = "trusted"  # the list does not name it, and need not
    MISSING = "model_not_listed"
    EMPTY = "no_model_loaded"
    KEY_REFUSED = "key_refused"
    UNREADABLE = "unreadable"

    @property
    def is_served(self) -> bool:
        """Whether requests for the model can be answered there."""
        return self in (Listing.LISTED, Listing.TRUSTED)


@dataclass(frozen=True, slots=True)
class Models:
    """What `/v1/models` says about one model.

    Attributes:
        listing: all in all.
        names: the first few names that are listed, for messages.
        max_context: tokens that a request may have, prompt and answer; None if not said.
    """

    listing: Listing
    names: tuple[str, ...] = ()
    max_context: int | None = None


class _Entry(msgspec.Struct):
    """One model. All but the name is optional, and typed by looking: an odd extra must not hide a model."""

    id: str
    aliases: Any = None
    max_model_len: Any = None
    meta: Any = None


class _List(msgspec.Struct):
    data: tuple[_Entry, ...] | None


_decode = msgspec.json.Decoder(_List).decode


def read_models(answer: Answer, served_model: str, engine: str) -> Models:
    """Judge an engine's list of models. Never raises, whatever the engine sent.

    Args:
        answer: of `/v1/models`.
        served_model: name by which the configuration thinks the engine knows the model.
        engine: kind of engine.
    """
    if answer.status in (401, 403):
        return Models(Listing.KEY_REFUSED)
    if answer.status in _NO_ROUTE:
        return Models(Listing.TRUSTED)
    if not answer.is_ok:
        return Models(Listing.UNREADABLE)
    try:
        entries = _decode(answer.body).data or ()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Models(Listing.UNREADABLE)
    names = tuple(entry.id for entry in entries[:_NAMES_TOLD])
    if not entries:
        return Models(Listing.EMPTY)
    for entry in entries:
        if served_model == entry.id or served_model in _aliases(entry):
            return Models(Listing.LISTED, names, _max_context(entry))
    if engine in _TAKES_ANY_NAME:
        return Models(Listing.TRUSTED, names, _max_context(entries[0]))
    return Models(Listing.MISSING, names)


def _aliases(entry: _Entry) -> list[Any]:
    return entry.aliases if isinstance(entry.aliases, list) else []


def _max_context(entry: _Entry) -> int | None:
    """Return what vLLM and SGLang call max_model_len, llama.cpp meta.n_ctx."""
    meta = entry.meta if isinstance(entry.meta, dict) else {}
    for said in (entry.max_model_len, meta.get("n_ctx")):
        if isinstance(said, int) and said > 0:
            return said
    return None
