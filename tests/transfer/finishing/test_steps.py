"""Steps behind a load: their order, what they touch, and where their results lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightwire.transfer.errors import FinishError
from weightwire.transfer.finishing.steps import (
    Finisher,
    FinishStep,
    Tensors,
    derived_bytes,
    derived_state,
    finish_groups,
    tensor_at,
)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("table", torch.ones(2), persistent=False)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Norm(), Norm()


def model() -> Pair:
    return Pair()


def plus_one(path: str) -> FinishStep:
    """A norm's copy of weight + 1, as some engines keep one."""

    def run(given: Tensors) -> Tensors:
        return {f"{path}.shifted": given[f"{path}.weight"] + 1}

    return FinishStep(
        name=f"{path} + 1", phase="derive", inputs=(f"{path}.weight",), outputs=(f"{path}.shifted",), run=run
    )


def reverse(path: str) -> FinishStep:
    """Something that a kernel wants, after which nothing can be derived."""

    def run(given: Tensors) -> Tensors:
        return {f"{path}.weight": given[f"{path}.weight"].flip(0)}

    return FinishStep(
        name=f"{path} reversed", phase="finish", inputs=(f"{path}.weight",), outputs=(f"{path}.weight",), run=run
    )


def value(tree: nn.Module, name: str) -> list[float]:
    tensor = tensor_at(tree, name)
    assert tensor is not None
    found: list[float] = tensor.tolist()
    return found


# L133
def test_derivation_comes_before_finishing_whatever_the_order_of_steps() -> None:
    tree = model()
    ran = Finisher(tree, [reverse("a"), plus_one("a")]).run()
    assert ran == ("a + 1", "a reversed")
    assert value(tree, "a.shifted") == [1, 2, 3]
    assert value(tree, "a.weight") == [2, 1, 0]


# L133
def test_nothing_is_derived_from_a_final_form() -> None:
    tree = model()
    finisher = Finisher(tree, [plus_one("a"), reverse("a")])
    finisher.run()
    with pytest.raises(FinishError, match=r"'a\.weight' is in its final form"):
        finisher.run()
    assert value(tree, "a.shifted") == [1, 2, 3]


# L171
def test_what_has_its_final_form_is_not_finished_twice() -> None:
    tree = model()
    finisher = Finisher(tree, [reverse("a"), plus_one("b")])
    finisher.run()
    assert finisher.run() == ("b + 1",)
    assert value(tree, "a.weight") == [2, 1, 0]


def test_b28_push_into_a_final_form_is_refused() -> None:
    finisher = Finisher(model(), [reverse("a")])
    finisher.run()
    with pytest.raises(FinishError, match="expected it as it was placed"):
        finisher.run(["a.weight"])


# L134
def test_only_what_was_touched_is_derived_again() -> None:
    tree = model()
    finisher = Finisher(tree, [plus_one("a"), plus_one("b")])
    finisher.run()
    for norm in (tree.a, tree.b):
        norm.weight.fill_(5)
    assert finisher.run(["b.weight", "elsewhere"]) == ("b + 1",)
    assert value(tree, "a.shifted") == [1, 2, 3]
    assert value(tree, "b.shifted") == [6, 6, 6]


# L147, L149, C10
def test_derived_tensors_stay_where_they_are() -> None:
    tree = model()
    finisher = Finisher(tree, [plus_one("a")])
    finisher.run()
    first = tensor_at(tree, "a.shifted")
    assert first is not None
    before, kept = first.data_ptr(), first.clone()
    finisher.run()
    assert first.equal(kept)
    tree.a.weight.mul_(2)
    finisher.run(["a.weight"])
    assert tensor_at(tree, "a.shifted") is first
    assert (first.data_ptr(), first.tolist()) == (before, [1, 3, 5])


# L184
def test_derived_state_says_what_can_be_made_again() -> None:
    tree, steps = model(), [plus_one("a")]
    Finisher(tree, steps).run()
    tree.b.loose = torch.zeros(1)
    found = {state.name: state.step for state in derived_state(tree, steps)}
    assert found == {"a.shifted": "a + 1", "a.table": None, "b.table": None, "b.loose": None}


# L85, L151
def test_memory_of_derivation_is_known_beforehand() -> None:
    tree = model().to("meta")
    assert derived_bytes(tree, [plus_one("a"), plus_one("b")]) == 24


# L181
def test_names_that_a_step_joins_come_from_one_source() -> None:
    both = FinishStep(
        name="both", phase="derive", inputs=("a.weight", "b.weight"), outputs=("b.sum",), run=lambda _: {}
    )
    assert finish_groups([plus_one("a"), plus_one("c"), both]) == (
        frozenset({"c.weight", "c.shifted"}),
        frozenset({"a.weight", "a.shifted", "b.weight", "b.sum"}),
    )


# L135
def test_parameters_that_are_parked_stay_where_they_are() -> None:
    tree = model()
    tree.b.weight = tree.a.weight
    before = tree.a.weight.data_ptr()
    seen = list[torch.device]()

    def run(given: Tensors) -> Tensors:
        seen.extend(tensor.device for tensor in given.values())
        return {"a.weight": given["a.weight"] * 3}

    step = FinishStep(name="x", phase="finish", inputs=("a.weight",), outputs=("a.weight",), run=run)
    Finisher(tree, [step], device="cpu").run()
    assert (tree.a.weight.device.type, tree.a.weight.data_ptr()) == ("cpu", before)
    # The tie is as it was.
    assert tree.b.weight is tree.a.weight
    assert tree.b.weight.tolist() == [0, 3, 6]
    assert seen == [torch.device("cpu")]


# L135
@pytest.mark.parametrize(
    ("spoil", "words"), [("meta", "has no data"), ("absent", "is not there")], ids=["left on meta", "not there"]
)
def test_input_without_data_is_an_error(spoil: str, words: str) -> None:
    tree = model()
    if spoil == "meta":
        tree.a.weight = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    else:
        del tree.a.weight
    with pytest.raises(FinishError, match=words):
        Finisher(tree, [plus_one("a")]).run()


def test_step_that_writes_what_it_did_not_declare_is_an_error() -> None:
    step = FinishStep(
        name="x", phase="derive", inputs=("a.weight",), outputs=("a.y",), run=lambda given: {"a.z": given["a.weight"]}
    )
    with pytest.raises(FinishError, match=r"gave \['a\.z'\]"):
        Finisher(model(), [step]).run()


# L90, L133
def test_finishing_may_replace_a_parameter_if_it_says_so() -> None:
    tree = model()
    step = FinishStep(
        name="x",
        phase="finish",
        inputs=("a.weight",),
        outputs=("a.weight",),
        run=lambda given: {"a.weight": given["a.weight"].repeat(2)},
        replaces=True,
    )
    Finisher(tree, [step]).run()
    assert isinstance(tree.a.weight, nn.Parameter)
    assert value(tree, "a.weight") == [0, 1, 2, 0, 1, 2]
