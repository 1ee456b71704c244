"""The pages agree with the repository: links, anchors, paths, names, commands, code, pictures."""

import ast
import doctest
import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pycoll
from pycoll.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("", "docs", "docs/decisions", "docs/how-to", "docs/reference", "docs/tutorial"),
    *("benchmarks", "benchmarks/gpu"),
)
SOURCES = (".py", ".h", ".cpp", ".cu", ".inl", ".sh")
PARTS = ("pycoll", "csrc", "tests", "examples", "benchmarks")
PAGES = sorted(str(p.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
CODE = re.compile(r'^ *```(\w*)(?: title="[^"]*")?\n(.*?)^ *```', re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^(?!/|-)[\w.*-]+(/[\w.*-]+)*/?[\w.*-]*\.(py|md|h|cpp|cu|inl|sh|json|png|svg)$")
NAMED = re.compile(r"`(\w+)` (?:in|of) `([\w/.]+\.\w+)`")
MODULE = re.compile(r"\bpycoll(?:\.[A-Za-z_]\w*)+")
COMMAND = re.compile(r"(?<![\w./-])pycoll ([a-z]\w*)")
OTHERS = ("mine.py", "first.py", "train.py", "script.py", "step.py", "mpi.h")  # elsewhere
KNOWN = {p.name for f in FOLDERS[1:] + PARTS for p in (ROOT / f).rglob("*.*")} | {"setup.py"}


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(text):
    """Return a page without its blocks of code."""
    return CODE.sub("", text)


def anchors_of(text):
    """Return the anchors that GitHub makes of the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", prose_of(text), re.MULTILINE)
    heads = [LINK.sub(lambda m: m[0][1:].partition("]")[0], head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(text, page):
    """Return the links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(prose_of(text)):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists():
            broken.append(target)
        elif anchor and anchor not in anchors_of(text if not name else read(path)):
            broken.append(target)
    return broken


def missing_files(text, page):
    """Return the paths in code spans of a page that do not exist, seen from the root or from it."""
    words = [word for span in SPAN.findall(prose_of(text)) for word in span.split()]
    paths = [word for word in words if FILE.match(word) and word not in OTHERS]
    paths = [path for path in paths if "NAME" not in path]  # stands for several
    bases = (ROOT, (ROOT / page).parent)
    gone = [p for p in paths if not any(list(base.glob(p)) for base in bases)]
    gone = [p for p in gone if "/" in p or Path(p).suffix in SOURCES]
    return [p for p in gone if "/" in p or not fnmatch.filter(KNOWN, p)]


def misplaced_names(text):
    """Return what a page says to be in a file, "`NAME` in `FILE`", and is not."""
    found = [(n, p) for n, p in NAMED.findall(text) if (ROOT / p).is_file()]
    return [n for n, p in found if not re.search(rf"\b{n}\b", read(p))]


def missing_names(text):
    """Return the dotted names of pycoll that a text uses and that no file defines."""
    return sorted({name for name in MODULE.findall(text) if not is_defined(name)})


def is_defined(name):
    """Tell whether a dotted name is a module, or something that its module has the word of."""
    parts, path = name.split("."), ROOT
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").exists():
        path /= f"{parts.pop(0)}.py"
    path = path / "__init__.py" if path.is_dir() else path
    return not parts or re.search(rf"\b{parts[0]}\b", path.read_text(encoding="utf-8")) is not None


def unknown_commands(text):
    """Return the subcommands of ``pycoll`` in code that do not exist."""
    code = [*SPAN.findall(prose_of(text)), *(body for _, body in CODE.findall(text))]
    found = [word for part in code for word in COMMAND.findall(part)]
    return [word for word in found if word not in (*COMMANDS, "import")]


def broken_code(text):
    """Return the first lines of blocks of Python that do not parse."""
    broken = []
    for language, body in CODE.findall(text):
        if language != "python":
            continue
        examples = doctest.DocTestParser().get_examples(body)
        source = "".join(e.source for e in examples) if examples else body
        try:
            ast.parse(re.sub(r"(?m)^   (?=\S)", "", source) if source[:1] == " " else source)
        except SyntaxError as error:
            broken.append(f"{source.splitlines()[0]}: {error.msg}")
    return broken


def rows_of_glossary():
    """Return (word, text, file) of every row of the glossary."""
    lines = [line for line in read("docs/glossary.md").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] != "word"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert broken_links(read(page), page) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page):
    assert missing_files(read(page), page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_names_exist(page):
    """The changelog also has names of earlier versions."""
    assert missing_names(read(page)) == []
    assert misplaced_names(read(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_and_code_parses(page):
    assert unknown_commands(read(page)) == []
    assert broken_code(read(page)) == []


def test_a_word_of_the_glossary_is_defined_once_and_has_a_file():
    rows = rows_of_glossary()
    words = [row[0] for row in rows]
    assert sorted(words) == sorted(set(words))
    assert [len(row) for row in rows] == [3] * len(rows)
    assert [row[0] for row in rows if not row[2] and row[0] != "peer"] == []
    assert len(rows) > 80


def reached_from(page):
    """Return the pages that links lead to, from page to page; a link to a folder has all in it."""
    found, ahead = set(), [page]
    while ahead:
        page = ahead.pop()
        found.add(page)
        for target in LINK.findall(prose_of(read(page))):
            path = ((ROOT / page).parent / target.partition("#")[0]).resolve()
            pages = path.glob("*.md") if path.is_dir() else [path]
            names = {str(p.relative_to(ROOT)) for p in pages if p.is_relative_to(ROOT)}
            ahead += [name for name in names if name in PAGES and name not in found]
    return found


def test_links_lead_to_every_page():
    assert set(PAGES) - reached_from("README.md") == set()


def test_the_reference_has_every_public_name():
    errors = {n for n in pycoll.__all__ if n in vars(pycoll.errors)}
    listed = re.findall(r"^::: pycoll\.(\w+)$", read("docs/reference/pycoll.md"), re.MULTILINE)
    assert sorted(listed) == sorted(set(pycoll.__all__) - errors)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_the_glossary_is_linked(page):
    assert "glossary.md" in "".join(LINK.findall(read(page)))


def test_the_picture_of_the_house_is_current():
    command = [sys.executable, "docs/pictures/house.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = re.findall(r'"((?:pycoll|csrc)/[\w/]+\.\w+)"', read("docs/pictures/house.py"))
    assert len(named) == 8
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_is_wrong_is_seen():
    page = "docs/mpi.md"
    assert broken_links("[a](nowhere.md) [b](#no) [c](mpi.md#no)\n# Here", page) == [
        *("nowhere.md", "#no", "mpi.md#no"),
    ]
    assert broken_links("[a](mpi.md) [b](#here-there)\n# Here `there`", page) == []
    assert missing_files("`python docs/no.py -n`, `csrc/no/*.h`", page) == [
        "docs/no.py",
        "csrc/no/*.h",
    ]
    assert missing_files("`docs/mpi.md` `decisions/0001*.md` `csrc/engine/*.h`", page) == []
    assert missing_files("`engine.h`, `nowhere.py`, `setup.py`, `mine.py`", page) == ["nowhere.py"]
    assert missing_names("pycoll.parallel.nn_loss, pycoll.no_name") == [
        *("pycoll.no_name", "pycoll.parallel.nn_loss"),
    ]
    assert missing_names("pycoll.parallel.nn.Linear, pycoll.config, pycoll.init") == []
    assert misplaced_names("`DType` in `pycoll/types.py`, `Dtype` of `pycoll/types.py`") == [
        "Dtype"
    ]
    assert unknown_commands("`pycoll runn -n 4`\n```\npycoll show x\npycoll go\n```") == [
        *("runn", "go"),
    ]
    assert broken_code("```python\nx = (\n```\n```python\n>>> y = 1\n```") == [
        "x = (: '(' was never closed"
    ]
