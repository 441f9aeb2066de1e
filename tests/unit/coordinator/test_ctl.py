"""llmgw-ctl without a gateway: configurations, usage, exit codes, and its manual."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.ctl import reference
from coordinator.ctl.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
GOOD = """
auth: {enabled: false}
models: [{name: chat-model}]
endpoints: [{id: e1, model: chat-model, url: "http://127.0.0.1:9001"}]
"""
# Nobody listens on the discard port of this host.
NOBODY = "http://127.0.0.1:9"


def run(*words: str, environ: dict[str, str] | None = None) -> int:
    """Return the exit code, also where fire leaves by itself."""
    try:
        return main(words, environ or {})
    except SystemExit as exc:
        return int(exc.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "llmgw.yaml"
    file.write_text(GOOD)
    return file


def test_good_configuration_is_good(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", str(config)) == 0
    assert capsys.readouterr().out == f"{config}: good (1 model, 1 endpoint)\n"


def test_every_problem_is_a_line_with_its_place(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(GOOD + "workers: none\nbogus: 1\n")
    assert run("config", "check", str(config)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{config}:5", f"{config}:6"]


def test_problems_for_programs_are_one_document(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(GOOD + "workers: none\n")
    assert run("config", "check", str(config), "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [(problem["line"], problem["key"]) for problem in answer["problems"]] == [(5, "workers")]


def test_metric_that_cannot_be_one_is_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(GOOD + "router: {metrics: {vllm: {waiting: 'no metric'}}}\n")
    assert run("config", "check", str(config)) == 1
    assert "router.metrics.vllm.waiting: is no metric name" in capsys.readouterr().out


def test_file_that_is_not_there_is_a_problem_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "/nope.yaml") == 1
    assert "/nope.yaml: cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["1e3", "a,b", "[x]", "None", "0x10", "'q'"])
def test_file_name_is_taken_as_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert run("config", "check", name) == 0


def test_address_of_the_admin_listener_is_no_key_of_the_configuration(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMGW_ADMIN", NOBODY)
    assert run("config", "check", str(config)) == 0


@pytest.mark.parametrize("command", ["endpoints", "status"])
def test_gateway_that_does_not_run_is_a_sentence_and_exit_code_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--admin", NOBODY) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"no gateway answers at {NOBODY}. Is it running?" in said.err


def test_variable_names_the_gateway_and_the_option_wins(capsys: pytest.CaptureFixture[str]) -> None:
    run("status", environ={"LLMGW_ADMIN": "127.0.0.1:9"})
    run("status", "--admin=http://127.0.0.1:7", environ={"LLMGW_ADMIN": "127.0.0.1:9"})
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" at ")[1].split(". ")[0] for line in said] == [NOBODY, "http://127.0.0.1:7"]


@pytest.mark.parametrize(
    "words",
    [(), ("config",), ("config", "check"), ("nonsense",), ("status", "real"), ("status", "--bogus", "1")],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_runs_nothing(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert "no gateway answers" not in capsys.readouterr().err


def test_help_of_a_command_is_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--help") == 0
    said = capsys.readouterr()
    assert "Show the instance as a whole" in said.out + said.err


def test_every_command_tells_its_exit_codes_and_takes_json() -> None:
    for command in COMMANDS.values():
        assert "Exit codes: 0" in (command.__doc__ or "")
        assert "json" in (command.__kwdefaults__ or {})


def test_manual_is_current() -> None:
    assert (ROOT / "docs" / "ctl.md").read_text() == reference.render(), "run `make docs`"
