"""`make bench`: what the gateway costs, beside the bare engines and beside other gateways.

    python -m bench.run [--quick] [--only S2,S4] [--targets direct,llmgw-1w] [--peers FOLDER] [--write]

Engines, load and gateway share this machine, so figures are ratios within one run: compare CPU per request
and per event. Differences under 1.5 times are a tie. Targets take turns in a round, in reverse every other
round, so that drift of the machine cancels out. Exit code 1: our gateway is above a budget or gave an
error, or a target did not start.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import importlib.metadata
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import machine, report, targets
from bench.measure import Bench, Row
from bench.peerbench.build import BuildError, build
from bench.scenarios import SCENARIOS, shortened
from bench.targets import Target
from bin.engines.environment import EngineError

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".cache" / "bench"
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
OURS = "llmgw"


def main(argv: Sequence[str]) -> int:
    """Measure what `argv` asks for; return the exit code."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench: ended by SIGTERM"))
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            program = build(WORK)
        except BlockingIOError:
            print("bench: another one runs from this checkout; each would spoil the other.", file=sys.stderr)
            return 1
        except BuildError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        return _run(program, options)


def _run(program: Path, options: argparse.Namespace) -> int:
    names = options.only.split(",") if options.only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        print(f"bench: no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    chosen = [targets.direct(), *map(targets.llmgw, options.workers)]
    if options.python:
        chosen += [targets.llmgw(workers, as_python=True) for workers in options.workers]
    chosen += targets.peers(options.peers)
    if options.targets:
        chosen = [target for target in chosen if target.name in options.targets.split(",")]
    print("Targets: " + "; ".join(f"{target.name} ({target.notes})" for target in chosen), flush=True)

    rounds = options.rounds or (1 if options.quick else 3)
    rows: list[Row] = []
    failures: list[str] = []
    for number in range(1, rounds + 1):
        for target in chosen if number % 2 else reversed(chosen):
            try:
                _measure(program, target, names, number, options, rows)
            except (EngineError, OSError, subprocess.CalledProcessError) as error:
                failures.append(f"{target.name}, round {number}: {error}")
                print(f"FAILED {failures[-1]}", flush=True)

    failures += report.complaints(rows, OURS)
    text = report.tables(rows)
    verdicts = report.verdicts(rows, OURS)
    print(f"\n{text}\n")
    for _, line in verdicts:
        print(line)
    for failure in failures:
        print(f"FAILED {failure}")
    if options.write:
        _write(text, chosen, rounds, [line for _, line in verdicts] + failures)
    return 1 if failures or not all(holds for holds, _ in verdicts) else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure what the gateway costs.")
    parser.add_argument("--only", metavar="S1,S2", help=f"scenarios, of {', '.join(SCENARIOS)}")
    parser.add_argument("--targets", metavar="NAME,NAME", help="only these, e.g. direct,llmgw-1w")
    parser.add_argument(
        "--workers",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[1, 2],
        metavar="1,2",
        help="measure our gateway with so many workers each",
    )
    parser.add_argument(
        "--python", action="store_true", help="beside the compiled form, measure that as Python"
    )
    parser.add_argument("--rounds", type=int, help="default 3")
    parser.add_argument("--quick", action="store_true", help="one round of shorter runs")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="other gateways; see bench/README.md")
    parser.add_argument("--quiet-wait", type=float, default=0.0, metavar="S", help="wait for a quiet machine")
    parser.add_argument("--write", action="store_true", help="put the tables at the top of bench/RESULTS.md")
    return parser.parse_args(argv)


def _measure(
    program: Path,
    target: Target,
    names: Sequence[str],
    round_number: int,
    options: argparse.Namespace,
    rows: list[Row],
) -> None:
    bench: Bench | None = None
    try:
        for name in names:
            # What an overloaded gateway still works off would count against the next scenario.
            if bench is not None and not bench.engines.is_idle():
                bench.close()
                bench = None
            machine.wait_until_quiet(options.quiet_wait)
            if bench is None:
                bench = Bench(program, target, WORK / target.name)
            scenario = shortened(SCENARIOS[name]) if options.quick else SCENARIOS[name]
            row = bench.run(name, scenario, round_number)
            rows.append(row)
            _show(row)
    finally:
        if bench is not None:
            bench.close()


def _show(row: Row) -> None:
    per_request = f"{row.cpu_us_per_request:.0f}" if row.cpu_us_per_request is not None else "-"
    per_event = f"{row.cpu_us_per_event:.1f}" if row.cpu_us_per_event is not None else "-"
    print(
        f"round {row.round} {row.target:14} {row.scenario:4} ok={row.ok} errors={dict(row.errors) or 0} "
        f"{row.requests_per_s:.0f}/s p50={row.total_ms.p50} ms ttft={row.ttft_ms.p50} ms "
        f"cpu={per_request}us/request {per_event}us/event others={row.others_cpu_s:.1f}s"
        + (f" cancelled={row.cancelled_1s}/{row.reached}" if row.cancelled_1s is not None else ""),
        flush=True,
    )


def _write(text: str, chosen: Sequence[Target], rounds: int, remarks: Sequence[str]) -> None:
    packages = ("gunicorn", "gevent", "falcon", "urllib3", "msgspec")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    section = "\n".join(
        [
            f"## {datetime.date.today().isoformat()}, commit {commit}",
            "",
            f"{machine.describe()}; {versions}. {rounds} round{'s' * (rounds > 1)}, medians [min..max]; "
            "three fake engines, the load and one gateway at a time on the same cores.",
            "",
            *(f"- {target.name}: {target.notes}" for target in chosen),
            "",
            *(f"- **{remark}**" for remark in remarks),
            "",
            text,
            "",
        ]
    )
    head, _, rest = RESULTS.read_text().partition("\n## ")
    older = f"\n## {rest}" if rest else ""
    RESULTS.write_text(f"{head.rstrip()}\n\n{section}{older}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
