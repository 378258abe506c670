"""The hypernetwork family: the server step by hand, and FedSheafHN's parts."""

import dataclasses
import functools
import inspect

import pytest
import torch
from both_executors import both_executors
from joined import Joined
from small_generators import CPU, Linear, WatchEmbeddings, federation_of, heard, ridge, sheafhn, updates

from fl_lightning import Callback, Participation, Payload
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.round.context import Context
from fl_lightning.round.payload import flatten
from fl_lightning.strategies import FedSheafHN, SheafRidge
from fl_lightning.strategies.client_outputs import graph_embedding
from fl_lightning.strategies.hypernetwork import GATDiffusion, GCNDiffusion, NoDiffusion, SheafDiffusion
from fl_lightning.strategies.hypernetwork.base import fit


@pytest.mark.parametrize("answered", [(0, 2, 3), (2,)])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_server_step_is_the_gradient_of_half_the_squared_distance(answered, num_steps) -> None:
    strategy = Linear(server_lr=0.05, num_server_steps=num_steps)
    strategy.setup(federation_of(4))
    sent = strategy.configure(strategy.stages(0)[0], (0, 2, 3))
    weight = strategy.generator.weight.detach().clone()  # (9, 4): θ_i = weight @ e_i
    embedding = strategy.embeddings.double()[list(answered)]
    upload = updates(answered, strategy)
    target = flatten(sent.rows(answered).parameters) + flatten(upload.parameters)

    strategy.aggregate(strategy.stages(0)[0], upload)

    for _ in range(num_steps):
        residual = embedding @ weight.T - target  # ∂/∂θ of ½ Σ ‖θ̃ - θ‖²
        weight = weight - 0.05 * residual.T @ embedding
    torch.testing.assert_close(strategy.generator.weight.detach(), weight, rtol=1e-12, atol=1e-14)
    assert list(sent.parameters) == ["convs.0.weight", "convs.0.bias"]
    assert strategy.metrics()["server/update_norm"] == pytest.approx(
        float(flatten(upload.parameters).norm(dim=1).mean())
    )


def test_a_round_without_updates_trains_nothing() -> None:
    strategy = Linear()
    strategy.setup(federation_of(3))
    strategy.configure(strategy.stages(0)[0], (0, 1))
    before = strategy.generator.weight.detach().clone()

    strategy.aggregate(strategy.stages(0)[0], Payload(clients=()))

    assert torch.equal(strategy.generator.weight, before)


@both_executors
def test_clients_receive_what_was_generated_and_send_how_far_they_moved(
    executor, federation, make_model, make_trainer
) -> None:
    seen = {}

    class Watch(Callback):
        def on_send(self, trainer, stage, payload) -> None:
            seen["sent"] = payload

        def on_upload(self, trainer, stage, payload):
            seen["upload"], seen["own"] = payload, dict(trainer.run.executor.state().parameters)
            return payload

    trainer = make_trainer(executor=executor(), callbacks=Watch(), num_rounds=1, precision="64-true")
    trainer.fit(make_model(), federation, Linear())

    for name, sent in seen["sent"].parameters.items():
        torch.testing.assert_close(sent + seen["upload"].parameters[name], seen["own"][name], rtol=0, atol=1e-13)
        assert seen["upload"].parameters[name].abs().max() > 0.01
    assert set(seen["own"]) - set(seen["sent"].parameters) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("attention", ["qkv", "matrix", "none"])
def test_one_server_step_brings_the_generated_nearer_to_the_trained(attention) -> None:
    strategy = sheafhn(
        attention=attention, hypernetwork_dropout=0.0, diffusion_lr=1e-4, hypernetwork_lr=1e-4, num_neighbors=3
    )
    strategy.setup(federation_of(5))
    heard(strategy, range(5))
    stage = strategy.stages(0)[0]
    generated = flatten(strategy.configure(stage, range(5)).parameters)
    upload = updates(range(5), strategy, seed=8)
    trained = generated + flatten(upload.parameters)

    strategy.aggregate(stage, upload)

    now = flatten(strategy.generate_for_evaluation(range(5)).parameters)
    distance, before = (trained - now).norm(), (trained - generated).norm()
    assert 0.99 * before < distance < before  # a small step, not a jump


