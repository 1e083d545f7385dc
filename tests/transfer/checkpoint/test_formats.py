"""Load formats as data, and which loader they lead to."""

from collections.abc import Iterator

import pytest
import torch

from weightwire.transfer.checkpoint.formats import (
    FORMATS,
    SERVED,
    CustomLoader,
    CutStep,
    FinishStep,
    LayoutState,
    LoadConfig,
    LoaderKind,
    LoadFormat,
    NameStep,
    Quantization,
    ReaderOptions,
    build_custom_loader,
    dispatch,
    patterns_of,
    served_format,
)
from weightwire.transfer.errors import SettingsError


class Listed:
    """A loader that a test embeds."""

    def __init__(self, config: LoadConfig) -> None:
        self.config = config

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)


# L07
@pytest.mark.parametrize(
    ("load_format", "quantization", "expected"),
    [
        pytest.param("auto", None, LoaderKind.DEFAULT, id="nothing special"),
        pytest.param("auto", Quantization(method="modelopt_fp4", is_online=True), LoaderKind.DEFAULT, id="online fp4"),
        pytest.param("auto", Quantization(method="modelopt_fp4"), LoaderKind.MODELOPT, id="fp4 on disk"),
        pytest.param("auto", Quantization(method="modelopt_mixed"), LoaderKind.MODELOPT, id="mixed"),
        pytest.param("auto", Quantization(method="modelopt_fp8", is_online=True), LoaderKind.MODELOPT, id="online fp8"),
        pytest.param("dummy", Quantization(method="modelopt_fp8"), LoaderKind.DUMMY, id="dummy first"),
        pytest.param("dummy", Quantization(method="auto-round-int8"), LoaderKind.DUMMY, id="dummy before INC"),
        pytest.param("safetensors", Quantization(method="auto-round-int8"), LoaderKind.INC, id="INC"),
        pytest.param("remote_instance", Quantization(method="modelopt_fp8"), LoaderKind.REMOTE_INSTANCE, id="remote"),
        pytest.param("runai_streamer", Quantization(method="modelopt_fp8"), LoaderKind.RUNAI_STREAMER, id="streamer"),
        pytest.param("sharded_state", Quantization(method="modelopt_fp8"), LoaderKind.MODELOPT, id="not a transport"),
        pytest.param("sharded_state", Quantization(method="awq"), LoaderKind.SHARDED_STATE, id="another quantisation"),
        pytest.param(Listed, Quantization(method="modelopt_fp8"), LoaderKind.CLASS, id="a class before quantisation"),
    ],
)
def test_dispatch_takes_the_first_that_applies(
    load_format: str | type[CustomLoader], quantization: Quantization | None, expected: LoaderKind
) -> None:
    assert dispatch(load_format, quantization) is expected


# L07, L09
def test_only_formats_of_ordinary_files_lead_to_the_default_loader() -> None:
    default = {load_format for load_format in LoadFormat if dispatch(load_format) is LoaderKind.DEFAULT}
    assert default == {"auto", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor"}
    own = set(LoadFormat) - default
    assert {dispatch(load_format).value for load_format in own} == {load_format.value for load_format in own}


# L08
def test_class_is_built_from_the_load_configuration() -> None:
    config = LoadConfig(load_format=Listed, reader=ReaderOptions(num_threads=2))
    loader = build_custom_loader(config)
    assert config.kind is LoaderKind.CLASS
    assert isinstance(loader, Listed)
    assert loader.config is config
    assert [name for name, _ in loader] == ["a"]


# L08
@pytest.mark.parametrize("text", ["pkg.mod.Cls", f"{Listed.__module__}.Listed", "builtins.list"])
def test_text_never_names_a_class(text: str) -> None:
    with pytest.raises(SettingsError, match="is unknown"):
        LoadConfig.parse(text)
    with pytest.raises(SettingsError, match="is unknown"):
        dispatch(text)


def test_format_is_no_class_to_build() -> None:
    with pytest.raises(ValueError, match="'auto' is a name, not a class"):
        build_custom_loader(LoadConfig())


# L09
@pytest.mark.parametrize("text", ["foo", "rdma", "jax", "local_cached", "", "AUTO", "gguf", "layered", "x" * 10_000])
def test_format_that_is_not_served_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(SettingsError, match="auto, safetensors, pt, npcache, mistral, dummy") as caught:
        LoadConfig.parse(text)
    assert caught.value.facts["served"] == list(SERVED)
    assert len(str(caught.value)) < 300


# L09
def test_quantisation_whose_loader_is_not_served_is_refused() -> None:
    with pytest.raises(SettingsError, match="'auto-round-int8': needs the loader 'inc', which is not served"):
        LoadConfig.parse("auto", quantization=Quantization(method="auto-round-int8"))
    LoadConfig.parse("auto", quantization=Quantization(method="modelopt_fp4", is_online=True))


# L09
def test_served_formats_are_parsed() -> None:
    assert [served_format(name) for name in ("auto", "safetensors", "pt", "npcache", "mistral", "dummy")] == [*SERVED]
    assert LoadConfig.parse("mistral") == LoadConfig(load_format=LoadFormat.MISTRAL)


RAW = (LayoutState.RAW, NameStep.MAPPED, CutStep.CUT, FinishStep.AFTER)
OWN_NAMES = (LayoutState.RAW, NameStep.OWN_TABLE, CutStep.CUT, FinishStep.AFTER)
ONE_TOPOLOGY = (LayoutState.FINAL, NameStep.KEPT, CutStep.WHOLE, FinishStep.BEFORE_COPY)
AS_DECLARED = (LayoutState.DECLARED, NameStep.DECLARED, CutStep.DECLARED, FinishStep.DECLARED)


# L10
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("auto safetensors pt npcache mistral fastsafetensors instanttensor runai_streamer", RAW),
        ("bitsandbytes gguf", OWN_NAMES),
        ("dummy", (LayoutState.PLACED, NameStep.KEPT, CutStep.WHOLE, FinishStep.AFTER)),
        ("layered", (LayoutState.RAW, NameStep.MAPPED, CutStep.CUT, FinishStep.PER_MODULE)),
        # A file of this format that holds `qkv_proj.weight` goes in unrenamed and uncut.
        ("sharded_state presharded", ONE_TOPOLOGY),
        ("expert_pack", (LayoutState.FINAL, NameStep.EXPERT_SLOT, CutStep.WHOLE, FinishStep.NEVER)),
        ("remote remote_instance", AS_DECLARED),
        ("ipc_cache", (LayoutState.FINAL, NameStep.KEPT, CutStep.WHOLE, FinishStep.NEVER)),
    ],
)
def test_format_decides_what_later_stages_do(
    names: str, expected: tuple[LayoutState, NameStep, CutStep, FinishStep]
) -> None:
    for name in names.split():
        traits = FORMATS[LoadFormat(name)]
        assert (traits.state, traits.names, traits.cut, traits.finish) == expected


