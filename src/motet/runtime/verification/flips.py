"""Tokens of mixtures of experts that a reference would have sent to other experts than the run did."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Flips:
    """Tokens for which the reference would have chosen other experts than the run."""

    num_routed: int = 0
    """Tokens, counted once for each mixture that they pass."""
    num_flipped: int = 0
    worst: float = 0.0
    """Of all flips, the largest distance from a tie: by how much the score of the last expert that the reference would
    have chosen exceeds that of one which the run chose, relative to the spread of the token's scores."""

    def add(self, scores: Tensor, own: Tensor, replayed: Tensor, *, of_groups: Tensor | None = None) -> None:
        """`scores`: [T, experts], -inf for experts of groups that were not chosen, whose scores are in `of_groups`."""
        flipped = (own.sort(-1).values != replayed.sort(-1).values).any(-1)
        self.num_routed += len(own)
        self.num_flipped += int(flipped.sum())
        if flipped.any():
            scores, own, replayed = scores[flipped].double(), own[flipped], replayed[flipped]
            finite = scores.masked_fill(scores.isinf(), 0.0)
            spread = finite.amax(-1) - finite.amin(-1)
            distance = scores.gather(1, own).amin(-1) - scores.gather(1, replayed).amin(-1)
            if of_groups is not None:  # Another group was chosen: sums of scores were nearly tied.
                known = of_groups[flipped].double()
                of_group = known.gather(1, own).mean(-1) - known.gather(1, replayed).mean(-1)
                distance = distance.where(distance.isfinite(), of_group.abs())
            self.worst = max(self.worst, float((distance / spread).max()))
