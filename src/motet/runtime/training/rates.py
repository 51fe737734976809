"""Rates of a training step for its metrics: samples and tokens a second, and model FLOPs utilization."""

from collections.abc import Callable, Sequence

from motet.assignment.sample import Sample
from motet.plan import Plan
from motet.schedule.routes import Routes

ShortestSeconds = Callable[[Routes, Sequence[Sample]], float]
"""Seconds of an iteration in which all devices compute model FLOPs at their peak."""


class Rates:
    """Rates of the steps of a plan. `shortest_s`: None: the peak of the devices is not known."""

    def __init__(self, plan: Plan, shortest_s: ShortestSeconds | None) -> None:
        self._shortest_s = shortest_s
        self._with_loss = {module.data_module(name) for name, module in plan.modules.items() if module.loss_weight}

    def of_step(
        self, routes: Routes, routed: Sequence[Sample], samples: Sequence[Sample], step_s: float
    ) -> dict[str, float]:
        """Tokens are those of the sequences with a loss; of contrastive towers those of all modules. `routed`: the
        samples of the routes, which may be of the next batch too."""
        values = {"samples_per_s": len(samples) / step_s, "tokens_per_s": self._num_tokens(samples) / step_s}
        if self._shortest_s is not None:
            values["mfu"] = self._shortest_s(routes, routed) / step_s
        return values

    def _num_tokens(self, samples: Sequence[Sample]) -> int:
        modules = {module for sample in samples for module in sample.layouts}
        return sum(sample.num_tokens(module) for module in modules & self._with_loss or modules for sample in samples)