def test_every_part_of_the_server_is_trained() -> None:
    strategy = sheafhn(hypernetwork_dropout=0.0)
    strategy.setup(federation_of(5))
    heard(strategy, range(5))
    before = {name: p.detach().clone() for name, p in strategy.generator.named_parameters()}
    strategy.configure(strategy.stages(0)[0], range(5))

    strategy.aggregate(strategy.stages(0)[0], updates(range(5), strategy))

    still = [name for name, p in strategy.generator.named_parameters() if torch.equal(p, before[name])]
    assert still == []


def test_the_fit_starts_from_what_the_clients_trained_first() -> None:
    strategy = ridge()
    strategy.setup(federation_of(4))
    stage = strategy.initial_stages()[0]
    assert stage.upload == ("convs.0.weight", "convs.0.bias")
    assert strategy.configure(stage, range(4)) is None
    heard(strategy, range(4))

    generated = flatten(strategy.generate_for_evaluation(range(4)).parameters)

    mean = flatten(updates(range(4), strategy, 5).parameters).mean(dim=0)
    torch.testing.assert_close(generated, mean.expand(4, -1))
    assert sheafhn().initial_stages()[0].upload == ()


def test_graph_embedding_is_the_mean_over_real_nodes_of_the_last_convolution(graphs, make_model) -> None:
    model = make_model(dropout=0.9)
    torch.manual_seed(0)
    model.build(6, 3)
    model.double().eval()
    parameters = dict(model.net.named_parameters())
    collator = GraphCollator(graphs, device=CPU, dtype=torch.float64)
    graph = graphs[4]
    adjacency = torch.eye(graph.num_nodes, dtype=torch.float64)
    adjacency[graph.edge_index_2E[0], graph.edge_index_2E[1]] = 1.0
    scale = adjacency.sum(dim=1).rsqrt()
    propagate = scale[:, None] * adjacency * scale
    hidden = (propagate @ graph.x_NF.double() @ parameters["convs.0.weight"] + parameters["convs.0.bias"]).relu()
    expected = (propagate @ hidden @ parameters["convs.1.weight"] + parameters["convs.1.bias"]).mean(dim=0)
    assert (expected < 0).any()  # the mean is taken before the ReLU

    alone = graph_embedding(model, parameters, single(collator([4])), Context())
    padded = collator([0, 4])  # client 4 has 8 nodes, client 0 has 30
    embed = torch.vmap(lambda tensors: graph_embedding(model, parameters, padded.replace(tensors), Context()))
    beside = embed(padded.tensors())

    torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(beside[1], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "refreshed"),
    [
        ({"refresh_every": 2}, [1, 3]),
        ({"refresh_every": 1}, [0, 1, 2, 3, 4]),
        ({"refresh_every": None}, []),
    ],
    ids=str,
)
def test_embeddings_are_refreshed_every_so_many_rounds(
    settings, refreshed, federation, make_model, make_trainer
) -> None:
    watch = WatchEmbeddings()

    make_trainer(num_rounds=5, callbacks=watch).fit(make_model(), federation, sheafhn(**settings))

    assert watch.sent[0] == ("initial", 0, True)
    assert [round_idx for name, round_idx, sent in watch.sent if name == "train" and sent] == refreshed
    for round_idx in range(5):
        changed = not torch.equal(watch.known[round_idx + 1], watch.known[round_idx])
        assert changed == (round_idx in refreshed)


