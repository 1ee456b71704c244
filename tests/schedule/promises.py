"""What each collective promises, one chunk at a time: what the arrays of `Promise` must say."""

from pycoll.schedule.language.collectives import FULL


def holds(layout, rank, chunk, n, chunks):
    """Tell whether a buffer of that layout holds a chunk on a rank."""
    share = chunks // n
    return layout == FULL or rank * share <= chunk < (rank + 1) * share


def inputs(spec, n, chunks, root):
    """Yield every (rank, chunk) that holds data at the start."""
    for rank in range(n):
        if not spec.in_at_root or rank == root:
            for chunk in range(chunks):
                if holds(spec.in_layout, rank, chunk, n, chunks):
                    yield rank, chunk


def outputs(spec, n, chunks, root):
    """Yield every (rank, chunk, contributions) that must hold data at the end.

    Contributions are (source rank, source chunk) pairs, in rank order, each wanted once.
    """
    for rank in range(n):
        first = spec.prefix == 0 and rank == 0
        if first or (spec.out_at_root and rank != root):
            continue
        for chunk in range(chunks):
            if holds(spec.out_layout, rank, chunk, n, chunks):
                yield rank, chunk, sources(spec, rank, chunk, n, chunks, root)


def sources(spec, rank, chunk, n, chunks, root):
    """Return the contributions to one chunk of the output of a rank."""
    if spec.reduces:
        last = n if spec.prefix is None else rank + spec.prefix
        return [(source, chunk) for source in range(last)]
    share = chunks // n
    if spec.transposes:
        return [(chunk // share, rank * share + chunk % share)]
    if spec.in_at_root:
        return [(root, chunk)]
    return [(chunk // share, chunk)]
