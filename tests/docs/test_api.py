"""docs/api.md is what the code says of itself."""

from __future__ import annotations

from tests.docs.conftest import generate, page
from weightwire import transfer
from weightwire.service import client


def test_reference_is_that_of_the_code() -> None:
    checked = generate("generate_api.py", "--check")
    assert checked.returncode == 0, checked.stderr


def test_every_public_name_has_a_section() -> None:
    headings = {line.removeprefix("### ").strip("`") for line in page("api.md").splitlines() if line.startswith("### ")}
    assert {*transfer.__all__, *client.__all__} <= headings