def test_one_hot_embeddings_are_never_sent(federation, make_model, make_trainer) -> None:
    watch = WatchEmbeddings()

    trainer = make_trainer(callbacks=watch)
    trainer.fit(make_model(), federation, ridge(embedding="one_hot"))

    assert not any(sent for _, _, sent in watch.sent)
    assert torch.equal(trainer.run.strategy.embeddings.rows_CD, torch.eye(5))


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "matrix"},
        {"attention": "none"},
        {"num_neighbors": None},
        {"num_hidden_layers": 2},
        {"diffusion": GCNDiffusion},
        {"diffusion": GATDiffusion},
        {"diffusion": NoDiffusion},
        {"diffusion": functools.partial(SheafDiffusion, restriction_map="bundle", stalk_dimension=2)},
        {"diffusion": functools.partial(SheafDiffusion, restriction_map="general", stalk_dimension=2, linear=True)},
    ],
    ids=str,
)
def test_ablations_learn(settings, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=8)
    strategy = sheafhn(**{"hypernetwork_lr": 0.003, "hypernetwork_dropout": 0.0, **settings})

    trainer.fit(make_model(), federation, strategy)

    assert trainer.run.history[-1]["gen/train/loss"] < trainer.run.history[0]["gen/train/loss"]
    assert trainer.run.history[-1]["server/update_norm"] > 0


def test_unseen_clients_receive_their_own_model_and_leave_the_others_as_they_are(
    federation, make_model, make_trainer
) -> None:
    seen = {}

    class Watch(Callback):
        def on_checkpoint_point(self, trainer) -> None:
            if trainer.run.selection.best_round == trainer.run.round_idx - 1:
                seen["before"] = trainer.run.strategy.generate_for_evaluation(trainer.run.training_clients)

        def on_upload(self, trainer, stage, payload):
            seen[stage.name] = payload
            return payload

    joined = Joined()
    trainer = make_trainer(callbacks=[Watch(), joined], participation=Participation(held_out_fraction=0.4), seed=1)
    # Without diffusion and with one attention number per pair, only the row of a client decides what it is sent.
    strategy = sheafhn(diffusion=NoDiffusion, attention="matrix")
    trainer.fit(make_model(), federation, strategy)
    joined.restore(strategy)
    new, old = trainer.run.unseen_clients, trainer.run.training_clients
    assert (old, new) == ((0, 1, 3), (2, 4))  # an unseen client stands between the others

    after = strategy.generate_for_evaluation(range(5))

    assert seen["initial"].clients == seen["train"].clients == new
    assert torch.equal(strategy.embeddings.rows_CD[list(new)], seen["initial"].extras["embedding"])
    for name, tensor in after.rows(old).parameters.items():
        torch.testing.assert_close(tensor, seen["before"].parameters[name], rtol=1e-6, atol=1e-7)
    rows = flatten(after.parameters)
    assert torch.pdist(rows).min() > 0


def test_a_client_that_was_never_heard_stands_amid_the_others() -> None:
    strategy = sheafhn(num_neighbors=3, hypernetwork_dropout=0.0)
    strategy.setup(federation_of(5))
    heard(strategy, [0, 1, 3, 4])
    guess = strategy.generate_for_evaluation(range(5))

    strategy.embeddings.rows_CD[2] = strategy.embeddings.rows_CD[[0, 1, 3, 4]].mean(dim=0)
    strategy.embeddings.known_C[2] = True

    assert torch.equal(flatten(strategy.generate_for_evaluation(range(5)).parameters), flatten(guess.parameters))


def test_how_far_embeddings_are_apart() -> None:
    strategy = sheafhn(num_neighbors=3)
    strategy.setup(federation_of(5, training=(0, 1, 2, 3)))
    heard(strategy, range(5))
    rows = strategy.embeddings.rows_CD[:4]
    apart = sum(float((row - rows.mean(dim=0)).square().sum()) for row in rows)
    assert strategy.embeddings.spread() == pytest.approx((apart / float(rows.square().sum())) ** 0.5)
    strategy.embeddings.rows_CD[:] = 1.0
    assert strategy.embeddings.spread() == 0


