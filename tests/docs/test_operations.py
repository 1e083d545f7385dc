"""docs/operations.md names every metric and every setting."""

from __future__ import annotations

import re
import urllib.request

from pydantic import SecretStr

from tests.docs.conftest import page, table
from weightwire.service.server import running_service
from weightwire.service.settings import PREFIX, Settings

PAGE = page("operations.md")


def test_metrics_are_those_of_the_service() -> None:
    with (
        running_service(Settings(port=0, token=None, read_token=None)) as url,
        urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer,
    ):
        text = answer.read().decode()
    # Prometheus' client adds the time at which each counter was made.
    found = {
        name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE) if "_created" not in name
    }
    assert {name: kind for name, kind, _, _ in table(PAGE, "Metrics")} == found


def test_settings_are_those_of_the_service() -> None:
    rows = {name: default for name, default, _ in table(PAGE, "Settings of the service")}
    assert rows.keys() == {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        assert rows[f"{PREFIX}{name.upper()}"] == _shown(field.default), name


def _shown(value: object) -> str:
    assert not isinstance(value, SecretStr)
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
    return str(value)
