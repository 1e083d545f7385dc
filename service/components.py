"""The parts of a running control plane, put together once and handed to routes as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from weightwire.service.auth import Guard
from weightwire.service.events import Changes
from weightwire.service.manifests import Manifests
from weightwire.service.metrics import Figures, Metrics
from weightwire.service.plans import Planner
from weightwire.service.registry import Registry
from weightwire.service.settings import Settings
from weightwire.service.sqlite_store import SqliteStore
from weightwire.service.store import MemoryStore, Store
from weightwire.service.transfers import Transfers

# Python runs one thread at a time anyway: more would only hold more manifests in memory.
_HEAVY_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """What routes may use.

    Attributes:
        heavy_work: Bounds the threads that parse manifests and plan, so that lease renewals always find one.
    """

    settings: Settings
    clock: Callable[[], float]
    store: Store
    guard: Guard
    metrics: Metrics
    changes: Changes
    manifests: Manifests
    registry: Registry
    transfers: Transfers
    planner: Planner
    heavy_work: CapacityLimiter


def open_store(settings: Settings) -> Store:
    """The store that the settings name.

    Raises:
        SettingsError: If its file cannot be used.
    """
    return MemoryStore() if settings.sqlite_path is None else SqliteStore(settings.sqlite_path)


def build_components(settings: Settings, *, store: Store, clock: Callable[[], float]) -> Components:
    """Put the parts together over a store, and give the leases in it their grace."""
    changes = Changes()
    manifests = Manifests(store, clock=clock)
    registry = Registry(store, manifests, clock=clock, lease_s=settings.lease_s)
    # Before the first request, or it would find every lease run out.
    registry.resume(grace_s=settings.grace_s)

    def read_figures() -> Figures:
        now = clock()
        return Figures(
            transfers=transfers.states(),
            active_readers=transfers.active_readers().total(),
            quarantined={name: verdict.code for name, verdict in transfers.verdicts().items()},
            leases=sum(
                process.is_live(now) for instance in registry.instances() for process in instance.ranks.values()
            ),
        )

    metrics = Metrics(read_figures)
    transfers = Transfers(store, clock=clock, observers=(metrics, changes), quarantine_s=settings.quarantine_s)
    return Components(
        settings=settings,
        clock=clock,
        store=store,
        guard=Guard(settings),
        metrics=metrics,
        changes=changes,
        manifests=manifests,
        registry=registry,
        transfers=transfers,
        planner=Planner(registry, transfers, manifests, clock=clock),
        heavy_work=CapacityLimiter(_HEAVY_THREADS),
    )


def _of_request(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


Parts = Annotated[Components, Depends(_of_request)]
