"""One instance's exchange as a program, with the test in the place of its workers and its grant loop.

Run as a program, since gevent patches what it lives in: `python -m tests.support.peer SEGMENT URL NAME
LISTEN`. The segment has a table with the pool `default` (cap 16) and the lane of `chat-model`. What the
grant loop would say of the lane stands in the file `demand` of the segment's folder, as JSON; absent:
nobody is held back.
"""

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from gevent.event import Event  # noqa: E402

from conf import log as conf_log  # noqa: E402
from conf.schema import Config, Log, Pool, Redis  # noqa: E402
from coordinator.peers import LaneDemand, Peers  # noqa: E402
from shm.endpoints import EndpointPublisher  # noqa: E402
from shm.layout import FixedSlot  # noqa: E402
from shm.metrics import MetricsRow  # noqa: E402
from shm.rows import WorkerSlot  # noqa: E402
from shm.segment import Segment  # noqa: E402

CAP = 16


def main(directory: Path, url: str, name: str, listen: str) -> None:
    conf_log.setup("coordinator", Log(format="json"), name)
    segment = Segment.attach(directory)
    slot = WorkerSlot.claim_fixed(segment, FixedSlot.COORDINATOR)
    file = directory / "demand"

    def demand(_lane: int) -> LaneDemand:
        facts = json.loads(file.read_text()) if file.exists() else {}
        return LaneDemand(tuple(facts.get("tenants", ())), facts.get("is_full", False))

    peers = Peers(
        segment,
        MetricsRow(segment, slot),
        EndpointPublisher(segment),
        Config(redis=Redis(url=url), pools={"default": Pool(max_concurrent=CAP)}),
        instance=name,
        listen=listen,
        demand=demand,
        on_change=lambda: None,
        on_failure=sys.exit,
    )
    stop = Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    peers.start()
    print("started", flush=True)
    stop.wait()
    peers.stop()
    slot.release()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
