"""The words that Python and C++ share are the same words."""

import re
from pathlib import Path

import numpy as np
import pytest

import oracle
from pycoll import _C, types
from pycoll.schedule.lowering import plan

CSRC = Path(__file__).resolve().parents[1] / "csrc"


def enum_of(header, name):
    """Return the members of a C++ enum class: {"INT8": 0, ...}."""
    text = (CSRC / header).read_text(encoding="utf-8")
    body = re.search(rf"enum class {name}\b[^{{]*{{(.*?)}};", text, re.DOTALL).group(1)
    return {m.upper(): int(v) for m, v in re.findall(r"\bk(\w+) = (\d+)", body)}


def constant(header, name):
    """Return the value of a constexpr number."""
    text = (CSRC / header).read_text(encoding="utf-8")
    return int(re.search(rf"\b{name} = (0x[0-9A-Fa-f]+|\d+)", text).group(1), 0)


@pytest.mark.parametrize(
    ("header", "name", "enum"),
    [
        ("base/types.h", "DType", types.DType),
        ("base/types.h", "ReduceOp", types.ReduceOp),
        ("engine/plan.h", "Opcode", plan.Opcode),
        ("engine/plan.h", "Buffer", plan.PlanBuffer),
    ],
)
def test_enums_are_those_of_the_engine(header, name, enum):
    assert enum_of(header, name) == {member.name: member.value for member in enum}


def test_constants_are_those_of_the_engine():
    flags = {"kFoldTree": "FOLD_TREE", "kFoldComplete": "FOLD_COMPLETE"}
    steps = {"kEntered": "ENTERED", "kDone": "DONE", "kFailed": "FAILED"}
    for header, names in {"engine/plan.h": flags, "base/types.h": steps}.items():
        for theirs, ours in names.items():
            assert constant(header, theirs) == getattr(plan, ours), theirs
    assert constant("engine/engine.h", "kRefusedDescriptor") == types.Kind.REFUSED
    assert constant("base/types.h", "kObjectType") == types.type_code("object")


def test_records_have_the_layout_of_the_engine():
    instr, operand, dtypes, operations = _C.sizes()
    assert (plan.INSTR.itemsize, plan.OPERAND.itemsize) == (instr, operand) == (20, 8)
    assert (len(types.DType), len(types.ReduceOp)) == (dtypes, operations)


@pytest.mark.parametrize(("record", "struct"), [("INSTR", "Instr"), ("OPERAND", "Operand")])
def test_fields_are_those_of_the_struct(record, struct):
    text = (CSRC / "engine/plan.h").read_text(encoding="utf-8")
    body = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL).group(1)
    theirs = [(name, int(bits) // 8) for bits, name in re.findall(r"uint(\d+)_t (\w+);", body)]
    dtype = getattr(plan, record)
    assert [(name, dtype[name].itemsize) for name in dtype.names] == theirs


@pytest.mark.parametrize("name", oracle.DTYPES)
def test_sizes_of_elements(name):
    dtype = types.DType[name.upper()]
    assert dtype.itemsize == oracle.dtype(name).itemsize
    assert dtype.is_float == (name in oracle.FLOATS)
    assert dtype.rounds_once == (dtype.is_float and dtype.itemsize <= 2)


def test_no_kind_or_code_is_too_large_for_the_descriptor():
    assert max(types.Kind) <= 0xFF
    assert len({kind.value for kind in types.Kind}) == len(types.Kind)
    for i in range(5000):
        code = types.type_code(f"a type {i}")
        assert 32 <= code & 0xFF  # never that of a named type, whatever stands in the byte above
        assert code <= 0xFFFF  # the bytes for the type and for the operation


def test_codes_of_named_types_are_read_back():
    assert [types.type_code(d.name.lower()) for d in types.DType] == [*types.DType]
    names = [*oracle.DTYPES, "bool", "complex64", "complex128", "object"]
    codes = [types.type_code(name) for name in names]
    assert [types.type_name(code) for code in codes] == names
    assert len(set(codes)) == len(codes)


def test_types_that_are_only_moved_have_names_where_all_ranks_know_them():
    for name in ("timedelta64[as]", np.dtype("U7").name, np.dtype("S12").name):
        assert types.type_name(types.type_code(name)) == name
    assert types.type_name(types.type_code("a record")).startswith("dtype#")
    known = types._only_moved()
    assert len(set(known.values())) == len(known) == 2 + 26 + 64
