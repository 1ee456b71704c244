"""See pycoll at work in under a minute: proof, training, the same bits, speed, a picture.

``make demo``; or ``python examples/demo.py`` where there are pycoll, scikit-learn, threadpoolctl
and matplotlib.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pycoll.algorithms import find
from pycoll.cli import main as pycoll
from pycoll.cli.common.machine import describe
from pycoll.runtime.selection.select import select
from pycoll.runtime.startup.bootstrap import launched_by_us
from pycoll.schedule.ir import Algorithm
from pycoll.schedule.proof.verify import modes, prove

DIGITS = Path(__file__).with_name("digits.py")
RANKS, PARAMETERS = 4, 65 * 48 + 49 * 10


def style(code: object, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def title(number: int, text: str, about: str) -> None:
    print(f"\n{style('1;36', str(number))}  {style(1, text)}  {style(2, about)}", flush=True)


def good(text: str) -> None:
    print(f"   {style('32', '✓')} {text}", flush=True)


def note(text: str) -> None:
    print(f"   {style(2, text)}", flush=True)


def show_proof(algorithm: Algorithm) -> None:
    """Prove the algorithm that the training will use, and say what that means."""
    schedule = algorithm.schedule(RANKS)
    proof = prove(schedule)
    good("every element of every result holds the contribution of each rank exactly once")
    good("no rank can wait for ever, and no two touch the same memory at the same time")
    good("in place and over consecutive calls as well; with messages, without any buffering")
    if proof.order == "tree":
        good("each sum is ((0 + 1) + (2 + 3)), whatever the size of the vector")
    note(f"programs proven: {' · '.join(name for name, *_ in modes(schedule))}")
    note(f"{proof.folds} folds and {proof.waits} waits, in {proof.seconds * 1e3:.0f} ms")


def train(ranks: int, folder: str, *options: str) -> tuple[bytes, float]:
    """Train on so many ranks; return the bytes of the parameters and the seconds it took."""
    path = Path(folder, f"parameters{ranks}")
    launcher = [] if ranks == 1 else ["-m", "pycoll", "run", "-n", str(ranks)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *launcher, DIGITS, "--save", path, *options])
    if done.returncode:
        raise SystemExit(f"demo: the training on {ranks} ranks failed")
    return path.read_bytes(), time.perf_counter() - start


def compare(name: str, parameters: bytes, wanted: bytes) -> bool:
    """Show a fingerprint of the parameters and whether they are the wanted ones."""
    digest = hashlib.sha256(parameters).hexdigest()
    same = parameters == wanted
    print(f"   {name:30} sha256 {digest[:32]}…  {'the same' if same else 'different'}")
    return same


def show_training(folder: str, epochs: int) -> None:
    """Train on all ranks with progress, then on fewer, and compare."""
    about = f"1,797 images of digits, a 64-48-10 network, {RANKS} ranks, {epochs} epochs"
    title(2, "Training", about)
    options = ["--epochs", str(epochs)]
    wanted, _ = train(RANKS, folder, *options)
    title(3, "The same bits", f"{len(wanted) // 4:,} parameters, trained again from scratch")
    note(
        "every step has four micro-batches, and rank r of n takes the next 4 / n of them; gradients"
    )
    note(
        "are added along one tree, on a rank and then over ranks: it matters not who computes them"
    )
    compare(f"{RANKS} ranks", wanted, wanted)
    same = compare("2 ranks", train(2, folder, *options, "--quiet")[0], wanted)
    same &= compare("serial: one process", train(1, folder, *options, "--quiet")[0], wanted)
    other = train(RANKS, folder, *options, "--quiet", "--order", "rank")[0]
    control = not compare(f"{RANKS} ranks, added one by one", other, wanted)
    if not same:
        raise SystemExit("demo: the parameters differ, which must not happen")
    good("bit-identical, whatever the number of ranks")
    if control:
        good("and not by chance: adding the same gradients in another order ends elsewhere")


def show_speed(largest: str) -> None:
    """Measure two ranks, with every result checked."""
    title(4, "Speed", "two ranks of this machine; every size is checked")
    options = ["--symmetric", "--short", "--max", largest, "--factor", "32"]
    if pycoll(["bench", "all_reduce", "-n", "2", *options]):
        raise SystemExit("demo: the benchmark found wrong results")


def show_picture(algorithm: Algorithm, path: Path) -> None:
    """Draw the schedule."""
    title(5, "Picture", f"what {algorithm.name} moves between {RANKS} ranks")
    path.parent.mkdir(exist_ok=True)
    if pycoll(["show", algorithm.name, "-n", str(RANKS), "-o", str(path)]):
        raise SystemExit("demo: the schedule could not be drawn")


def main() -> None:
    parser = argparse.ArgumentParser(description="See pycoll at work in under a minute.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max", default="16M", help="largest size that is measured")
    parser.add_argument("--out", type=Path, default=Path("out/schedule.png"), help="the picture")
    args = parser.parse_args()
    if launched_by_us():
        raise SystemExit("demo: it starts ranks by itself; run it as `python examples/demo.py`")
    start = time.perf_counter()
    machine = describe()
    cores = f"{machine['cores']} cores of {machine['cpu']}"
    print(f"{style(1, 'pycoll')}  collectives you can read, prove and trust · {cores}")
    choice = select("all_reduce", 4 * PARAMETERS, RANKS, direct=True)
    algorithm = find("all_reduce", choice.name)
    title(1, "Proof", f"the all-reduce that the training uses on {RANKS} ranks: {algorithm.name}")
    note(algorithm.doc)
    show_proof(algorithm)
    with tempfile.TemporaryDirectory() as folder:
        show_training(folder, args.epochs)
    show_speed(args.max)
    show_picture(algorithm, args.out)
    print(f"\ndone in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
