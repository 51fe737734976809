"""Random templates of small models, and plans made of them."""

from random import Random

from motet.plan import Edge, ModulePlan, Plan, Replica, Stage
from motet.planner.templates.pipelines import Template, Templates, build_plan, min_max_counts

ENCODER, LANGUAGE_MODEL = "vision", "llm"


def draw_templates(
    random: Random, *, failures: int, min_nodes: int, max_nodes: int, devices_per_node: int
) -> Templates:
    """An encoder on the first group of devices and a language model on the others, cut anyhow."""
    num_layers = 1 + max_nodes * devices_per_node
    by_nodes = {n: _draw_template(random, n, devices_per_node, num_layers) for n in range(min_nodes, max_nodes + 1)}
    return Templates(failures=failures, devices_per_node=devices_per_node, by_nodes=by_nodes)


def _draw_template(random: Random, num_nodes: int, devices_per_node: int, num_layers: int) -> Template:
    groups: list[tuple[int, ...]] = []
    for node in range(num_nodes):
        first, end = node * devices_per_node, (node + 1) * devices_per_node
        while first < end:
            size = random.choice([s for s in (1, 2, 4) if s <= end - first])
            groups.append(tuple(range(first, first + size)))
            first += size
    if len(groups) == 1:
        encoder, rest = groups[0], groups
    else:
        encoder, rest = groups[0], groups[1:]
    ends = sorted(random.sample(range(1, num_layers), len(rest) - 1))
    bounds = [0, *ends, num_layers]
    stages = tuple(
        Stage(layers=(bounds[i], bounds[i + 1]), ranks=group, tp_size=len(group)) for i, group in enumerate(rest)
    )
    slowest_s = random.uniform(1, 2) / len(groups)
    return Template(
        num_nodes=num_nodes,
        replicas={
            ENCODER: Replica(stages=(Stage(layers=(0, 2), ranks=encoder, tp_size=len(encoder)),)),
            LANGUAGE_MODEL: Replica(stages=stages),
        },
        fill_s=slowest_s * len(groups) * random.uniform(0.6, 1),
        slowest_s=slowest_s,
    )


def plan_of(templates: Templates, sizes: list[int], num_microbatches: int = 64) -> Plan:
    """Pipelines on so many nodes each; `num_microbatches` of all together."""
    template = templates.by_nodes[sizes[0]]
    modules = {
        name: ModulePlan(
            kind="encoder" if name == ENCODER else "language_model",
            num_layers=replica.stages[-1].layers[1],
            replicas=(replica,),
            trainable=((0, replica.stages[-1].layers[1]),),
            loss_weight=float(name == LANGUAGE_MODEL),
        )
        for name, replica in template.replicas.items()
    }
    like = Plan(modules=modules, edges=(Edge(source=ENCODER, target=LANGUAGE_MODEL),), num_microbatches=1)
    counts = min_max_counts([templates.by_nodes[n] for n in sizes], num_microbatches)
    return build_plan(like, templates, sizes, counts)
