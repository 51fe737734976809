"""DistMM's nine models as planning problems, with the batches that Megatron-LM can hold (`distmm_systems`)."""

from motet.planner.problem import PlanningProblem
from papers.distmm.models import NUM_DEVICES, SCALES
from papers.distmm.systems import setting


def problems() -> list[tuple[str, PlanningProblem]]:
    settings = [setting(scale, model) for scale, models in SCALES.items() for model in models]
    return [
        (f"{each.model}({each.vision}, {each.text}) on {NUM_DEVICES} V100, batch {each.batch}", each.problem)
        for each in settings
    ]
