"""Data of every kind arrives in another process as it was; of an answer no method runs."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from harness.checker import foreign, forms
from harness.runner import claims, failure, tree
from harness.runner.failure import RefusedError
from harness.runner.runner import Runner
from problems.common import load

REFERENCE = """
import enum
from dataclasses import dataclass, field
import torch
from torch import nn
SCALE = 3

def scaled(x):
    return x * SCALE

class Act(enum.Enum):
    RELU = 1

class Base:
    factor = 2

class Cache(nn.Module, Base):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("data", torch.zeros(n))
        self.used = 0

    def forward(self, x):
        self.data[self.used : self.used + len(x)] = scaled(x) * self.factor
        self.used += len(x)
        return self.data[: self.used]

@dataclass(frozen=True)
class Config:
    n: int
    act: Act = Act.RELU
    weights: dict = field(default_factory=dict)

    @property
    def half(self):
        return self.n // 2

def ref_kernel(data):
    return SECRET
"""


def arrived(value, task=None):
    """Return `value` as another process makes it over the same memory."""
    layout = tree.Layout()
    spec = json.loads(json.dumps(tree.describe(value, layout)))
    memory = {"host": torch.zeros(layout.used["host"], dtype=torch.uint8)}
    for leaf, source in zip(tree.leaves(spec), tree.tensors(value), strict=True):
        memory["host"][leaf["offset"] : leaf["offset"] + leaf["nbytes"]] = tree.raw(source)
    return tree.build(spec, memory, task)


@pytest.fixture
def reference(tmp_path, monkeypatch):
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "task.py").write_text("")
    return load.from_file(tmp_path, tmp_path / "reference.py")


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        1 + 2j,
        2**80,
        b"ab",
        range(3),
        slice(1, 4),
        frozenset({1}),
        torch.Size([2, 3]),
        {(0, 1): "a"},
        ...,
        numpy.float32(2),
        numpy.arange(6, dtype=numpy.int16)[::-2],
        numpy.array(["a"]),
        torch.nn.functional.silu,
        torch.randn(3, 4).t(),
        torch.view_as_complex(torch.randn(3, 2)).conj(),
        torch.view_as_complex(torch.randn(3, 2)).conj().imag,
        torch.eye(3).to_sparse(),
        torch.empty(0, 4),
        torch.randn(2).expand(3, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value):
    for copied in (arrived([value])[0], tree.clone([value])[0]):
        assert type(copied) is type(value)
        if isinstance(value, torch.Tensor):
            assert copied.layout == value.layout and torch.equal(copied.to_dense(), value.to_dense())
            assert value.layout is not torch.strided or copied.stride() == value.stride()
        else:
            assert numpy.array_equal(copied, value) if isinstance(value, numpy.ndarray) else copied == value


class Keyed(dict):
    __getattr__ = dict.__getitem__


def test_a_dict_whose_attributes_are_its_keys():
    value = Keyed(x=torch.ones(2), k=3)
    for copied in (arrived(value), tree.clone(value)):
        assert type(copied) is Keyed and copied.k == 3 and copied.x.data_ptr() != value.x.data_ptr()


def test_gradients_and_modules():
    x, w = torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(3))
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    for got_x, got_w, got in (arrived((x, w, module)), tree.clone((x, w, module))):
        assert got_x.requires_grad and isinstance(got_w, torch.nn.Parameter)
        assert torch.equal(got(got_x), module(x))
        assert got[0].weight.data_ptr() != module[0].weight.data_ptr()


def test_classes_that_only_the_reference_has(reference, monkeypatch):
    cache, config = reference.Cache(4), reference.Config(6, weights={"w": torch.ones(2)})
    cache(torch.ones(1))
    value = cache, config
    layout = tree.Layout()
    spec = tree.describe(value, layout)
    assert "SECRET" not in json.dumps(spec)
    monkeypatch.delitem(sys.modules, reference.__name__)  # as in a runner
    memory = {"host": torch.zeros(layout.used["host"], dtype=torch.uint8)}
    for leaf, source in zip(tree.leaves(spec), [cache.data, config.weights["w"]], strict=True):
        memory["host"][leaf["offset"] : leaf["offset"] + leaf["nbytes"]] = tree.raw(source)
    got_cache, got_config = tree.build(spec, memory)
    assert got_cache(torch.ones(2)).tolist() == [6.0] * 3 and got_cache.used == 3
    assert got_config.half == 3 and got_config.act.name == "RELU" and got_config.weights["w"].tolist() == [1, 1]
    assert type(got_cache) is not type(cache)


def test_what_cannot_be_delivered_is_named():
    with pytest.raises(ValueError, match=r"function.*lambda"):
        tree.describe([lambda x: x], tree.Layout())


def test_data_that_contains_itself_is_refused_and_equal_parts_are_not():
    part = [1, torch.ones(2)]
    assert len(tree.describe((part, part), tree.Layout())["items"]) == 2
    part.append({"x": part})
    with pytest.raises(tree.RefusedError, match="must not contain itself, and a list in it does"):
        tree.describe(part, tree.Layout())
    deep = []
    for _ in range(tree.DEPTH):
        deep = [deep]
    with pytest.raises(tree.RefusedError, match="nested at most 32 deep"):
        tree.describe(deep, tree.Layout())


@dataclasses.dataclass
class Out:
    m: torch.Tensor
    s: object


def test_answers_keep_their_classes():
    most = torch.topk(torch.arange(4.0), 2)
    answer = [most, Out(torch.ones(2), 3), numpy.ones(2), numpy.int64(7), {"a": (1.5, None)}]
    parts = foreign.parts_of(answer, "cpu")
    assert [tuple(part.shape) for part in parts] == [(2,)] * 4
    claim = json.loads(json.dumps(claims.structure(answer)))
    got = forms.answer(claim, iter(parts), forms.classes_of(answer))
    assert got[0].values.tolist() == [3, 2] and got[1].m is parts[2] and got[1].s == 3 and isinstance(got[1], Out)
    assert isinstance(got[2], numpy.ndarray) and got[3:] == [7, {"a": (1.5, None)}]


def test_a_claim_does_not_choose_attributes():
    form = {"type": "value", "value": "1"}
    keys = ['"__class__"', '"m"', "[1]"]
    claim = {"type": "dataclass", "value": "Out", "keys": keys, "items": [form] * 3}
    got = forms.answer(claim, iter(()), {"Out": Out})
    assert type(got) is Out and vars(got) == {"m": 1}
    assert list(forms.answer({**claim, "type": "dict"}, iter(()), {})) == ["__class__", "m", "[1]"]
    assert forms.answer({**claim, "value": "Other"}, iter(()), {}).m == 1


@pytest.mark.parametrize("answer", [None, [], {}, object(), [0] * 1025], ids=("none", "list", "dict", "object", "many"))
def test_answers_that_say_nothing_or_too_much_are_refused(answer):
    with pytest.raises(RefusedError, match=r"an answer may|ref_kernel must return") as raised:
        foreign.parts_of(answer, "cpu")
    assert "\n" not in failure.of_folder(raised.value, Path("reference.py"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (1j, "got complex; return a tensor of it instead"),
        ((torch.ones(1), torch.int8), "got dtype; return its text"),
        ([numpy.complex64(1)], "got complex64; return a tensor"),
        ({"s": {1}}, "got set"),
    ],
)
def test_an_answer_of_another_kind_is_refused_on_one_line_with_what_to_return(answer, said):
    with pytest.raises(RefusedError, match=said):
        foreign.parts_of(answer, "cpu")


def test_a_size_reaches_the_check_as_one():
    size = torch.Size([2, 3])
    claim, classes = claims.structure((size, 1)), forms.classes_of((size, 1))
    got, _ = forms.answer(claim, iter(()), classes)
    assert type(got) is torch.Size and got == size
    for odd in ("x", 1.5, True, 2**70, None):
        claim["items"][0]["items"][0] = {"type": "value", "value": json.dumps(odd)}
        assert type(forms.answer(claim, iter(()), classes)[0]) is tuple


def test_no_method_of_an_answer_runs():
    """It would run behind the clock."""

    class Lazy(list):
        def __iter__(self):
            raise AssertionError

    class Keyed(dict):
        def keys(self):
            raise AssertionError

        def __getitem__(self, key):
            raise AssertionError

    @dataclasses.dataclass
    class Late:
        x: int

        @property
        def __dict__(self):
            raise AssertionError

    assert tree.parts([Lazy([1]), Keyed(a=2)]) == []
    assert tree.parts(late := Late(1)) == [late] and claims.structure(late) == {"type": "Late"}


def test_a_call_with_memory_on_a_device_only_has_its_data():
    """As on a GPU, where none of a problem's data lies on the host."""
    spec = {
        "kind": "tensor",
        "space": "device",
        "dtype": "uint8",
        "shape": [4],
        "stride": [1],
        "offset": 0,
        "nbytes": 4,
    }
    made = SimpleNamespace(opened={"data": spec, "split": False}, task=None)
    buffer = SimpleNamespace(memory={"device": torch.arange(8, dtype=torch.uint8)})
    assert Runner._data(made, buffer).tolist() == [0, 1, 2, 3]
