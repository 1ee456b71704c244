"""The examples that train: what they promise, on small sizes."""

import importlib.util
import re
from collections import Counter

import numpy as np
import pytest

from project.test_examples import EXAMPLES, run, run_ranks

GPT = [EXAMPLES / "train_gpt.py", *"--steps 4 --batch 8 --length 16 --features 32".split()]
GPT += "--heads 4 --depth 1 --text-bytes 200000 --every 2".split()
LAST = re.compile(r"params sha256=([0-9a-f]{64}) loss=(\d+\.\d+)\n$")
PNG = b"\x89PNG"


def last_line(output):
    digest, loss = LAST.search(output).groups()
    return digest, float(loss)


def test_spiral(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "spiral.png"
    sizes = ["--points", "600", "--steps", "30", "--workers", "3", "--plot", picture]
    output = run(EXAMPLES / "spiral.py", *sizes)
    assert len(re.findall(r"^(serial|parameter server|all-reduce) .* loss \d", output, re.M)) == 3
    assert "the same parameters, bit for bit: sha256=" in output
    assert picture.read_bytes().startswith(PNG)


def test_elastic():
    output = run_ranks(2, "--elastic", EXAMPLES / "elastic.py", "--steps", "20", "--every", "10")
    assert re.search(r"^step 20: loss \d", output, re.M)
    assert len(set(re.findall("params sha256=([0-9a-f]{64})", output))) == 1


def test_gpt_is_the_same_model_on_every_mesh(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    more = ["--dropout", "0.1"]
    one = run(*GPT, "--micro-batches", "4", *more, "--plot", picture)
    assert picture.read_bytes().startswith(PNG)
    assert re.search(r"step +4/4  loss \d.* tokens/s  sent/step: nothing  waiting: 0%", one)
    assert re.search(r"held-out text +loss \d", one)
    assert re.search(r"order-3 n-gram +loss \d", one)
    want = last_line(one)
    two = run_ranks(2, *GPT, "--mesh", "dp=2", "--micro-batches", "2", "--zero", "1", *more)
    four = run_ranks(4, *GPT, "--mesh", "dp=4", "--zero", "3", *more)
    piped = ["--mesh", "dp=2,tp=1,pp=2", "--micro-batches", "2", "--zero", "1"]
    piped += ["--schedule", "zb_h1", "--recompute", "selective", "--offload", "all"]
    both = run_ranks(4, *GPT, *piped, *more)
    assert [last_line(output) for output in (two, four, both)] == [want, want, want]
    assert re.search(r"parameter \d.*waiting: \d+% \d+% \d+% \d+%\n", four)


def test_gpt_that_is_elastic(tmp_path):
    """The same model as without, also when a second job goes on where the first has stopped."""
    want = last_line(run_ranks(2, *GPT, "--zero", "2", "--micro-batches", "2"))
    elastic = [*GPT, "--elastic", "4", "--zero", "2", "--save", tmp_path, "--save-every", "2"]
    assert last_line(run_ranks(2, "--elastic", *elastic)) == want
    found = run_ranks(2, *GPT, "--zero", "2", "--save", tmp_path)
    assert LAST.search(found.replace("loss=nan", "loss=0.0"))[1] == want[0]


@pytest.mark.parametrize("array", ["numpy", "torch"])
def test_gpt_with_tensor_parallelism(array):
    if array == "torch":
        pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
        pytest.importorskip("torch", reason="PyTorch is not installed")
    digest, loss = last_line(run(*GPT, "--micro-batches", "2"))
    split = ["--mesh", "dp=2,tp=2", "--zero", "3", "--sequence-parallel", "--array", array]
    output = run_ranks(4, *GPT, *split)
    assert "activation" in output
    got = last_line(output)
    assert got[0] != digest  # sums of parts of a matrix product
    assert got[1] == pytest.approx(loss, rel=1e-5)


def python_text():
    spec = importlib.util.spec_from_file_location("python_text", EXAMPLES / "python_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_baseline_counts(order):
    """Against dictionaries, one byte at a time; and its probabilities add up to 1."""
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 5, n).astype(np.uint8) ** 2 for n in (300, 40))

    def probability(context, byte):
        n = len(context) + 1
        seen = Counter(bytes(train[i : i + n]) for i in range(len(train) - n + 1))
        shorter = 1 / 256 if n == 1 else probability(context[1:], byte)
        follow = {gram: count for gram, count in seen.items() if gram[:-1] == context}
        if not follow:
            return shorter
        total = sum(follow.values()) + len(follow)
        return (seen[context + bytes([byte])] + len(follow) * shorter) / total

    text = bytes(test)
    want = [probability(text[i - order + 1 : i], text[i]) for i in range(order - 1, len(text))]
    got = python_text().ngram_losses(train, test, order)
    np.testing.assert_allclose(got, -np.log(want), rtol=1e-12)
    context = text[: order - 1]
    assert sum(probability(context, byte) for byte in range(256)) == pytest.approx(1)
