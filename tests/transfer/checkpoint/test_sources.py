"""Several sources as one stream: prefixes, order, draft layers; one pair at a time."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightwire.transfer.checkpoint.formats import LoadFormat
from weightwire.transfer.checkpoint.sources import WeightSource, chain_sources, draft_name, select_draft
from weightwire.transfer.errors import CheckpointError, SettingsError


class Payload:
    """Stands for a tensor, and can be watched."""


def reader_of(names: dict[str, list[str]], log: list[str]) -> Callable[[WeightSource], Iterator[tuple[str, Payload]]]:
    """Reads named payloads by path and writes down what it does."""

    def read(source: WeightSource) -> Iterator[tuple[str, Payload]]:
        log.append(f"open {source.path}")
        try:
            for name in names[str(source.path)]:
                log.append(f"read {name}")
                yield name, Payload()
        finally:
            log.append(f"close {source.path}")

    return read


# L49
def test_prefix_keeps_equal_names_of_two_sources_apart() -> None:
    read = reader_of({"m": ["a.weight"], "v": ["a.weight"]}, [])
    pairs = chain_sources(WeightSource(path=Path("m")), [WeightSource(path=Path("v"), prefix="vision.")], read=read)
    assert [name for name, _ in pairs] == ["a.weight", "vision.a.weight"]


# L49, D02
def test_equal_names_of_two_sources_are_refused() -> None:
    read = reader_of({"m": ["a.weight"], "v": ["a.weight"]}, [])
    pairs = chain_sources(WeightSource(path=Path("m")), [WeightSource(path=Path("v"))], read=read)
    assert next(pairs)[0] == "a.weight"
    with pytest.raises(CheckpointError, match=r"tensor 'a.weight': is in two sources, 'm' and 'v'") as caught:
        next(pairs)
    assert caught.value.facts["diagnostic"] == "D02"


# L50
def test_primary_comes_first_and_each_source_is_opened_in_its_turn() -> None:
    log = list[str]()
    read = reader_of({"p": ["p1", "p2"], "s": ["s1"], "t": ["t1"]}, log)
    secondaries = [WeightSource(path=Path("s")), WeightSource(path=Path("t"))]
    pairs = chain_sources(WeightSource(path=Path("p")), secondaries, read=read)
    assert log == []
    assert next(pairs)[0] == "p1"
    assert log == ["open p", "read p1"]
    assert [name for name, _ in pairs] == ["p2", "s1", "t1"]
    expected = [
        "open p",
        "read p1",
        "read p2",
        "close p",
        "open s",
        "read s1",
        "close s",
        "open t",
        "read t1",
        "close t",
    ]
    assert log == expected


# L50
def test_each_source_is_looked_for_by_its_own_options() -> None:
    source = WeightSource(path=Path("s"), revision="r1", allow_pt_fallback=True)
    assert source.discovery().in_order_tried == ("*.safetensors", "*.bin", "*.pt")
    assert source.discovery(LoadFormat.MISTRAL).in_order_tried == ("consolidated*.safetensors", "*.pt")
    assert WeightSource(path=Path("s"), patterns=("x*.bin",)).discovery().in_order_tried == ("x*.bin",)
    with pytest.raises(SettingsError, match="not served"):
        source.discovery(LoadFormat.GGUF)


# L49, L50
def test_stream_that_is_closed_early_closes_the_open_source() -> None:
    log = list[str]()
    pairs = chain_sources(WeightSource(path=Path("p")), [], read=reader_of({"p": ["a", "b"]}, log))
    assert isinstance(pairs, Iterator)
    next(pairs)
    del pairs
    assert log == ["open p", "read a", "close p"]


# L49, L51
@pytest.mark.parametrize("wrap", ["chain", "draft"])
def test_no_payload_is_kept_while_the_next_one_is_read(wrap: str) -> None:
    alive = list[weakref.ref[Payload]]()
    most = 0

    def read(_: WeightSource) -> Iterator[tuple[str, Payload]]:
        nonlocal most
        for number in range(4):
            most = max(most, sum(ref() is not None for ref in alive))
            payload = Payload()
            alive.append(weakref.ref(payload))
            yield f"model.mtp.layers.{number % 2}.x{number}", payload
            del payload

    source = WeightSource(path=Path("p"))
    pairs = chain_sources(source, [], read=read) if wrap == "chain" else select_draft(read(source), 1)
    for _, payload in pairs:
        del payload
    assert (len(alive), most) == (4, 0)


# L51
def test_draft_layer_is_kept_as_layer_zero() -> None:
    log = list[str]()
    names = ["model.mtp.layers.1.x", "model.mtp.layers.0.x", "model.mtp.layers.10.x", "model.layers.1.x", "lm_head"]
    pairs = select_draft(reader_of({"p": names}, log)(WeightSource(path=Path("p"))), 1)
    assert log == []
    assert next(pairs)[0] == "model.mtp.layers.0.x"
    assert log == ["open p", "read model.mtp.layers.1.x"]
    assert [name for name, _ in pairs] == ["model.layers.1.x", "lm_head"]


# L51
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.mtp.layers.1.x", "model.mtp.layers.0.x"),
        ("model.mtp.layers.1.x.model.mtp.layers.1.y", "model.mtp.layers.0.x.model.mtp.layers.1.y"),
        ("model.mtp.layers.0.x", None),
        ("model.mtp.layers.11.x", None),
        ("model.mtp.layers.1", "model.mtp.layers.1"),
        ("xmodel.mtp.layers.2.x", "xmodel.mtp.layers.2.x"),
        ("model.mtp.norm.weight", "model.mtp.norm.weight"),
        (f"model.mtp.layers.{'9' * 5000}.x", None),
    ],
)
def test_draft_name_follows_the_layers_number(name: str, expected: str | None) -> None:
    assert draft_name(name, 1) == expected


# L51
def test_stream_without_draft_index_passes_untouched() -> None:
    names = ["model.mtp.layers.1.x", "model.mtp.layers.0.x"]
    pairs = select_draft(reader_of({"p": names}, [])(WeightSource(path=Path("p"))), None)
    assert [name for name, _ in pairs] == names


# L51
def test_draft_layer_is_compared_as_a_whole_number() -> None:
    kept = {name: draft_name(f"model.mtp.layers.{name}.x", 10) for name in ("0", "1", "10", "110")}
    assert kept == {"0": None, "1": None, "10": "model.mtp.layers.0.x", "110": None}
