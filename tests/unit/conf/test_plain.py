"""Plain proxy mode: what a few variables become."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.lines import PlainLine
from conf.load import load
from conf.log import PlainLog
from conf.schema import Config, Log

UPSTREAM = {"GATEWAY_UPSTREAM_URL": "http://engine:8000"}


def problems(**environ: str) -> list[str]:
    """Return what is wrong with variables."""
    with pytest.raises(ConfigError) as error:
        load(None, environ)
    return str(error.value).splitlines()


def test_an_upstream_is_all_that_is_needed() -> None:
    config = load(None, UPSTREAM)
    assert config.plain_proxy
    assert config.listen == ":8000"
    assert not config.auth.enabled
    (endpoint,) = config.endpoints
    assert (endpoint.id, endpoint.pool, endpoint.url) == ("default", "default", "http://engine:8000")
    assert not endpoint.probe
    assert {name: pool.max_concurrent for name, pool in config.pools.items()} == {"default": 16}
    assert config.router.admission.queue_ttl == 120
    assert config.router.retries == 0


def test_only_the_cap_holds_requests_back_and_interactive_goes_first() -> None:
    admission = load(None, UPSTREAM).router.admission
    interactive, background = admission.bands_by_rank
    assert (interactive.name, background.name, admission.default_band) == (
        "interactive",
        "background",
        "interactive",
    )
    assert min(interactive.saturation_ceiling, background.saturation_ceiling) > 1e6
    assert min(admission.queue_capacity, admission.queue_capacity_per_band) > 1e6


def test_every_variable_has_its_place() -> None:
    config = load(
        None,
        {
            **UPSTREAM,
            "GATEWAY_UPSTREAM_API_KEY": "one",
            "GATEWAY_SYNTHESIS_UPSTREAM_URL": "https://api.example/v2/",
            "GATEWAY_SYNTHESIS_API_KEY": " two\n",
            "GATEWAY_MAX_CONCURRENT": "3",
            "GATEWAY_SYNTHESIS_MAX_CONCURRENT": "2",
            "GATEWAY_QUEUE_TIMEOUT_S": "1.5",
            "GATEWAY_LISTEN": "[::1]:9000",
        },
    )
    local, synthesis = config.endpoints
    assert (local.api_key, synthesis.api_key) == ("one", "two")
    assert (synthesis.url, synthesis.pool, synthesis.model) == (
        "https://api.example/v2",
        "synthesis",
        "synthesis",
    )
    assert (config.pools["default"].max_concurrent, config.pools["synthesis"].max_concurrent) == (3, 2)
    assert config.router.admission.queue_ttl == 1.5
    assert config.listen == "[::1]:9000"


def test_the_synthesis_pool_has_eight_slots_unless_told_otherwise() -> None:
    config = load(None, {**UPSTREAM, "GATEWAY_SYNTHESIS_UPSTREAM_URL": "http://other:8000"})
    assert config.pools["synthesis"].max_concurrent == 8


def test_an_empty_variable_counts_as_unset_and_a_foreign_one_is_left_alone() -> None:
    foreign = {
        "GATEWAY_PORT": "tcp://10.0.0.1:80",
        "GATEWAY_LISTEN": "",
        "GATEWAY_SYNTHESIS_UPSTREAM_URL": " ",
    }
    assert load(None, {**UPSTREAM, **foreign}) == load(None, UPSTREAM)


def test_variables_of_the_full_configuration_override() -> None:
    config = load(None, {**UPSTREAM, "LLMGW_WORKERS": "7", "LLMGW_ROUTER__TIMEOUTS__IDLE": "5m"})
    assert (config.workers, config.router.timeouts.idle) == (7, 300)


def test_a_file_wins(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.yaml"
    path.write_text("auth: {enabled: false}")
    assert load(path, UPSTREAM).plain_proxy is False


def test_without_an_upstream_there_is_no_such_mode() -> None:
    assert load(None, {"LLMGW_AUTH__ENABLED": "false", "GATEWAY_MAX_CONCURRENT": "3"}) == load(
        None, {"LLMGW_AUTH__ENABLED": "false"}
    )
    assert Config().plain_proxy is False


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GATEWAY_UPSTREAM_URL", "engine:8000", "needs to begin with http:// or https://"),
        ("GATEWAY_UPSTREAM_URL", "http://engine:8000/v1", "ends in /v1"),
        (
            "GATEWAY_UPSTREAM_URL",
            "http://localhost:8000",
            "is this gateway's own address, see GATEWAY_LISTEN",
        ),
        ("GATEWAY_SYNTHESIS_UPSTREAM_URL", "http://[::1]:8000", "is this gateway's own address"),
        ("GATEWAY_MAX_CONCURRENT", "0", "is out of range (at least 1)"),
        ("GATEWAY_QUEUE_TIMEOUT_S", "0", "must be more than 0"),
        ("GATEWAY_QUEUE_TIMEOUT_S", "soon", "needs a duration"),
        ("GATEWAY_LISTEN", "8000", "needs an address"),
        ("GATEWAY_UPSTREAM_API_KEY", "a\nb", "contains what cannot stand in a header"),
    ],
)
def test_a_problem_names_its_variable(variable: str, value: str, message: str) -> None:
    (problem,) = problems(**{**UPSTREAM, variable: value})
    assert problem.startswith(f"environment: {variable}: ")
    assert message in problem


def test_a_second_upstream_needs_a_first() -> None:
    (problem,) = problems(GATEWAY_SYNTHESIS_UPSTREAM_URL="http://other:8000")
    assert problem == "environment: GATEWAY_UPSTREAM_URL: is empty; it needs a URL"


def test_a_file_cannot_ask_for_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.yaml"
    path.write_text("auth: {enabled: false}\nplain_proxy: true")
    with pytest.raises(ConfigError, match="plain_proxy: is not for files"):
        load(path, {})


def test_lines_are_json_on_a_terminal_too() -> None:
    ours, theirs = pty.openpty()
    try:
        log = PlainLog(Log(format="human"), "worker", fd=theirs, wall_clock=lambda: 1_800_000_000.0)
        log.write(PlainLine(method="POST", path="/v1/x", status=200, user="\udc80"))
        line = os.read(ours, 4096).decode().strip()
    finally:
        os.close(ours)
        os.close(theirs)
    assert line == (
        '{"ts":"2027-01-15T08:00:00.000Z","method":"POST","path":"/v1/x","upstream":null,"priority":null,'
        '"tenant":null,"surface":null,"user":"?","model":null,"status":200,"queue_ms":0.0,"upstream_ms":null,'
        '"streamed":false}'
    )
