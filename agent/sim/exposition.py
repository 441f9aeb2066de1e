"""The simulated engine's `/metrics`, in vLLM's names. Pure."""

from __future__ import annotations

from agent.sim.engine import Engine

_TEMPLATE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running:.1f}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {waiting:.1f}
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {kv_usage}
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{{labels}}} {prompt_tokens:.1f}
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{{labels}}} {cached_tokens:.1f}
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{labels}}} {prompt_tokens:.1f}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{labels}}} {generation_tokens:.1f}
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{finished_reason="stop",{labels}}} {completed:.1f}
vllm:request_success_total{{finished_reason="abort",{labels}}} 0.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {first_tokens:.1f}
vllm:time_to_first_token_seconds_count{{{labels}}} {first_tokens:.1f}
vllm:time_to_first_token_seconds_sum{{{labels}}} {ttft_sum_s}
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{{labels},le="+Inf"}} {started:.1f}
vllm:request_queue_time_seconds_count{{{labels}}} {started:.1f}
vllm:request_queue_time_seconds_sum{{{labels}}} {queue_sum_s}
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block_size}",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
num_gpu_blocks="{num_blocks}"}} 1.0
"""


def exposition(engine: Engine, model: str) -> bytes:
    """Return what a scrape gets.

    Args:
        model: label of every series; no quotes in it.
    """
    counts = engine.counts
    return _TEMPLATE.format(
        labels=f'engine="0",model_name="{model}"',
        running=engine.running,
        waiting=engine.waiting,
        kv_usage=engine.pool.usage,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generation_tokens=counts.generation_tokens,
        completed=counts.completed,
        first_tokens=counts.first_tokens,
        ttft_sum_s=counts.ttft_sum_s,
        started=counts.completed + counts.aborted,
        queue_sum_s=counts.queue_sum_s,
        block_size=engine.block_size,
        num_blocks=engine.pool.num_blocks,
    ).encode()
