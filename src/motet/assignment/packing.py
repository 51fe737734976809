"""Packing a microbatch's samples into sequences with a limit on their tokens: after deferral, so that what is packed is
what is computed together (thesis section 4.6). Samples in one sequence do not see each other; that is the mask's affair
(`motet.attention`).

Longest first, each into the fullest sequence that has room for it (best-fit decreasing): at most 11/9 of the fewest
sequences, and one more.
"""

from collections.abc import Sequence

from motet.assignment.batch_assignment import Microbatch


def packed_sequences(microbatch: Microbatch, num_tokens: Sequence[int], max_tokens: int) -> list[Microbatch]:
    """The microbatch's samples by sequence. `num_tokens`: of each sample of the global batch.

    Raises `ValueError` if a sample alone is longer than `max_tokens`."""
    sequences: list[list[int]] = []
    room: list[int] = []
    for i in sorted(microbatch, key=lambda i: -num_tokens[i]):
        if num_tokens[i] > max_tokens:
            raise ValueError(f"packing: sample {i} has {num_tokens[i]} tokens, more than the limit of {max_tokens}")
        fitting = [s for s, left in enumerate(room) if left >= num_tokens[i]]
        if fitting:
            s = min(fitting, key=room.__getitem__)
            sequences[s].append(i)
        else:
            s = len(sequences)
            sequences.append([i])
            room.append(max_tokens)
        room[s] -= num_tokens[i]
    return [tuple(sequence) for sequence in sequences]
