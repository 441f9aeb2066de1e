"""Is the model listed? On recordings of engines, and on what a starting engine says (case B103)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.core.look import Answer
from coordinator.core.models import Listing, Models, read_models

CORPUS = Path(__file__).parents[2] / "corpus" / "models"


def listed(*entries: object) -> Answer:
    return Answer(200, json.dumps({"object": "list", "data": entries}).encode())


@pytest.mark.parametrize(
    ("engine", "model", "expected"),
    [
        ("vllm", "tiny-llama", Models(Listing.LISTED, ("tiny-llama",), 2048)),
        ("sglang", "tiny-llama", Models(Listing.LISTED, ("tiny-llama",), 4096)),
        ("llamacpp", "gemma3-270m", Models(Listing.LISTED, ("gemma3-270m",), 2048)),
    ],
)
def test_recording_of_an_engine_lists_its_model(engine: str, model: str, expected: Models) -> None:
    answer = Answer(200, (CORPUS / f"{engine}.json").read_bytes())
    assert read_models(answer, model, engine) == expected


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "sim"])
def test_b103_empty_list_is_no_model_whatever_the_engine(engine: str) -> None:
    assert read_models(listed(), "chat-model", engine).listing is Listing.EMPTY
    assert read_models(Answer(200, b'{"data":null}'), "chat-model", engine).listing is Listing.EMPTY


@pytest.mark.parametrize("engine", ["vllm", "sim"])
def test_engine_that_knows_names_must_list_the_model(engine: str) -> None:
    models = read_models(listed({"id": "other"}), "chat-model", engine)
    assert models == Models(Listing.MISSING, ("other",))


@pytest.mark.parametrize("engine", ["llamacpp", "sglang"])
def test_engine_that_takes_any_name_is_trusted_with_another_one_listed(engine: str) -> None:
    models = read_models(listed({"id": "/models/weights.gguf"}), "chat-model", engine)
    assert models.listing is Listing.TRUSTED


def test_model_may_be_listed_as_an_alias() -> None:
    assert read_models(listed({"id": "x", "aliases": ["y", "m"]}), "m", "vllm").listing is Listing.LISTED


def test_second_entry_counts_with_its_own_context() -> None:
    answer = listed({"id": "base", "max_model_len": 10}, {"id": "lora", "max_model_len": 20})
    assert read_models(answer, "lora", "vllm") == Models(Listing.LISTED, ("base", "lora"), 20)


def test_refused_key_is_not_taken_for_a_missing_model() -> None:
    assert read_models(Answer(401, b'{"error":"no"}'), "m", "vllm").listing is Listing.KEY_REFUSED


def test_server_without_the_route_is_trusted() -> None:
    assert read_models(Answer(404, b"not found"), "m", "vllm").listing is Listing.TRUSTED


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b""),
        Answer(200, b"<html>"),
        Answer(200, b"\xff\xfe"),
        Answer(200, b"[]"),
        Answer(200, b'{"data":[{"name":"m"}]}'),
        Answer(200, b'{"data":["m"]}'),
        Answer(500, b'{"data":[{"id":"m"}]}'),
    ],
)
def test_what_is_no_list_is_unreadable_and_nothing_raises(answer: Answer) -> None:
    assert read_models(answer, "m", "vllm").listing is Listing.UNREADABLE


def test_odd_extras_of_an_entry_do_not_hide_its_model() -> None:
    odd = {"id": "m", "aliases": 3, "max_model_len": "long", "meta": [1]}
    assert read_models(listed(odd), "m", "vllm") == Models(Listing.LISTED, ("m",), None)