def test_how_what_is_generated_fits() -> None:
    """Two clients; one is generated as it was trained, the other half way."""
    start = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    update = torch.tensor([[1.0, 0.0], [0.0, 2.0]])  # trained: (2, 0) and (0, 3), about their mean (1, 1.5)
    actual = fit(start, update, torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    assert actual["server/captured_share"] == pytest.approx(1 - 1 / 5)
    assert actual["server/explained"] == pytest.approx(1 - 1 / 6.5)
    assert actual["server/spread"] == pytest.approx((4 / 6.5) ** 0.5)


@pytest.mark.parametrize(("build", "clean"), [(sheafhn, False), (ridge, True)], ids=["FedSheafHN", "SheafRidge"])
def test_clients_are_sent_what_dropout_made_or_what_is_evaluated(build, clean) -> None:
    strategy = build(num_neighbors=3, hypernetwork_dropout=0.5)
    strategy.setup(federation_of(5))
    heard(strategy, range(5))
    sent = flatten(strategy.configure(strategy.stages(0)[0], range(5)).parameters)
    assert torch.equal(sent, flatten(strategy.generate_for_evaluation(range(5)).parameters)) == clean


def test_fedsheafhn_is_the_paper_and_says_where_the_rest_is() -> None:
    assert len(inspect.signature(FedSheafHN).parameters) <= 15
    for settings, message in {
        ("validate_every", 2): r"FedSheafHN\(validate_every=...\): validate_every moved to SheafRidge",
        ("last_layer", "closed_form"): "last_layer is SheafRidge's way, where it is no setting",
        ("output_scale", 1.0): "output_scale is gone: the hypernetwork starts as printed",
    }.items():
        with pytest.raises(TypeError, match=message):
            FedSheafHN(**dict([settings]))
    with pytest.raises(TypeError, match="layer_norm is no setting any more"):
        SheafRidge(layer_norm=True)


def test_without_any_embedding_the_message_points_at_the_failures() -> None:
    strategy = sheafhn(num_neighbors=3)
    strategy.setup(federation_of(5))
    with pytest.raises(ValueError, match=r"no client has sent an embedding.*failures"):
        strategy.configure(strategy.stages(0)[0], range(5))


@pytest.mark.parametrize(
    ("build", "settings", "training", "message"),
    [
        (sheafhn, {"num_neighbors": 4}, (0, 1, 2, 3), "the 4 training clients has 3 others: choose 1 to 3, or null"),
        (sheafhn, {"num_neighbors": 0}, None, "strategy.num_neighbors is 0"),
        (ridge, {"embedding": "one_hot"}, (0, 1, 2, 3), "one_hot has no vector for clients held out"),
    ],
)
def test_settings_that_do_not_fit_the_federation(build, settings, training, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**settings).setup(federation_of(5, training))


def test_a_net_without_convolutions_is_refused() -> None:
    federation = federation_of(5)
    others = {"layers.0.weight": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"the last of its net's convolutions.*model.net has layers\.0\.weight"):
        sheafhn().setup(dataclasses.replace(federation, parameters=others))


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"strategy.refresh_every must be at least 1"):
        sheafhn(refresh_every=0)
    with pytest.raises(ValueError, match=r"strategy\.diffusion_lr must not be negative, got -1"):
        sheafhn(diffusion_lr=-1.0)
    with pytest.raises(ValueError, match=r"strategy\.num_hidden_layers must not be negative, got -1"):
        sheafhn(num_hidden_layers=-1)
    with pytest.raises(ValueError, match=r"strategy\.hypernetwork_dropout must be in \[0, 1\), got 1"):
        sheafhn(hypernetwork_dropout=1.0)
    with pytest.raises(ValueError, match=r"strategy.num_server_steps must be at least 1"):
        Linear(num_server_steps=0)


def test_server_draws_leave_the_global_generator_alone() -> None:
    strategy = sheafhn(num_neighbors=3)
    before = torch.get_rng_state()
    strategy.setup(federation_of(5))
    heard(strategy, range(5))
    first = flatten(strategy.configure(strategy.stages(0)[0], range(5)).parameters)
    torch.randn(3)
    again = flatten(strategy.configure(strategy.stages(0)[0], range(5)).parameters)
    torch.set_rng_state(before)

    assert torch.equal(first, again)
    strategy.aggregate(strategy.stages(0)[0], updates(range(5), strategy))
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_to_generate_is_named() -> None:
    with pytest.raises(ValueError, match=r"FedSheafHN has nothing to generate: strategy\.personal \['\*'\] keeps"):
        sheafhn(personal=["*"]).setup(federation_of(3))