# L10
def test_table_has_every_format() -> None:
    assert list(FORMATS) == list(LoadFormat)


# L12
@pytest.mark.parametrize(
    ("options", "load_format", "key"),
    [
        pytest.param({"num_thread": 4}, "auto", "num_thread", id="a typo"),
        pytest.param({"num_threads": 4, "chunk": 1}, "auto", "chunk", id="one too many"),
        pytest.param({"enable_gds": True}, "auto", "enable_gds", id="an option of another format"),
        pytest.param({"num_threads": 0}, "auto", "num_threads", id="no thread"),
        pytest.param({"num_threads": True}, "auto", "num_threads", id="a bool for a number"),
        pytest.param({"num_threads": "4"}, "auto", "num_threads", id="a string for a number"),
        pytest.param({"enable_multithread_load": 1}, "auto", "enable_multithread_load", id="a number for a bool"),
        pytest.param({"enable_gds": "yes"}, "fastsafetensors", "enable_gds", id="a string for a bool"),
    ],
)
def test_reader_option_that_cannot_be_right_is_refused_by_its_key(
    options: dict[str, object], load_format: str, key: str
) -> None:
    with pytest.raises(SettingsError, match=f"reader option '{key}'") as caught:
        ReaderOptions.parse(options, LoadFormat(load_format))
    assert caught.value.facts["option"] == key


# L12
def test_reader_options_that_nobody_named_stay_unsaid() -> None:
    assert ReaderOptions.parse({}) == ReaderOptions(enable_multithread_load=None, num_threads=None, enable_gds=False)
    parsed = LoadConfig.parse("auto", reader={"enable_multithread_load": False, "num_threads": 3})
    assert parsed.reader == ReaderOptions(enable_multithread_load=False, num_threads=3)
    assert ReaderOptions.parse({"enable_gds": True}, LoadFormat.FASTSAFETENSORS).enable_gds


# L13
@pytest.mark.parametrize(
    ("load_format", "fallback", "expected"),
    [
        ("auto", False, ["*.safetensors", "*.bin"]),
        ("auto", True, ["*.safetensors", "*.bin", "*.pt"]),
        ("safetensors", False, ["*.safetensors"]),
        ("safetensors", True, ["*.safetensors", "*.pt"]),
        ("fastsafetensors", False, ["*.safetensors"]),
        ("instanttensor", False, ["*.safetensors"]),
        ("mistral", False, ["consolidated*.safetensors"]),
        ("mistral", True, ["consolidated*.safetensors", "*.pt"]),
        ("pt", False, ["*.pt"]),
        ("pt", True, ["*.pt"]),
        ("npcache", True, ["*.bin", "*.pt"]),
    ],
)
def test_patterns_follow_from_the_format(load_format: str, fallback: bool, expected: list[str]) -> None:
    assert list(patterns_of(LoadFormat(load_format), allow_pt_fallback=fallback)) == expected


# L13
def test_override_replaces_every_pattern() -> None:
    assert patterns_of(LoadFormat.AUTO, allow_pt_fallback=True, override=("x*.bin",)) == ("x*.bin",)
