"""What a collective of virtual ranks should take by itself; explained in docs/cuda-model.md.

Times are of an H100 and hold for devices like it; the speed of a copy is measured in each run.
"""

LAUNCH_S = 1.1e-6  # an empty cooperative launch behind another one
ENTER_S = 0.6e-6  # to read the epoch
HOP_S = 0.65e-6  # a flag, there and seen
RELAXED_HOP_S = 0.25e-6  # a packet that carries its flag: it is there when it is seen
FENCED_HOP_S = 1.15e-6  # the same behind results
FOLD_S = 0.9e-6  # a pack from memory and back
FINISH_S = 0.8e-6  # the last block of a rank is found, and the epoch advanced
STEP_S = 3.3e-6  # of an interpreted plan: waits, instruction, addresses, fold, signal
L2_BYTES = 50e6
L2_BYTES_S = 7e12  # what all multiprocessors read and write in the L2 cache

# Bytes read and written by all ranks, in multiples of the vector; steps of interpreted plans.
TRAFFIC = {
    "two_shot_push": lambda n: 2 * n,
    "two_shot_push_rank": lambda n: 2 * n,
    "ring": lambda n: 5 * (n - 1),
    "halving_doubling": lambda n: 5 * (n - 1),
    "one_shot": lambda n: n * (n + 1),
}
STEPS = {
    "ring": lambda n: 2 * (n - 1),
    "halving_doubling": lambda n: 2 * (n.bit_length() - 1),
}


def seconds(algorithm, n, nbytes, copied):
    """Return the time that an all_reduce should take.

    Args:
        algorithm: Its name.
        n: Ranks.
        nbytes: Bytes of the vector of each.
        copied: Bytes that a copy reads and writes in a second.
    """
    in_cache = 2 * n * nbytes <= L2_BYTES
    moving = TRAFFIC[algorithm](n) * nbytes / (max(copied, L2_BYTES_S) if in_cache else copied)
    if algorithm in STEPS:
        return LAUNCH_S + ENTER_S + HOP_S + STEPS[algorithm](n) * STEP_S + FINISH_S + moving
    return LAUNCH_S + ENTER_S + HOP_S + FOLD_S + FENCED_HOP_S + FINISH_S + moving


def packets_seconds(n, sent, senders=None):
    """Return the time that a call in packets should take: one hop, and no fence.

    Args:
        n: Ranks.
        sent: Bytes from one rank to one other; a packet has as many bytes of flags as of data.
        senders: Ranks that send to all others; by default all.
    """
    moved = 2 * 2 * (senders or n) * (n - 1) * sent  # written and read once
    return LAUNCH_S + ENTER_S + RELAXED_HOP_S + FOLD_S + moved / L2_BYTES_S
