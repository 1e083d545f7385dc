"""The one background task: ends what is over and drops what nobody needs any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread

from weightwire.service.components import Components

logger = logging.getLogger(__name__)


def sweep(parts: Components) -> None:
    """One round: deadlines, leases that ran out, ended transfers, manifests without use. May block."""
    settings = parts.settings
    # In this order each step sees what the one before has let go of.
    parts.registry.forget_expired(keep_s=settings.keep_instances_s)
    parts.transfers.settle()
    parts.transfers.forget_ended(keep_s=settings.keep_transfers_s)
    parts.transfers.forget_damage()
    used = parts.registry.used_manifests() | parts.transfers.used_manifests()
    parts.manifests.forget_unused(keep_s=settings.keep_manifests_s, used=used)


@asynccontextmanager
async def sweeping(parts: Components) -> AsyncIterator[None]:
    """Sweep at the interval of the settings as long as the block runs."""
    stop = asyncio.Event()
    task = asyncio.create_task(_sweep_until(stop, parts))
    try:
        yield
    finally:
        stop.set()
        await task


async def _sweep_until(stop: asyncio.Event, parts: Components) -> None:
    while not stop.is_set():
        try:
            await anyio.to_thread.run_sync(sweep, parts)
        except Exception:  # nobody else has these duties: the task must outlive any error
            logger.exception("sweep failed, trying again in %g s", parts.settings.sweep_s)
        try:
            await asyncio.wait_for(stop.wait(), parts.settings.sweep_s)
        except TimeoutError:
            continue
