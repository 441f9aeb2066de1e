"""Prompts and words of the simulated engine."""

from __future__ import annotations

import pytest

from agent.sim.errors import EngineError
from agent.sim.prompt import VOCABULARY_SIZE, Vocabulary, from_ids, make_prompt, to_ids
from agent.sim.requests import Limits, decode, read_generation, render_chat

LIMITS = Limits(models=("m",), max_model_len=10_000, output_tokens=8, block_size=16)


def chat(*contents: str) -> bytes:
    roles = ("user", "assistant")
    return render_chat(
        {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}
    )


def test_every_word_is_one_token_and_different() -> None:
    words = Vocabulary(3)
    assert {len(raw) for raw in words.raw} == {4}
    assert len(set(words.raw)) == VOCABULARY_SIZE


def test_vocabulary_depends_on_the_seed_alone() -> None:
    assert Vocabulary(1).words == Vocabulary(1).words
    assert Vocabulary(1).words != Vocabulary(2).words


def test_answer_longer_than_the_vocabulary_goes_round() -> None:
    words = Vocabulary(0)
    answer = words.answer(200, 600)
    assert len(answer) == 2400
    assert answer[:4] == words.raw[200]
    assert answer[-4:] == words.raw[(200 + 599) % VOCABULARY_SIZE]


def test_ids_survive_the_way_there_and_back() -> None:
    assert to_ids(from_ids([0, 7, 2**32 - 1])) == [0, 7, 2**32 - 1]


def test_equal_hashes_mean_an_equal_beginning() -> None:
    one, other = make_prompt(b"a" * 64 + b"b" * 64, 16), make_prompt(b"a" * 64 + b"c" * 64, 16)
    moved = make_prompt(b"b" * 64 + b"a" * 64, 16)
    assert one.hashes[0] == other.hashes[0]
    assert one.hashes[1] != other.hashes[1]
    assert not set(one.hashes) & set(moved.hashes)
    assert make_prompt(b"a" * 64, 16, salt=1).hashes != one.hashes[:1]


def test_next_turn_begins_with_the_turn_before_and_its_answer() -> None:
    answer = Vocabulary(0).answer(5, 9)
    first = chat("Odd length!")
    second = chat("Odd length!", answer.decode(), "Go on")
    assert second.startswith(first + answer)


def test_equal_images_share_and_different_ones_do_not() -> None:
    def image(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return render_chat({"messages": [{"role": "user", "content": [part]}]})

    assert image("a") == image("a")
    assert image("a") != image("b")
    assert len(image("data:" + "x" * 100_000)) < 2000


@pytest.mark.parametrize("content", ["\ud800 unpaired", None, ["x", 5], {"odd": 1}, 7])
def test_odd_content_is_a_prompt_like_any(content: object) -> None:
    assert render_chat({"messages": [{"role": "user", "content": content}]})


def test_tools_are_part_of_the_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert render_chat(body) != render_chat({**body, "tools": [{"type": "function"}]})


def test_named_tool_that_is_not_offered_is_refused() -> None:
    body = decode(
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":'
        b'{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}}}'
    )
    with pytest.raises(EngineError):
        read_generation(body, LIMITS, is_chat=True)
