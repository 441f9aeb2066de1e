"""The metric contract on recordings, on names of other versions, on several ranks, and on nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.core.contract import (
    BUILT_IN,
    EngineStats,
    Fault,
    LoraState,
    MappingError,
    Violation,
    mapping_for,
    parse,
)

CORPUS = Path(__file__).parents[2] / "corpus" / "metrics"
VLLM = mapping_for("vllm")
READY = b"vllm:num_requests_waiting 2\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"


@pytest.mark.parametrize(
    ("recording", "engine", "expected"),
    [
        (
            "vllm_0.32_under_load.txt",
            "vllm",
            EngineStats(
                waiting=8,
                running=4,
                kv_usage=0.4276729559748428,
                prompt_tokens=8760,
                cached_tokens=160,
                generation_tokens=2399,
                block_size=32,
                num_blocks=160,
            ),
        ),
        (
            "vllm_0.32_lora_idle.txt",
            "vllm",
            EngineStats(
                waiting=0,
                running=0,
                kv_usage=0.0,
                prompt_tokens=306,
                cached_tokens=0,
                generation_tokens=7,
                block_size=32,
                num_blocks=64,
                lora=LoraState(1, (), ()),
            ),
        ),
        (
            "sglang_0.5_under_load.txt",
            "sglang",
            EngineStats(
                waiting=4,
                running=1,
                kv_usage=0.1,
                prompt_tokens=514,
                cached_tokens=208,
                generation_tokens=70,
                block_size=16,
                num_blocks=512,
                max_context=4096,
            ),
        ),
        (
            "llamacpp_under_load.txt",
            "llamacpp",
            EngineStats(waiting=2, running=2, prompt_tokens=136, cached_tokens=52, generation_tokens=220),
        ),
    ],
)
def test_recording_of_an_engine_is_read_without_violation(
    recording: str, engine: str, expected: EngineStats
) -> None:
    assert parse((CORPUS / recording).read_bytes(), mapping_for(engine)) == (expected, ())


def test_recording_with_carriage_returns_reads_the_same() -> None:
    text = (CORPUS / "vllm_0.32_under_load.txt").read_bytes()
    assert parse(text.replace(b"\n", b"\r\n"), VLLM) == parse(text, VLLM)


# Case B85: an engine renames a metric, and routing goes blind without a word.


def test_old_name_of_the_kv_metric_is_read() -> None:
    reading = parse(READY.replace(b"kv_cache", b"gpu_cache"), VLLM)
    assert (reading.stats.kv_usage, reading.violations) == (0.5, ())


def test_new_name_of_a_metric_wins_over_its_old_name() -> None:
    assert parse(READY + b"vllm:gpu_cache_usage_perc 0.9\n", VLLM).stats.kv_usage == 0.5


def test_engine_without_kv_metric_keeps_its_queue_and_violates_the_contract() -> None:
    reading = parse(READY.replace(b"kv_cache", b"brand_new"), VLLM)
    assert (reading.stats.waiting, reading.stats.running, reading.stats.kv_usage) == (2, 3, None)
    assert reading.stats.is_schedulable
    assert reading.violations == (
        Violation("kv_usage", Fault.MISSING, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    )


def test_data_parallel_ranks_are_added_up_and_kv_usage_is_averaged() -> None:
    text = b"".join(
        b'vllm:num_requests_waiting{engine="%d",model_name="m"} %d\n'
        b'vllm:num_requests_running{engine="%d",model_name="m"} %d\n'
        b'vllm:kv_cache_usage_perc{engine="%d",model_name="m"} 0.%d\n'
        b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1.0\n'
        % (rank, rank + 1, rank, rank + 3, rank, rank * 4 + 2, rank)
        for rank in (0, 1)
    )
    stats, violations = parse(text, VLLM)
    assert violations == ()
    assert (stats.waiting, stats.running, stats.kv_usage) == (3, 7, pytest.approx(0.4))
    assert (stats.block_size, stats.num_blocks) == (16, 200)


def test_tensor_parallel_ranks_are_copies_of_one_number() -> None:
    text = b"".join(
        b'sglang:num_queue_reqs{dp_rank="%d",tp_rank="%d"} %d\n' % (dp, tp, dp + 4)
        for dp in (0, 1)
        for tp in (0, 1)
    )
    assert parse(text, mapping_for("sglang")).stats.waiting == 9


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (b"NaN", Fault.NOT_FINITE),
        (b"+Inf", Fault.NOT_FINITE),
        (b"-Inf", Fault.NOT_FINITE),
        (b"-3", Fault.OUT_OF_RANGE),
        (b"many", Fault.NOT_A_NUMBER),
        (b"1_0", Fault.NOT_A_NUMBER),
        (b"", Fault.NOT_A_NUMBER),
    ],
)
def test_unusable_number_is_a_violation_and_no_value(value: bytes, fault: Fault) -> None:
    text = READY.replace(b"waiting 2", b"waiting " + value)
    stats, violations = parse(text, VLLM)
    assert stats.waiting is None
    assert stats.running == 3
    assert violations == (Violation("waiting", fault, ("vllm:num_requests_waiting",)),)


def test_one_bad_rank_spoils_the_sum() -> None:
    text = b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} NaN\n'
    assert parse(text, VLLM).stats.running is None


def test_kv_usage_in_per_cent_is_a_violation_and_a_little_over_one_is_full() -> None:
    assert parse(READY.replace(b"0.5", b"37.5"), VLLM).violations[0].fault is Fault.OUT_OF_RANGE
    assert parse(READY.replace(b"0.5", b"1.02"), VLLM).stats.kv_usage == 1.0


def test_comments_and_longer_names_are_no_samples() -> None:
    text = (
        b"# HELP vllm:num_requests_waiting 77\n# junk {{{ \n#\n"
        b'vllm:num_requests_waiting_by_reason{reason="capacity"} 99\n'
        b"  vllm:num_requests_waiting 55\n"
    ) + READY
    assert parse(text, VLLM).stats.waiting == 2


def test_braces_quotes_and_commas_inside_labels_do_not_hide_the_value() -> None:
    text = rb'vllm:num_requests_waiting{model_name="a}b,c=\"d\" \\ e",engine="0"} 6 1796013848' + b"\n"
    assert parse(text, VLLM).stats.waiting == 6


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"<html><body>502 Bad Gateway</body></html>",
        b'{"error": {"message": "no metrics"}}',
        bytes(range(256)) * 40,
        b"vllm:num_requests_waiting",
        b"vllm:num_requests_waiting{",
        b'vllm:num_requests_waiting{engine="0',
        b'vllm:num_requests_waiting{engine="0"}',
        b"vllm:num_requests_waiting{}}{} 1",
    ],
)
def test_garbage_violates_the_contract_and_raises_nothing(text: bytes) -> None:
    stats, violations = parse(text, VLLM)
    assert not stats.is_schedulable
    assert {violation.field for violation in violations} >= {"waiting", "running"}


def test_recording_cut_anywhere_raises_nothing() -> None:
    text = (CORPUS / "vllm_0.32_under_load.txt").read_bytes()
    start = text.index(b"vllm:num_requests_running{")
    for cut in range(start, start + 700):
        parse(text[:cut], VLLM)


def test_total_of_all_priorities_is_not_added_to_its_parts() -> None:
    text = b'sglang:num_running_reqs{priority=""} 5\nsglang:num_running_reqs{priority="-3"} 2\n'
    assert parse(text, mapping_for("sglang")).stats.running == 5


def test_priorities_without_a_total_are_added_up() -> None:
    text = b'sglang:num_running_reqs{priority="0"} 5\nsglang:num_running_reqs{priority="-3"} 2\n'
    assert parse(text, mapping_for("sglang")).stats.running == 7


def test_newest_lora_state_counts() -> None:
    text = (
        READY
        + b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 20.0\n'
        + b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="b,c",waiting_lora_adapters="a"} 3e1\n'
        + b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="d",waiting_lora_adapters=""} 10.0\n'
    )
    assert parse(text, VLLM).stats.lora == LoraState(4, ("b", "c"), ("a",))


def test_unsettled_info_label_is_unknown_and_no_violation() -> None:
    text = READY + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    stats, violations = parse(text, VLLM)
    assert (stats.block_size, stats.num_blocks, violations) == (16, None, ())


# Mappings.


def test_override_replaces_one_field_and_keeps_the_others() -> None:
    mapping = mapping_for("vllm", {"vllm": {"waiting": ["acme:queue", "vllm:num_requests_waiting"]}})
    assert parse(READY, mapping).stats.waiting == 2
    stats = parse(b"acme:queue 9\n" + READY, mapping).stats
    assert (stats.waiting, stats.running) == (9, 3)


def test_override_of_another_engine_changes_nothing() -> None:
    assert mapping_for("vllm", {"sglang": {"waiting": "x"}}) == VLLM


def test_empty_override_says_that_the_engine_has_no_such_metric() -> None:
    reading = parse(READY, mapping_for("vllm", {"vllm": {"kv_usage": ""}}))
    assert (reading.stats.kv_usage, reading.violations) == (None, ())


def test_place_can_be_a_label_and_have_conditions() -> None:
    mapping = mapping_for(
        "vllm", {"vllm": {"waiting": 'x:queue{kind="llm"}', "block_size": 'x:info{size,kind="llm"}'}}
    )
    text = (
        b'x:queue{kind="llm"} 4\nx:queue{kind="image"} 100\n'
        b'x:info{kind="image",size="1"} 1\nx:info{kind="llm",size="8"} 1\n'
    )
    stats = parse(text, mapping).stats
    assert (stats.waiting, stats.block_size) == (4, 8)


def test_unknown_engine_is_read_with_the_names_of_vllm() -> None:
    assert mapping_for("brand-new") == BUILT_IN["vllm"]


@pytest.mark.parametrize(
    ("field", "place"),
    [("wating", "x"), ("waiting", "x y"), ("waiting", "x{a,b}"), ("waiting", "x{a=1}"), ("waiting", "x{")],
)
def test_impossible_override_is_refused(field: str, place: str) -> None:
    with pytest.raises(MappingError):
        mapping_for("vllm", {"vllm": {field: place}})


def test_violation_is_the_same_at_every_scrape() -> None:
    first = parse(READY.replace(b"waiting 2", b"waiting -2"), VLLM).violations
    second = parse(READY.replace(b"waiting 2", b"waiting -7"), VLLM).violations
    assert first == second
    assert str(first[0]) == "waiting is out of range (vllm:num_requests_waiting)"
