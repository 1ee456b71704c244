"""What the docstring of an algorithm states: its source, and its cost as formulas to evaluate.

A cost reads ``Cost: <rounds> rounds; <bytes> bytes per rank``. Formulas use the world size n, the
size m of the full vector, the number k of blocks, and p, the largest power of two that is at most
n. A space between two factors multiplies; ``log2`` and ``ceil`` are functions. These may follow:

* ``<bytes> bytes read and as many written per rank``,
* ``<bytes> bytes per rank, <bytes> at the root``,
* ``<bytes> bytes per rank``, ``at the root`` or ``at the busiest rank``, and after each of these
  ``, and at most <bytes> more if n > p``.

The first formula may be preceded by ``at most``.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from fractions import Fraction
from typing import NamedTuple

from pycoll.errors import ScheduleError
from pycoll.schedule.ir import Algorithm

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS = {"log2": lambda x: math.log2(x), "ceil": math.ceil, "max": max, "min": min}


class Stated(NamedTuple):
    """What a docstring states."""

    rounds: str  # formula of the number of rounds
    nbytes: str  # formula of the bytes that the busiest rank sends or receives
    rest: str  # what follows the formula of the bytes
    source: str  # the publication


def stated(algorithm: Algorithm) -> Stated:
    """Read cost and source from the docstring; formulas that are prose are kept as they are.

    Raises:
        ScheduleError: If one of them is missing.
    """
    text = algorithm.rounds.__doc__ or ""
    cost, source = _section(text, "Cost"), _section(text, "Source")
    match = re.fullmatch(r"(.+?)(?: rounds?)?; (.+?)(?: bytes(?: per rank)?(.*?))?\.?", cost)
    if match is None or not source:
        raise ScheduleError(
            f"{algorithm.collective}/{algorithm.name}: the docstring has to say "
            f"'Cost: <rounds> rounds; <bytes> bytes per rank' and 'Source: ...', found {cost!r}"
        )
    rounds, nbytes, rest = match.groups(default="")
    return Stated(rounds, nbytes, rest, source)


def _section(text: str, name: str) -> str:
    match = re.search(rf"^\s*{name}: (.*?)(?=^\s*$|^\s*[A-Z]\w*: |\Z)", text, re.DOTALL | re.M)
    return " ".join(match.group(1).split()) if match else ""


def evaluate(formula: str, n: int, k: int = 1) -> Fraction:
    """Evaluate a formula; bytes come out as a fraction of the full vector.

    Raises:
        ScheduleError: If it is not a formula.
    """
    names = {"n": n, "m": 1, "k": k, "p": 1 << (n.bit_length() - 1)}
    text = re.sub(r"log2 (\w+)", r"log2(\1)", formula)
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    try:
        return Fraction(_value(ast.parse(text, mode="eval").body, names))
    except (SyntaxError, KeyError, ValueError, AttributeError):
        raise ScheduleError(f"{formula!r} is not a formula in {', '.join(names)}") from None


def _value(node: ast.expr, names: dict[str, int]) -> Fraction | float:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, names), _value(node.right, names)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call):
        return Fraction(_FUNCTIONS[node.func.id](*(_value(a, names) for a in node.args)))
    return Fraction(node.value if isinstance(node, ast.Constant) else names[node.id])
