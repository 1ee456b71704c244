"""Settings as text: equal where they mean the same, different where they do not, no addresses."""

import enum
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from pycoll.parallel import SGD, AdamW, Compress, Hook, PowerSGD, TopK
from pycoll.parallel.settings import describe


class Plain:
    kind = "plain"

    def __init__(self, **values):
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("_hidden", "lr", "unset")

    def __init__(self, lr):
        self.lr, self._hidden = lr, object()


@dataclass
class Schedule:
    lr: float
    inner: object = None


class Warm(AdamW):
    """Keeps the text of its base class, which does not name what was added."""

    def __init__(self, lr, warmup):
        super().__init__(lr)
        object.__setattr__(self, "warmup", warmup)


class Told:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


class Color(enum.Enum):
    RED = 1


def ring():
    first, second = Plain(), Plain()
    first.other, second.other = second, first
    return first


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        ("tree", "'tree'"),
        (1024, "1024"),
        (1024.0, "1024"),
        (np.float64(0.1), "0.1"),
        (float("inf"), "inf"),
        ((0.9, 0.999), "(0.9, 0.999)"),
        ({"b": 1, "a": 2}, "{'a': 2, 'b': 1}"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (np.dtype("float16"), "float16"),
        (Color.RED, "<Color.RED: 1>"),
        (Plain, f"{__name__}.Plain"),
        (ring, f"{__name__}.ring"),
        (partial(max, 1, key=abs), "partial(builtins.max, [1], {'key': builtins.abs})"),
        (AdamW(3e-4), "AdamW(betas=(0.9, 0.999), eps=1e-08, lr=0.0003, weight_decay=0.01)"),
        (TopK(0.1), "TopK(devices=('cpu',), ratio=0.1, stages=(0, 1, 2))"),
        (Plain(b=1, a=[Plain(c=2)], _own=3), "Plain(a=[Plain(c=2, kind='plain')], b=1, kind='p"),
        (Slotted(0.5), "Slotted(lr=0.5)"),
        (Schedule(1, Slotted(2)), "Schedule(inner=Slotted(lr=2), lr=1)"),
        (ring(), "Plain(kind='plain', other=Plain(kind='plain', other=...))"),
        (Told("<it is\n  at 0x7f6dAB of me>"), "<it is of me>"),
    ],
)
def test_texts(value, text):
    assert describe(value).startswith(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plain(inner=object(), lock=Told(f"<lock at {hex(id(object()))}>")),
        lambda: [Plain(x=Slotted(1))],
        lambda: Plain().__init__,
        lambda: lambda: None,
        lambda: Plain(random=np.random.default_rng(3)),
        lambda: np.array([1, Plain()], object),
        Hook,
        lambda: PowerSGD(2),
    ],
)
def test_two_of_the_same_have_one_text_without_addresses(make):
    first, second = make(), make()
    assert describe(first) == describe(second)
    assert "0x" not in describe(first)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SGD(0.1), SGD(0.1, nesterov=True)),
        (Warm(0.1, 5), Warm(0.1, 6)),
        (Compress("float16"), Compress("bfloat16")),
        (PowerSGD(1), PowerSGD(2)),
        (np.zeros(5000), np.eye(1, 5000, 2500)[0]),
        (np.zeros(4, np.float32), np.zeros(2, np.float64)),
        (Plain(table={"a": [1]}), Plain(table={"a": [2]})),
        (partial(max, 1), partial(max, 2)),
        (0.1, np.nextafter(0.1, 1)),
        (1, True),
        ("1", 1),
    ],
)
def test_what_differs_has_another_text(one, other):
    assert describe(one) != describe(other)


@pytest.mark.parametrize("library", ["array_api_strict", "torch"])
def test_every_element_of_an_array_of_another_library_counts(library):
    xp = pytest.importorskip(library)
    x, y = xp.ones(5000), xp.ones(5000)
    assert describe(x) == describe(y)
    y[2500] = 1.00001
    assert repr(x) == repr(y)  # it leaves them out
    assert describe(x) != describe(y)
    assert describe(x) != describe(x[:4999])
    if library == "torch":
        narrow = x.to(xp.bfloat16)
        assert describe(narrow) == describe(x.to(xp.bfloat16)) != describe(y.to(xp.float16))
        assert describe(y.requires_grad_()) == describe(y.detach())
