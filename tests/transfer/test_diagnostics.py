"""The catalogue of known failures, and what is printed about one."""

import ast
from pathlib import Path

import pytest

from weightwire.transfer import errors
from weightwire.transfer.diagnostics import CATALOGUE, Diagnostic, Stage, advice, diagnostic_of, render
from weightwire.transfer.errors import (
    AdmissionError,
    CheckpointNotFoundError,
    Fact,
    NamesError,
    PlacementError,
    SlotsError,
    TransferError,
)

ROOT = Path(__file__).parents[2]


# L187
def test_catalogue_has_every_row_with_its_stage() -> None:
    assert {code: row.stage.value for code, row in CATALOGUE.items()} == {
        "D01": "discovery",
        "D02": "discovery",
        "D03": "discovery + names",
        "D04": "placement",
        "D05": "startup overlap",
        "D06": "post-processing",
        "D07": "placement",
        "D08": "placement",
        "D09": "placement (threads)",
        "D10": "iteration",
        "D11": "ordering + mmap",
        "D12": "any",
        "D13": "names",
    }
    assert all(row.causes and row.rules for row in CATALOGUE.values())


# L187, D01, D03, D04, D12, D13
@pytest.mark.parametrize(
    ("error", "stage", "subject"),
    [
        pytest.param(
            CheckpointNotFoundError("x", path="/m", diagnostic="D01"), Stage.DISCOVERY, "file '/m'", id="no weights"
        ),
        pytest.param(
            SlotsError("x", unfilled=["a[v]", "b"], rank=3, diagnostic="D03"),
            Stage.DISCOVERY_NAMES,
            "tensor 'a[v]', 'b', rank 3",
            id="a slot without a tensor",
        ),
        pytest.param(
            PlacementError("x", tensor="w", file="/m/1.bin", diagnostic="D04"),
            Stage.PLACEMENT,
            "tensor 'w', file '/m/1.bin'",
            id="a tensor that does not fit",
        ),
        pytest.param(
            AdmissionError("x", phase="shells", rank=0, diagnostic="D12"),
            Stage.ANY,
            "rank 0, phase 'shells'",
            id="no memory",
        ),
        pytest.param(
            NamesError("x", tensor="w_scale_inv", diagnostic="D13"),
            Stage.NAMES,
            "tensor 'w_scale_inv'",
            id="half a pair",
        ),
    ],
)
def test_error_is_explained_by_its_fact(error: TransferError, stage: Stage, subject: str) -> None:
    diagnostic = diagnostic_of(error)
    assert diagnostic is not None
    assert diagnostic.code == error.facts["diagnostic"]
    assert (diagnostic.stage, diagnostic.subject, diagnostic.detail) == (stage, subject, "x")


@pytest.mark.parametrize("facts", [{}, {"diagnostic": "D99"}, {"diagnostic": 1}, {"diagnostic": None}])
def test_error_that_the_catalogue_does_not_know_has_no_diagnostic(facts: dict[str, Fact]) -> None:
    assert diagnostic_of(TransferError("x", **facts)) is None


def test_subject_of_an_error_without_facts_is_the_load() -> None:
    diagnostic = diagnostic_of(AdmissionError("x", diagnostic="D12"))
    assert diagnostic is not None
    assert diagnostic.subject == "the load as a whole"


def test_long_subject_is_cut() -> None:
    diagnostic = diagnostic_of(SlotsError("x", unfilled=[f"t{i}" for i in range(900)], diagnostic="D03"))
    assert diagnostic is not None
    assert diagnostic.subject == "tensor 't0', 't1', 't2', 't3', 't4' and 895 more"


# L187
def test_rendering_has_code_stage_subject_causes_in_order_and_rules() -> None:
    text = render(Diagnostic(code="D01", subject="folder '/m'", detail="tried *.safetensors"))
    assert text.splitlines() == [
        "D01 [discovery] Cannot find any model weights with ...",
        "subject: folder '/m'",
        "likely causes:",
        "  1. no file matches the patterns that were tried",
        "  2. the format asks for safetensors and the folder has only .bin files",
        "see: L13, L14, L15, L24 in docs/rules.md",
        "found: tried *.safetensors",
    ]
    assert text.startswith(advice(Diagnostic(code="D01", subject="folder '/m'", detail="")))


def test_code_that_the_catalogue_lacks_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="'D99' is not one of D01"):
        Diagnostic(code="D99", subject="x", detail="x")


def raised_with_code(folder: Path) -> list[tuple[str, str, str]]:
    """File, error class and code of each error that is made with a literal `diagnostic=`."""
    found = list[tuple[str, str, str]]()
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            for keyword in node.keywords:
                if keyword.arg == "diagnostic" and hasattr(errors, name):
                    # Also those of a choice, `"D03" if unfilled else "D02"`.
                    codes = [item.value for item in ast.walk(keyword.value) if isinstance(item, ast.Constant)]
                    found.extend((file.name, name, str(code)) for code in codes)
    return found


# L188
def test_stage_reports_only_its_own_class_of_error() -> None:
    raised = raised_with_code(ROOT / "transfer")
    assert ("discovery.py", "CheckpointNotFoundError", "D01") in raised
    strangers = [
        (file, name, code)
        for file, name, code in raised
        if code not in CATALOGUE or not issubclass(getattr(errors, name), CATALOGUE[code].raised_as)
    ]
    assert strangers == []


# L188
def test_layouts_that_are_wrong_without_an_exception_are_no_errors() -> None:
    assert [code for code, row in CATALOGUE.items() if not row.raised_as] == ["D06", "D07", "D08", "D09", "D10", "D11"]
