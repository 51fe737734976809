import pytest
import torch
from torch import nn

from motet.models.stages.projector import build_projector


def test_mlp_is_two_linears_with_gelu():
    projector = build_projector("mlp", 3, 5).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    hidden = x @ projector.linear_1.weight.T + projector.linear_1.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    expected = hidden @ projector.linear_2.weight.T + projector.linear_2.bias
    torch.testing.assert_close(projector(x), expected, rtol=1e-12, atol=1e-12)
    assert projector.linear_2.weight.shape == (5, 5)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_weights_depend_on_the_seed_alone(kind):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = build_projector(kind, 6, 4, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(100)
    two, other = build_projector(kind, 6, 4, seed=7), build_projector(kind, 6, 4, seed=8)
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name


def test_own_module_is_taken_as_it_is():
    own = nn.Linear(2, 3)
    assert build_projector(own, 2, 3) is own


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'conv' is not known; give one of linear, mlp"):
        build_projector("conv", 2, 3)
