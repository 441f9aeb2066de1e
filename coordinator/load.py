"""Reads from the segment who runs and who waits, as admission sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from conf.schema import Config
from coordinator.admin.views import BandView, LaneLoadView, PoolLoadView
from gateway.core import admission
from shm.bands import BandCells, LaneEndpoints
from shm.endpoints import NO_CAP, EndpointRecord, EndpointTable
from shm.inflight import InflightSums
from shm.marks import CooldownMarks


@dataclass(frozen=True, slots=True)
class LoadReader:
    """Reads what is there when it is asked."""

    cells: BandCells
    table: EndpointTable
    inflight: InflightSums
    marks: CooldownMarks

    def pools(
        self, config: Config, records: Iterable[EndpointRecord], now: float
    ) -> tuple[PoolLoadView, ...]:
        """Return every pool that has an endpoint, in the order of the configuration.

        Args:
            config: the one in force.
            records: its endpoints, with their slots.
            now: monotonic seconds.
        """
        pools: dict[str, dict[int, list[EndpointRecord]]] = {}
        for record in records:
            pools.setdefault(record.pool, {}).setdefault(record.lane, []).append(record)
        return tuple(self._pool(config, name, list(lanes.values()), now) for name, lanes in pools.items())

    def _pool(self, config: Config, name: str, lanes: list[list[EndpointRecord]], now: float) -> PoolLoadView:
        slot = lanes[0][0].pool_slot
        share = self.cells.cap(slot)
        own = config.pools.get(name)
        views = tuple(self._lane(config, records, now) for records in lanes)
        return PoolLoadView(
            pool=name,
            saturation=max((v.saturation for v in views if v.saturation is not None), default=None),
            leases=self.cells.leases(slot),
            remote_leases=self.cells.remote_leases(slot),
            cap=None if own is None else own.max_concurrent,
            share=None if share == NO_CAP else share,
            lanes=views,
        )

    def _lane(self, config: Config, records: list[EndpointRecord], now: float) -> LaneLoadView:
        first = records[0]
        columns = LaneEndpoints(records, self.table, self.inflight, self.marks).read()
        pending = self.cells.pending(first.lane)
        settings = admission.lane_settings(config, first.pool)
        level = admission.saturation(admission.Replicas._make(columns), pending, settings, now)
        local, everyone = self.cells.local_waiters(first.lane), self.cells.waiters(first.lane)
        names = [band.name for band in config.router.admission.bands_by_rank]
        return LaneLoadView(
            model=first.model,
            saturation=None if math.isinf(level) else round(level, 4),
            inflight=sum(columns.inflight),
            pending=pending,
            waiting=dict(zip(names, local, strict=False)),
            remote_inflight=int(sum(columns.remote_inflight)),
            remote_waiting=sum(everyone) - sum(local),
        )


def bands(config: Config) -> tuple[BandView, ...]:
    """Return the bands of a configuration, the highest first."""
    return tuple(
        BandView(name=band.name, saturation_ceiling=band.saturation_ceiling)
        for band in config.router.admission.bands_by_rank
    )
