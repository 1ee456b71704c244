"""Every public name says what it does, what its arguments are, and what it raises."""

import inspect
import re
import textwrap

import pytest

import pycoll
import pycoll.parallel

try:
    import pycoll.torch as for_torch
except ModuleNotFoundError:  # without PyTorch
    for_torch = None

MODULES = [module for module in (pycoll, pycoll.parallel, for_torch) if module]
LINK = re.compile(r"(?<!`)`(?:[\w.]*\.)?(\w+)`(?!`)")
METHOD = re.compile(r"`(\w+)\.(\w+)`")  # "see `Hook.all_reduce`"
RAISE = re.compile(r"^ *raise ([A-Z]\w+)\(", re.MULTILINE)


def function_of(owner, name):
    """Return the function behind a method or a property of a class, or None."""
    found = inspect.getattr_static(owner, name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return found if callable(found) else None


def public():
    """Yield names, functions or classes, and the classes that they belong to."""
    for module, name in ((m, name) for m in MODULES for name in m.__all__):
        found = getattr(module, name)
        if callable(found):
            yield f"{module.__name__}.{name}", found, None
        for method in dir(found) if inspect.isclass(found) else ():
            function = function_of(found, method)
            ours = getattr(function, "__module__", None) or ""
            if not method.startswith("_") and ours.startswith("pycoll"):
                yield f"{module.__name__}.{name}.{method}", function, found


PUBLIC = {name: (found, owner) for name, found, owner in public()}


def whole_text(found, owner):
    """Return a docstring with those of the classes that it belongs to, and of what it refers to."""
    text = inspect.getdoc(found) or ""
    near = [getattr(owner, n) for n in LINK.findall(text) if hasattr(owner, n)]
    near += [getattr(pycoll, n) for n in LINK.findall(text) if n in pycoll.__all__]
    near += owner.__mro__ if owner else ()
    others = (vars(module).get(name) for name, _ in METHOD.findall(text) for module in MODULES)
    near += [getattr(o, n) for o in others for _, n in METHOD.findall(text) if hasattr(o, n)]
    return "\n".join([text, *(inspect.getdoc(other) or "" for other in near)])


def undocumented(found, owner):
    """Return the arguments of which nothing is said."""
    said = re.findall(
        r"``[*]*(\w+)(?:=\w+)?``|^ *[*]*(\w+):|`(\w+)`", whole_text(found, owner), re.MULTILINE
    )
    names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
    return [name for name in names if not any(name in words for words in said)]


def unsaid(found, owner):
    """Return the errors that a function raises by itself and does not name."""
    errors = set(RAISE.findall(textwrap.dedent(inspect.getsource(inspect.unwrap(found)))))
    return [name for name in errors if not re.search(rf"\b{name}\b", whole_text(found, owner))]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name(name):
    found, owner = PUBLIC[name]
    assert inspect.getdoc(found)
    if inspect.isfunction(inspect.unwrap(found)):
        assert (undocumented(found, owner), unsaid(found, owner)) == ([], [])


def test_fields_of_settings():
    assert undocumented(pycoll.Config, None) == []


def test_what_is_missing_is_found():
    def call(x, y):
        """Take ``x``."""
        raise ValueError(x)

    assert undocumented(call, None) == ["y"]
    assert unsaid(call, None) == ["ValueError"]
    assert len(PUBLIC) > 80
