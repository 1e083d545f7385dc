"""Renames: what one mapper does, how two become one, and who has which."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.loading.mappers import (
    QuantisationNames,
    RemapRegistry,
    WeightsMapper,
    find_remap,
    llama_remap,
    registers_remap,
)
from weightwire.transfer.loading.resolver import NameTables, Resolver

RENAMES = st.dictionaries(st.text("abc.", max_size=3), st.one_of(st.none(), st.text("abc.", max_size=3)), max_size=4)
MAPPERS = st.builds(WeightsMapper, substrings=RENAMES, prefixes=RENAMES, suffixes=RENAMES)
NAMES = st.text("abc.", max_size=8)


def backwards(mapper: WeightsMapper) -> WeightsMapper:
    """The same tables, written down in another order."""
    tables = (mapper.substrings, mapper.prefixes, mapper.suffixes)
    substrings, prefixes, suffixes = (dict(reversed(list(table.items()))) for table in tables)
    return WeightsMapper(substrings=substrings, prefixes=prefixes, suffixes=suffixes)


# L72
@pytest.mark.parametrize(
    ("mapper", "name", "expected"),
    [
        pytest.param(WeightsMapper(suffixes={".a": ".b", ".x.a": ".c"}), "n.x.a", "n.c", id="the longest suffix"),
        pytest.param(WeightsMapper(suffixes={".x.a": ".c", ".a": ".b"}), "n.x.a", "n.c", id="wherever it stands"),
        pytest.param(WeightsMapper(suffixes={".z": None}), "n.z", None, id="None drops"),
        pytest.param(WeightsMapper(suffixes={".z": ""}), "n.z", "n", id="the empty text does not"),
        pytest.param(WeightsMapper(suffixes={".a": ".b", ".b": ".c"}), "n.a", "n.b", id="one suffix, once"),
        pytest.param(WeightsMapper(suffixes={".a": ".b"}), "n.a.x", "n.a.x", id="not in the middle"),
        pytest.param(WeightsMapper(prefixes={"m.": "model.", "m.l.": "layers."}), "m.l.0", "layers.0", id="prefix"),
        pytest.param(WeightsMapper(prefixes={"m.": "model."}), "x.m.0", "x.m.0", id="only at the start"),
        pytest.param(WeightsMapper(prefixes={"": "model."}), "x.m", "model.x.m", id="the empty prefix"),
        pytest.param(WeightsMapper(prefixes={"": "model.", "v.": None}), "v.m", None, id="and one that drops"),
        pytest.param(WeightsMapper(substrings={"gamma": "weight"}), "gamma.gamma", "weight.gamma", id="once"),
        pytest.param(WeightsMapper(substrings={"ab": "X", "a": "Y"}), "cab", "cX", id="the longest substring"),
        pytest.param(WeightsMapper(substrings={"b": "X", "a": "Y"}), "cab", "cYb", id="the first of equal length"),
        pytest.param(WeightsMapper(), "n", "n", id="nothing to do"),
        pytest.param(
            WeightsMapper(substrings={"a": "b"}, prefixes={"b": "c"}, suffixes={"c": "d"}),
            "a",
            "d",
            id="substring, then prefix, then suffix",
        ),
        pytest.param(
            WeightsMapper(suffixes={"a": "b"}, prefixes={"b": "c"}, substrings={"c": "d"}),
            "a",
            "b",
            id="never backwards",
        ),
    ],
)
def test_mapper_applies_the_longest_key_of_each_table_once(
    mapper: WeightsMapper, name: str, expected: str | None
) -> None:
    assert mapper.apply(name) == expected


# L72
@given(MAPPERS, NAMES)
def test_mapper_does_not_depend_on_the_order_of_keys(mapper: WeightsMapper, name: str) -> None:
    assert backwards(mapper).apply(name) == mapper.apply(name)


# L72
def test_right_one_wins_when_mappers_are_merged() -> None:
    left = WeightsMapper(substrings={"a": "1"}, prefixes={"p": "1", "q": "1"}, suffixes={"s": "1"})
    right = WeightsMapper(substrings={"a": "2"}, prefixes={"p": None}, suffixes={"t": "2"})
    merged = left.merged(right)
    assert merged == WeightsMapper(substrings={"a": "2"}, prefixes={"p": None, "q": "1"}, suffixes={"s": "1", "t": "2"})
    assert (left.prefixes, right.suffixes) == ({"p": "1", "q": "1"}, {"t": "2"})


# L72
@given(MAPPERS, MAPPERS, NAMES)
def test_merging_with_nothing_changes_nothing(mapper: WeightsMapper, other: WeightsMapper, name: str) -> None:
    assert mapper.merged(WeightsMapper()).apply(name) == mapper.apply(name)
    assert WeightsMapper().merged(mapper).apply(name) == mapper.apply(name)
    assert mapper.merged(other).merged(other) == mapper.merged(other)


class LlamaForCausalLM: ...


class MyLlama(LlamaForCausalLM): ...


class Unregistered: ...


# L71
def test_remap_of_llama_is_found_for_its_subclasses() -> None:
    assert find_remap(LlamaForCausalLM) is llama_remap
    assert find_remap(MyLlama) is llama_remap
    assert find_remap(Unregistered) is None


# L71
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q_proj.activation_scale", "q_proj.input_scale"),
        ("q_proj.weight_scale_inv", "q_proj.weight_scale"),
        ("q_proj.weight_scale", "q_proj.weight_scale"),
        ("q_proj.weight", "q_proj.weight"),
    ],
)
def test_remap_of_llama_renames_scales(name: str, expected: str) -> None:
    assert llama_remap(MyLlama()).apply(name) == expected


# L71
def test_remap_is_a_function_of_the_instance_and_the_nearest_ancestors() -> None:
    registry = RemapRegistry()
    seen: list[object] = []

    @registry.registers("LlamaForCausalLM")
    def base(_model: object) -> WeightsMapper:
        return WeightsMapper()

    @registry.registers("MyLlama")
    def derived(model: object) -> WeightsMapper:
        seen.append(model)
        return WeightsMapper(suffixes={".a": ".b"})

    assert registry.find(LlamaForCausalLM) is base
    found = registry.find(type("Deeper", (MyLlama,), {}))
    assert found is derived
    model = MyLlama()
    assert found(model).apply("n.a") == "n.b"
    assert seen == [model]


# L71
def test_remap_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'LlamaForCausalLM': is registered already"):
        registers_remap("LlamaForCausalLM")(llama_remap)


class Static:
    quantisation_mapper = WeightsMapper(suffixes={".a": ".b", ".b": ".c"})


class FromConfig(Static):
    @staticmethod
    def quantisation_mapper_for(config: Mapping[str, object]) -> WeightsMapper:
        return WeightsMapper(suffixes={".a": f".{config['method']}"})


# L52
def test_scale_slot_is_made_and_found_under_one_name() -> None:
    names = QuantisationNames.of(Static, {})
    shells = {name for name in map(names.runtime_name, ["m.a"]) if name}
    assert shells == {"m.b"}
    tables = NameTables(layers=range(1), num_layers=1, mapper=names.mapper)
    assert Resolver(tables, shells).resolve("m.a").target == "m.b"


# L52
@pytest.mark.parametrize(
    ("model_class", "name", "expected"),
    [
        pytest.param(Static, "m.a", "m.b", id="a static table, applied once"),
        pytest.param(FromConfig, "m.a", "m.fp8", id="a function of the configuration wins"),
        pytest.param(Unregistered, "m.a", "m.a", id="a class without renames"),
    ],
)
def test_quantisation_names_come_from_the_models_class(model_class: type, name: str, expected: str) -> None:
    assert QuantisationNames.of(model_class, {"method": "fp8"}).runtime_name(name) == expected
