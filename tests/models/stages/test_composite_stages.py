"""Parts of models of several modalities as stages, in one process, against the model's own forward."""

from itertools import pairwise

import pytest
import torch
from composite_run import composite_config
from sampling import in_campaigns
from tiny_composites import COMPOSITES

from motet.data.run_file import open_data
from motet.families.configured_graph import read_graph
from motet.models.from_run_file import build_node, plain_nodes
from motet.models.materialize import float64_throughout
from motet.models.stages.stage import StageInput
from motet.plan import LANGUAGE_MODEL
from motet.runtime.verification.verify import run_references

WITH_THE_HEAD_ALONE = (1, 4)
"""Three stages, the last of which is the head."""


class Loaded:
    """Samples of the run's data, all of one microbatch."""

    def __init__(self, data, indices):
        self.samples = tuple(data.sample(i) for i in indices)
        self._data, self._indices = data, indices

    def features(self, module, sample):
        features = self._data.features(self._indices[sample], module)
        return {key: v.double() if v.is_floating_point() else v for key, v in features.items()}


def run_in_stages(config, batch, cuts):
    """The loss and every gradient, by name in the whole graph, and the weights."""
    graph = read_graph(config)
    num_layers = graph.modules[LANGUAGE_MODEL].workload.num_layers
    bounds = [0, *cuts, num_layers]
    stages, outputs = [], {}
    for name in graph.modules:
        if name == LANGUAGE_MODEL:
            continue
        members = [i for i, sample in enumerate(batch.samples) if sample.has(name)]
        node = build_node(config, name, None, torch.float64)
        stage = node.make_stage((0, node.num_layers))
        stages.append((name, stage))
        own = [batch.samples[i] for i in members]
        made = stage(StageInput(own, [batch.features(name, i) for i in members])).hidden
        assert made.shape == stage.output_shape(own)
        outputs[name] = made
    hidden, loss = None, None
    features = [batch.features(LANGUAGE_MODEL, i) for i in range(len(batch.samples))]
    for first, last in pairwise(bounds):
        node = build_node(config, LANGUAGE_MODEL, (first, last), torch.float64)
        stage = node.make_stage((first, last))
        stages.append((LANGUAGE_MODEL, stage))
        incoming = {
            edge.source: outputs[edge.source] for edge in graph.edges if any(first <= x < last for x in edge.layers)
        }
        hidden, loss = stage(StageInput(batch.samples, features, hidden=hidden, incoming=incoming))
        assert last == num_layers or hidden.shape == stage.output_shape(batch.samples)
    (loss / sum(sample.num_loss_tokens[LANGUAGE_MODEL] for sample in batch.samples)).backward()
    gradients, weights = {}, {}
    for name, stage in stages:
        for local_name, parameter in stage.named_parameters():
            whole = f"{name}.{stage.canonical_name(local_name)}"
            weights[whole] = parameter.detach()
            if parameter.grad is not None:
                gradients[whole] = gradients.get(whole, 0) + parameter.grad
            assert all(layer < len(graph.modules[name].workload.layers) for layer in stage.layers_of(local_name))
    return loss.item() / sum(s.num_loss_tokens[LANGUAGE_MODEL] for s in batch.samples), gradients, weights


@pytest.mark.parametrize("cuts", [WITH_THE_HEAD_ALONE, *in_campaigns([((2,),)])], ids=str)
@pytest.mark.parametrize("name", COMPOSITES)
def test_loss_and_all_gradients_are_those_of_the_model_itself(name, cuts, tmp_path):
    config = composite_config(tmp_path, name)
    # Two media in a sample, one, none.
    batch = Loaded(open_data(config).train, [1, 0, 2])
    with float64_throughout():
        loss, gradients, weights = run_in_stages(config, batch, cuts)
        reference = run_references(plain_nodes(config, {}), weights, batch, dtype="float64").exact

    assert loss == pytest.approx(reference.loss, rel=1e-12)
    assert set(gradients) <= set(reference.gradients)
    for key, expected in reference.gradients.items():
        found = gradients.get(key, torch.zeros_like(expected))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=key)
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > 40
