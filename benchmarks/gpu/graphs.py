"""Collectives captured into CUDA graphs: every replay works on what the arrays hold by then."""

import numpy as np
from common import graph_of, open_stage

import pycoll

REPLAYS = 20


def main():
    writer, cupy = open_stage()
    for n in (2, 8):
        for name, count in (
            ("two_shot_push", 100_003),
            ("ring", 10007),
            ("halving_doubling", 10007),
            ("one_shot", 100_003),
            ("one_shot", 1001),
            ("two_shot_push", 1001),
        ):
            with pycoll.virtual_ranks(n) as ranks:
                xs = [cupy.zeros(count, cupy.float32) for _ in range(n)]
                outs = [cupy.empty_like(x) for x in xs]

                def body(stream, ranks=ranks, xs=xs, outs=outs, name=name):
                    ranks.all_reduce(xs, out=outs, algorithm=name, stream=stream, timeout=5)

                graph, stream = graph_of(cupy, body, 3)
                wrong = 0
                for turn in range(REPLAYS):
                    with stream:
                        for r, x in enumerate(xs):
                            x.fill(turn + r)
                    graph.launch(stream)
                    stream.synchronize()
                    want = np.float32(n * turn + n * (n - 1) // 2)
                    wrong += sum(int((out != want).any()) for out in outs)
                ranks.check()
                facts = {"n": n, "algorithm": name, "count": count, "replays": REPLAYS}
                writer.row("graph", not wrong, wrong=wrong, **facts)


if __name__ == "__main__":
    main()
