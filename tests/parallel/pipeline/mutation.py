"""Mutants of schedules: their source with one thing changed, each time another one."""

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Change = Callable[[Any], None]
"""Changes a node in place."""
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq, ast.GtE),
}
OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add, ast.Mult),
    ast.Mult: (ast.Add, ast.FloorDiv),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.USub: (ast.UAdd,),
}
NAMES = {
    "F": ("B", "W"),
    "B": ("F", "W"),
    "W": ("F", "B"),
    "min": ("max",),
    "max": ("min",),
    "p": ("m", "stage"),
    "m": ("p", "stage"),
    "stage": ("p", "m"),
}
LETTERS = {"F": "B", "B": "W", "W": "F", "FBW": "BFW"}
STATED = ("live", "bubble")
"""Functions that say what a schedule promises."""


class Mutant(NamedTuple):
    """A changed module: the function and what is changed in it, and the names of the module."""

    name: str
    space: dict[str, Any]


def mutants(module: Any, name: str) -> Iterator[Mutant]:
    """Yield mutants of a function of a module, and of those in it; decorators stay as they are."""
    tree = ast.parse(inspect.getsource(module))
    place = next(i for i, node in enumerate(tree.body) if getattr(node, "name", "") == name)
    for i, node in enumerate(nodes(tree.body[place])):
        for what, change in [*expressions(node), *statements(node)]:
            changed = copy.deepcopy(tree)
            change(nodes(changed.body[place])[i])
            space = {"__name__": f"mutant of {module.__name__}", "_round": Rounds()}
            for loop in ast.walk(changed):
                if isinstance(loop, ast.While):
                    loop.body.insert(0, ast.parse("_round()").body[0])
            exec(compile(ast.fix_missing_locations(changed), name, "exec"), space)
            where = f"line {node.lineno}, column {node.col_offset}"
            yield Mutant(f"{name}, {where}: {what}", space)


class Rounds:
    """Ends loops that would go on for ever."""

    def __init__(self) -> None:
        self.left = 1_000_000

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RecursionError("this loop does not end")


def nodes(function: Any) -> list[Any]:
    """Return what can be changed in a function, and itself."""
    found = [function]
    for part in function.body:
        if isinstance(part, ast.FunctionDef):
            found += [] if part.name in STATED else nodes(part)
        else:
            found += [node for node in ast.walk(part) if hasattr(node, "lineno")]
    return found


def expressions(node: Any) -> Iterator[tuple[str, Change]]:
    """Yield what can be changed of an expression: operators, numbers, names, what is tested."""
    text = ast.unparse(node)
    if isinstance(node, ast.Compare):
        for other in COMPARISONS[type(node.ops[0])]:
            yield f"{text}: {other.__name__}", setting("ops", [other()])
    for other in OPERATORS.get(type(getattr(node, "op", None)), ()):
        yield f"{text}: {other.__name__}", setting("op", other())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value - 1, node.value + 1):
            yield f"{text}: {value}", setting("value", value)
    if isinstance(node, ast.Constant) and node.value in LETTERS:
        yield f"{text}: {LETTERS[node.value]}", setting("value", LETTERS[node.value])
    if isinstance(node, ast.Name):
        for other in NAMES.get(node.id, ()):
            yield f"{text}: {other}", setting("id", other)
    if isinstance(node, (ast.If, ast.IfExp)):
        for value in (True, False):
            yield f"if {ast.unparse(node.test)}: {value}", setting("test", ast.Constant(value))


def statements(node: Any) -> Iterator[tuple[str, Change]]:
    """Yield what can be left out or exchanged: statements, elements of tuples, arguments."""
    for field in ("body", "orelse"):
        lines = getattr(node, field, None)
        for i, line in enumerate(lines if isinstance(lines, list) else ()):
            if isinstance(line, ast.FunctionDef) or ast.get_docstring(node_of(line)):
                continue
            text = ast.unparse(line).splitlines()[0]
            yield f"without {text}", lambda n, i=i, f=field: setitem(getattr(n, f), i, ast.Pass())
            if i + 1 < len(lines):
                yield f"{text}: one later", lambda n, i=i, f=field: exchange(getattr(n, f), i)
    if isinstance(node, ast.Tuple):
        for i in range(len(node.elts)):
            yield f"{ast.unparse(node)}: without {i}", lambda n, i=i: n.elts.pop(i)
        for i in range(len(node.elts) - 1):
            yield f"{ast.unparse(node)}: {i} one later", lambda n, i=i: exchange(n.elts, i)
    if isinstance(node, ast.Call) and ast.unparse(node.func) not in ("min", "max"):
        for i in range(len(node.args) - 1):
            yield f"{ast.unparse(node)}: argument {i} later", lambda n, i=i: exchange(n.args, i)


def node_of(line: Any) -> ast.Module:
    return ast.Module([line], [])


def setting(field: str, value: Any) -> Change:
    return lambda node: setattr(node, field, value)


def setitem(items: list[Any], i: int, value: Any) -> None:
    items[i] = value


def exchange(items: list[Any], i: int) -> None:
    items[i], items[i + 1] = items[i + 1], items[i]
