"""The environment of whoever runs the tests decides nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def without_variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("WEIGHTWIRE_"):
                patch.delenv(name)
        yield
