"""The segment's directory: who may attach, what is published, what is a leftover."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shm.layout import CELL_BYTES, Header, Phase, Sizes
from shm.segment import Segment, SegmentMismatch, is_in_use, remove
from tests.support.segments import Forked

SMALL = Sizes(worker_slots=1, endpoint_slots=1, metric_cells=64)


def overwrite(segment: Segment, field: Header, value: int) -> None:
    with (segment.directory / "segment").open("r+b") as file:
        file.seek(field * CELL_BYTES)
        file.write(value.to_bytes(CELL_BYTES, "little", signed=True))


def test_what_one_process_writes_another_reads(segment: Segment):
    other = Segment.attach(segment.directory)
    segment.cells_i64[segment.layout.inflight.start] = 7
    segment.cells_f64[segment.layout.marks.start] = 0.5
    assert other.cells_i64[other.layout.inflight.start] == 7
    assert other.cells_f64[other.layout.marks.start] == 0.5
    assert other.layout == segment.layout
    assert other.launcher_pid == os.getpid()
    other.close()


def test_a_new_segment_is_all_zero_behind_its_header(segment: Segment):
    assert not any(segment.cells_i64[segment.layout.header.end :])


def test_a_directory_that_exists_is_not_taken_over(segment: Segment):
    with pytest.raises(FileExistsError):
        Segment.create(segment.directory, SMALL)
    Segment.attach(segment.directory).close()


def test_no_room_in_memory_is_told_at_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        Segment.create(tmp_path / "segment", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_may_read_the_files(segment: Segment):
    segment.publish_config(b"secret")
    assert segment.directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in segment.directory.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (Header.MAGIC, 1, "not a segment"),
        (Header.LAYOUT_VERSION, 999, "another version"),
        (Header.FINGERPRINT, 1, "another build"),
        (Header.WORKER_SLOTS, -1, "damaged"),
        (Header.METRIC_CELLS, 1 << 40, "another build"),
    ],
)
def test_a_foreign_or_damaged_segment_is_refused(segment: Segment, field: Header, value: int, message: str):
    overwrite(segment, field, value)
    with pytest.raises(SegmentMismatch, match=message):
        Segment.attach(segment.directory)


@pytest.mark.parametrize("size", [0, 8, 4096])
def test_a_file_cut_short_is_refused(segment: Segment, size: int):
    copy = segment.directory / "copy"
    copy.mkdir()
    (copy / "segment").write_bytes((segment.directory / "segment").read_bytes()[:size])
    with pytest.raises(SegmentMismatch, match="bytes"):
        Segment.attach(copy)


def test_a_missing_segment_is_a_mismatch(tmp_path: Path):
    with pytest.raises(SegmentMismatch, match="cannot open"):
        Segment.attach(tmp_path)


def test_a_publication_raises_the_generation_and_replaces_the_file(segment: Segment):
    assert segment.config_generation == 0
    with pytest.raises(SegmentMismatch):
        segment.read_config()
    assert segment.publish_config(b"one") == 1
    reader = Segment.attach(segment.directory)
    assert segment.publish_config(b"two") == 2
    assert (reader.config_generation, reader.read_config()) == (2, b"two")
    assert reader.endpoints_generation == 0
    reader.close()


def test_a_failed_publication_changes_nothing(segment: Segment):
    segment.publish_config(b"one")
    (segment.directory / "config.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        segment.publish_config(b"two")
    assert (segment.config_generation, segment.read_config()) == (1, b"one")


def test_the_phase_reaches_every_process(segment: Segment):
    other = Segment.attach(segment.directory)
    assert other.phase is Phase.RUNNING
    segment.set_phase(Phase.DRAINING)
    assert other.phase is Phase.DRAINING
    other.close()


def test_a_segment_is_in_use_while_any_process_has_it_attached(tmp_path: Path):
    directory = tmp_path / "segment"
    segment = Segment.create(directory, SMALL)
    assert is_in_use(directory)
    other = Segment.attach(directory)
    segment.close()
    assert is_in_use(directory)
    other.close()
    assert not is_in_use(directory)


def test_a_killed_process_does_not_keep_a_segment_in_use(tmp_path: Path):
    directory = tmp_path / "segment"
    child = Forked(lambda: (Segment.create(directory, SMALL), os.kill(os.getpid(), 9)))
    assert child.wait() == -9
    assert not is_in_use(directory)
    assert (directory / "segment").exists()


def test_closing_twice_is_harmless(tmp_path: Path):
    segment = Segment.create(tmp_path / "segment", SMALL)
    segment.close()
    segment.close()


def test_a_removed_segment_stays_mapped_where_it_was(segment: Segment):
    segment.publish_config(b"x")
    assert remove(segment.directory)
    assert not segment.directory.exists()
    segment.cells_i64[segment.layout.inflight.start] = 1
    assert remove(segment.directory)


def test_a_directory_with_foreign_files_is_not_removed(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert not remove(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
