"""docs/concepts.md is one Python session, and explains each word of the design once."""

from __future__ import annotations

import doctest
import re

import pytest

from tests.docs.conftest import blocks, page

PAGE = page("concepts.md")


def test_session_prints_what_the_page_says() -> None:
    parser = doctest.DocTestParser()
    session = parser.get_doctest("\n".join(blocks(PAGE, "pycon")), {}, "concepts.md", "docs/concepts.md", 0)
    said: list[str] = []
    flags = doctest.IGNORE_EXCEPTION_DETAIL
    results = doctest.DocTestRunner(optionflags=flags).run(session, out=said.append)
    assert results.failed == 0, "".join(said)
    assert results.attempted > 20


@pytest.mark.parametrize(
    "word",
    [
        *("instance", "rank", "source", "target", "storage", "shell", "region", "placement", "slot", "manifest"),
        *("layout fingerprint", "chunk", "plan", "binding", "ticket", "weight version", "transfer", "lease"),
    ],
)
def test_word_is_explained_once(word: str) -> None:
    assert len(re.findall(rf"\*\*{word}\*\*", PAGE)) == 1
