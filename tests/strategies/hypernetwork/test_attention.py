import math

import pytest
import torch
from torch import Tensor

from fl_lightning.strategies.hypernetwork.attention import AttentionHypernetwork, MatrixAttention, QueryKeyAttention
from fl_lightning.strategies.hypernetwork.kernel_features import KernelFeatures, ScaledAttention

ATTENTIONS = ["qkv", "matrix", "none"]


def embeddings(num_clients: int = 5) -> Tensor:
    return torch.randn(num_clients, 6, generator=torch.Generator().manual_seed(num_clients))


def hypernetwork(attention: str, **settings: object) -> AttentionHypernetwork:
    torch.manual_seed(0)
    return AttentionHypernetwork(6, 11, hidden_channels=8, attention=attention, num_clients=5, **settings)


def test_attention_by_hand() -> None:
    attention = QueryKeyAttention(1)
    with torch.no_grad():
        for parameter, value in zip(
            (attention.query_DD, attention.key_DD, attention.value_DD), (2.0, 3.0, 5.0), strict=True
        ):
            parameter.fill_(value)
    log_2 = torch.tensor(2.0).log() / 6

    # Scores of client 1 are (0, 6 x^2) = (0, log 2), so it takes 1/3 of client 0 and 2/3 of itself.
    x = torch.stack([torch.zeros(()), log_2.sqrt()])[:, None]

    torch.testing.assert_close(attention(x), 5 * log_2.sqrt() * torch.tensor([[1 / 2], [2 / 3]]))


@pytest.mark.parametrize("kind", [QueryKeyAttention, ScaledAttention])
def test_attention_as_printed_and_scaled_with_a_residual(kind) -> None:
    attention, x_CD = kind(4), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    is_scaled = kind is ScaledAttention
    score_CC = x_CD @ attention.query_DD @ attention.key_DD.T @ x_CD.T / (2 if is_scaled else 1)
    share_CC = score_CC.softmax(dim=1)
    torch.testing.assert_close(attention(x_CD), share_CC @ x_CD + (x_CD if is_scaled else 0))
    entropy = -(share_CC * share_CC.log()).sum(dim=1).mean() / math.log(5)
    torch.testing.assert_close(attention.entropy, entropy.detach())


def test_hidden_layers_by_hand() -> None:
    model, x_CD = hypernetwork("qkv", dropout=0.0, num_hidden_layers=1), embeddings()
    hidden = model.hidden[0](model.attention(x_CD)).relu()
    torch.testing.assert_close(model(x_CD), hidden @ model.output.weight.T + model.output.bias)


def test_kernel_features_by_hand() -> None:
    settings = {"hidden_channels": 8, "dropout": 0.0, "attention": "qkv", "num_clients": 5}
    model, x_CD = KernelFeatures(6, num_hidden_layers=1, **settings), embeddings()
    assert isinstance(model.attention, ScaledAttention)
    hidden = torch.nn.functional.layer_norm(model.hidden[0](model.attention(x_CD)), (8,))
    torch.testing.assert_close(model(x_CD), torch.where(hidden > 0, hidden, 0.2 * hidden))
    assert torch.equal(KernelFeatures(6, num_hidden_layers=0, **{**settings, "attention": "none"})(x_CD), x_CD)


def test_attention_starts_with_each_client_attending_most_to_itself() -> None:
    x = torch.nn.functional.normalize(embeddings(), dim=1) * 3
    attention = QueryKeyAttention(6)

    torch.testing.assert_close(attention(x), (x @ x.T).softmax(dim=1) @ x)
    assert torch.equal((x @ x.T).argmax(dim=1), torch.arange(5))


def test_matrix_starts_as_the_identity_and_new_clients_keep_their_embedding() -> None:
    attention, x = MatrixAttention(5), embeddings(7)
    assert torch.equal(attention(x), x)

    torch.nn.init.normal_(attention.attention_CC)

    torch.testing.assert_close(attention(x), torch.block_diag(attention.attention_CC, torch.eye(2)) @ x)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_parameter_learns(attention: str) -> None:
    model = hypernetwork(attention)

    output = model(embeddings())
    (output * torch.linspace(-1, 1, 55).view(5, 11)).sum().backward()

    assert output.shape == (5, 11)
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["qkv", "none"])
def test_permuting_clients_permutes_the_parameters(attention: str) -> None:
    model, x = hypernetwork(attention).eval(), embeddings()
    order = torch.tensor([3, 0, 4, 1, 2])

    torch.testing.assert_close(model(x[order]), model(x)[order])


@pytest.mark.parametrize("attention", ["qkv", "matrix"])
def test_clients_see_each_other_only_by_attention(attention: str) -> None:
    model, x = hypernetwork(attention).eval(), embeddings()
    if attention == "matrix":
        torch.nn.init.normal_(model.attention.attention_CC)
    moved = x.clone()
    moved[0] += 1

    assert not torch.allclose(model(x)[1], model(moved)[1])
    assert torch.equal(hypernetwork("none").eval()(x)[1], hypernetwork("none").eval()(moved)[1])


def test_hidden_layers_and_dropout() -> None:
    model, x = hypernetwork("none", num_hidden_layers=3, dropout=0.5), embeddings()

    assert [layer.in_features for layer in model.hidden if isinstance(layer, torch.nn.Linear)] == [6, 8, 8]
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="attention='mean' is unknown"):
        hypernetwork("mean")
    with pytest.raises(ValueError, match="num_hidden_layers not negative, given -1"):
        hypernetwork("none", num_hidden_layers=-1)
    with pytest.raises(ValueError, match="set num_clients"):
        AttentionHypernetwork(6, 11, attention="matrix")
    with pytest.raises(ValueError, match="num_clients=5 and was given 3"):
        hypernetwork("matrix")(embeddings(3))
