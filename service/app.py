"""The control plane as an ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from weightwire.service import health_routes, instance_routes, model_routes, transfer_routes
from weightwire.service.components import build_components, open_store
from weightwire.service.error_handlers import install_error_handlers
from weightwire.service.gate import Gate
from weightwire.service.settings import Settings
from weightwire.service.store import Store
from weightwire.service.sweeper import sweeping

_DESCRIPTION = (
    "Matches instances that need weights with instances that hold them, and grants transfers between them. "
    "Weights never pass through here."
)


def create_app(settings: Settings, *, store: Store | None = None, clock: Callable[[], float] = time.time) -> FastAPI:
    """Build the application.

    Args:
        settings: As `load_settings` returns them, or made by hand.
        store: Instead of the one that the settings name; whoever passes it closes it.
        clock: Seconds since 1970.

    Raises:
        SettingsError: If the store cannot be opened.
    """
    used = open_store(settings) if store is None else store
    parts = build_components(settings, store=used, clock=clock)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            # Inside, since the last sweep still uses the store.
            async with sweeping(parts):
                yield
        finally:
            if store is None:
                used.close()

    app = FastAPI(
        title="weightwire control plane",
        description=_DESCRIPTION,
        version=version("weightwire"),
        lifespan=lifespan,
        # The pages of FastAPI load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        # A redirect would be built from whatever Host header the request has.
        redirect_slashes=False,
    )
    app.state.components = parts
    app.add_middleware(Gate, settings=settings, guard=parts.guard, metrics=parts.metrics)
    install_error_handlers(app, error_seen=parts.metrics.error_seen)
    for routes in (instance_routes, model_routes, transfer_routes, health_routes):
        app.include_router(routes.router)
    return app
