"""Values that the host knows while a model's own forward runs on a device."""

import pytest
import torch
from composite_run import composite_config
from pretend_accelerator import PretendTensor, counted, on_accelerator
from sampling import in_campaigns
from torch import Tensor

from motet.api import make_plan
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.models.host_values import HostValues, on_host, values_known
from motet.models.materialize import float64_throughout
from motet.runtime.assembly import build_engine
from motet.runtime.verification.verify import collect_gradients

CPU = torch.device("cpu")


def test_on_a_cpu_values_are_an_ordinary_tensor():
    values = torch.arange(3)
    assert HostValues.of(values, CPU) is values
    with values_known(CPU):
        assert type(torch.tensor([1], device=CPU)) is Tensor


def test_a_forward_that_looks_at_values_gives_what_it_gives_on_a_cpu_and_the_host_does_not_wait():
    ids, lengths = torch.tensor([[5, 7, 5, 2], [7, 7, 1, 0]]), torch.tensor([3, 1])

    def forward(ids: Tensor, lengths: Tensor, embedded: Tensor) -> list[Tensor]:
        device = embedded.device
        image = ids == 7
        found = [embedded[image], embedded.masked_fill(image[..., None], 0.0)]
        assert image.sum() == 3
        assert ids.device == device
        for row, length in zip(ids, lengths.tolist(), strict=True):
            found.append(embedded[0, : int(row[0])] * length)
        found.append(embedded[:, torch.tensor([3, 0], device=device)])
        found.append(embedded[:, torch.tensor([0, 2])])
        found.append(embedded[0].repeat_interleave(torch.cat((lengths, lengths)), dim=0))
        places = image.flatten().nonzero()[:, 0]
        found.append(embedded.flatten(0, 1).index_select(0, places))
        new = torch.zeros(2, 4, dtype=torch.long, device=device)
        new[image] = torch.arange(3, device=device)
        eight_and_nine = torch.tensor([8, 9])
        new[0, ids[0] == 5] = there = eight_and_nine.to(device)
        eight_and_nine.zero_()
        found.append(there + 1 if device.type != "cpu" else there + torch.tensor([9, 10]))
        found.append(new + ids.cumsum(-1))
        found.append(ids.new_zeros(4).index_fill(0, lengths, 6))
        changed = ids.clone()
        changed[ids == 5] = 1
        changed += 1
        found.append(embedded[0][changed[1] - 1 - changed[1] // 8 * 4])
        below = torch.arange(4, device=device) < lengths[:, None]
        found.append(embedded[below])
        found.append(embedded[:, torch.arange(start=1, end=3, device=device)])
        whole = image.unsqueeze(-1).expand_as(embedded)
        found += [embedded[whole], embedded.masked_fill(whole, 2.0)]
        found.append(
            embedded + torch.arange(3, device="cpu").cuda() if device.type == "gpu" else embedded + torch.arange(3)
        )
        found.append(embedded + (lengths.cuda() if device.type == "gpu" else lengths)[:, None, None])
        return found

    def work(rank: int, device: torch.device) -> None:
        torch.manual_seed(0)
        embedded = torch.randn(2, 4, 3, dtype=torch.float64)
        expected = forward(ids, lengths, embedded)
        there = embedded.to(device)
        known = [HostValues.of(values.clone(), device) for values in (ids, lengths)]
        with counted() as found, values_known(device):
            made = forward(*known, there)
        assert not found, found
        for ours, own in zip(made, expected, strict=True):
            assert torch.equal(ours.cpu(), own)
        with pytest.raises(RuntimeError, match="cannot write values of the device"):
            known[0][0] = there[0, :, 0].long()

    on_accelerator(work)


def test_a_function_computes_on_the_host_if_all_that_it_gets_is_known_there():
    def work(rank: int, device: torch.device) -> None:
        kinds: list[type] = []

        def function(values: Tensor, *, other: Tensor | None = None) -> tuple[Tensor, int]:
            kinds.append(type(values))
            return values + 1, 3

        known = HostValues.of(torch.arange(3), device)
        made, number = on_host(function)(known)
        assert (made.device, made.tolist(), number) == (device, [1, 2, 3], 3)
        on_host(function)(known, other=torch.zeros(3).to(device))
        on_host(function)(torch.zeros(3).to(device))
        assert kinds == [Tensor, HostValues, PretendTensor]

    on_accelerator(work)


OTHERS = (
    *("gemma3", "internvl", "llava_onevision", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni_thinker", "smolvlm"),
    "voxtral",
)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen3_vl", 1),
        *in_campaigns((name, 1) for name in OTHERS),
        *in_campaigns([("qwen3_vl", 2)]),
    ],
)
def test_whole_multimodal_models_compute_as_on_a_cpu_and_the_host_does_not_wait(name, tp, tmp_path):
    """On one rank; the language model also on a tensor-parallel group behind its encoder."""
    config = composite_config(tmp_path, name, tp=tp)
    if tp == 1:
        parallel = config.parallel.model_copy(update={"placement": "replicated"})
        cluster = config.cluster.model_copy(update={"num_devices": 1})
        config = config.model_copy(update={"parallel": parallel, "cluster": cluster})
    plan = make_plan(config).plan
    data = open_data(config)
    batch = next(Loader(InProcess(data.train), config.train.global_batch_size, seed=0, batches_ahead=0))

    def work(rank: int, device: torch.device) -> None:
        results = []
        with float64_throughout():
            for place in (CPU, device):
                engine = build_engine(config, plan, place)
                for _ in range(2):
                    engine.model.zero_gradients()
                    with counted() as found:
                        started = engine.start(batch, seed=(0, 0))
                        engine.model.clip_gradients(started.gradient_norm, 1e9)
                    loss = started.read().loss
                results.append((loss, collect_gradients(engine.model)))
        assert not found, found
        (expected_loss, expected), (loss, gradients) = results
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert (gradients is None) == (expected is None) == (rank > 0)
        for parameter, versions in (gradients or {}).items():
            for version, own in zip(versions, expected[parameter], strict=True):
                torch.testing.assert_close(version.cpu(), own, rtol=1e-8, atol=1e-11)

    on_accelerator(work, plan.num_ranks)
