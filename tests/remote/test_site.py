"""What a site tells, refuses and remembers."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from lightning import LightningDataModule
from saving import SavesAfter
from sites import OPEN, BadChannel, assert_same_clients, make_sites
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning import ClientModule, SequentialExecutor, Stage
from fl_lightning.callbacks import FederatedCheckpoint, LabelFlipping, SimilarityLogger
from fl_lightning.data import ClientExamples
from fl_lightning.federation import ClientRegistry, UserNames
from fl_lightning.models import GCN, MLP
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import LoopbackChannel, Message, Site, SitePolicy, federate
from fl_lightning.remote.references import describe
from fl_lightning.round.program import LocalProgram
from fl_lightning.round.stage import Evaluation
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedPer, FedProto, Local, SheafFMTL
from fl_lightning.tasks import Drawing, ExampleClassification


@pytest.fixture
def three(graphs, given_clients):
    return given_clients(graphs[:3])


@pytest.fixture
def make_federation(three, make_model, make_trainer, tmp_path):
    """Trainer, data, strategy, model, channel and sites of a remote federation of three clients."""

    def build(kind=FedAvg, policy=OPEN, channel=BadChannel, callbacks=(), model=make_model, num_rounds=2, **settings):
        sites = make_sites(three.clients, tmp_path / "sites", lambda: (model(), kind(num_epochs=1)), policy)
        way, strategy = channel(sites), kind(num_epochs=1)
        trainer = make_trainer(num_rounds=num_rounds, callbacks=list(callbacks))
        data = federate(trainer, way, strategy, relation_graph=Ring(), **settings)
        return trainer, data, strategy, model(), way

    return build


def test_what_leaves_is_the_payload_and_counted_metrics(make_federation) -> None:
    trainer, data, strategy, model, channel = make_federation(FedPer)
    trainer.fit(model, data, strategy)

    kinds = {question.kind for question, _ in channel.responses}
    assert kinds == {"enroll", "start", "run", "evaluate"}
    for question, response in channel.responses:
        if question.kind == "run":
            counts = {"num_examples", "num_steps"}
            assert set(response.tensors) == {f"p/{name}" for name in strategy.shared} | counts
            assert set(response.about) == {"to", "state", "from"}
        elif question.kind == "evaluate":
            splits = {f"{split}/{what}" for split in ("train", "val", "test") for what in ("acc", "loss")}
            assert {name.partition("/")[2] for name in response.tensors} == splits
            assert all(pair.shape == (1, 2) for pair in response.tensors.values())
        else:
            assert not response.tensors


def test_who_a_site_is_does_not_tell_how_many_rows_it_has(make_model, tmp_path) -> None:
    caught = []
    for copies in (1, 7):
        x_NX = torch.tensor([[0.5, 0.0, 0.0], [0.0, 2.0, 1.0]]).repeat(copies, 1)
        y_N, yes_N = torch.tensor([0, 1]).repeat(copies), torch.ones(2 * copies, dtype=torch.bool)
        masks = {f"{split}_mask_N": yes_N for split in ("train", "val", "test")}
        holds = ClientExamples(name="ward", x_NX=x_NX, y_N=y_N, **masks)
        (site,) = make_sites([holds], tmp_path / str(copies), lambda: (make_model(), FedAvg()))
        about = Message.read(site.respond(Message(kind="enroll", about={"strategy": "FedAvg"}).wire)).about
        caught.append({name: value for name, value in about.items() if name not in ("data", "state")})
    assert caught[0] == caught[1]
    assert caught[0]["density"] == 0.5


def test_a_split_of_few_examples_says_nothing(make_federation) -> None:
    trainer, data, strategy, model, channel = make_federation(policy=SitePolicy(min_examples=3))
    first = channel.sites[0]
    few_N = first.client_data.val_mask_N & (first.client_data.val_mask_N.cumsum(0) <= 2)
    first.client_data = dataclasses.replace(first.client_data, val_mask_N=few_N)
    trainer.fit(model, data, strategy)

    for client in (0, 1):
        scores = trainer.run.scores[""].rows([client]).extras
        assert (scores["val/acc"][0, 1] == 0) == (client == 0)
        assert scores["test/acc"][0, 1] >= 3
    assert all(
        torch.equal(pair[0], torch.zeros(2))
        for name, pair in trainer.run.scores[""].rows([0]).extras.items()
        if "val" in name
    )


@pytest.mark.filterwarnings("ignore:.*too few training examples to respond; it is left out")
def test_a_site_of_few_examples_does_not_train(make_federation) -> None:
    trainer, data, strategy, model, channel = make_federation(policy=SitePolicy(min_examples=10**6))
    with pytest.raises(TooFewUpdates, match="too few training examples"):
        trainer.fit(model, data, strategy)
    assert [row["failed_round"] for row in trainer.run.history] == [1, 1]
    assert not any(response.tensors for question, response in channel.responses if question.kind == "run")


def test_predictions_stay(make_federation, tmp_path) -> None:
    trainer, data, strategy, model, channel = make_federation(callbacks=[FederatedCheckpoint()])
    trainer.fit(model, data, strategy)
    channel.responses.clear()

    assert trainer.predict(model, data, strategy, ckpt_path="last") == {}

    response = next(response for question, response in channel.responses if question.kind == "predict")
    assert not response.tensors
    lines = (tmp_path / "sites" / "client-00" / "predictions.csv").read_text().splitlines()
    assert lines[0] == "client,node,split,label,prediction,probability_0,probability_1,probability_2"
    assert len(lines) == 31


def named_sites(three, make_model, folder, lists):
    """Sites of which each says what its classes are called."""
    return [
        Site(
            client,
            make_model(),
            FedAvg(num_epochs=1),
            folder / client.name,
            policy=OPEN,
            names=UserNames(number_N=torch.arange(client.num_nodes), class_names=names),
        )
        for client, names in zip(three.clients, lists, strict=True)
    ]


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        ((("a", "b", "c"), ("b", "a", "c"), ("a", "b", "c")), r"site-0, site-2: list \w{8}; site-1: list \w{8}"),
        ((("a", "b", "c"), None, None), r"site-0: list \w{8}; site-1, site-2: none"),
        ((("a", "b", "c"), ("a", "b", "c"), ("a", "b", "c", "d")), r"site-2: list"),
    ],
)
def test_sites_whose_classes_are_called_otherwise_are_refused(lists, told, three, make_model, make_trainer, tmp_path):
    sites = named_sites(three, make_model, tmp_path, lists)
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    data = federate(trainer, BadChannel(sites), strategy)
    with pytest.raises(
        ValueError, match=rf"the sites' class_names are not the same: .*{told}.*the same list class_names"
    ):
        trainer.fit(make_model(), data, strategy)
    assert not any(site.is_started for site in sites)


def test_sites_with_the_same_names_agree_on_the_number_of_classes(three, make_model, make_trainer, tmp_path) -> None:
    names = ("a", "b", "c", "a class that nobody has")
    channel = BadChannel(named_sites(three, make_model, tmp_path, (names,) * 3))
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    data = federate(trainer, channel, strategy)
    trainer.fit(make_model(), data, strategy)
    assert data.registry.num_outputs == 4
    assert not any("a class" in str(response.about) for _, response in channel.responses)


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 5])
def test_more_classes_than_outputs_are_refused_at_enrollment(
    num_outputs, three, make_model, make_trainer, tmp_path
) -> None:
    client = dataclasses.replace(three.clients[1], y_N=three.clients[1].y_N.clamp(max=1))
    sites = make_sites([three.clients[0], client], tmp_path, lambda: (make_model(), FedAvg(num_epochs=1)))
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    data = federate(trainer, BadChannel(sites), strategy, num_outputs=num_outputs)
    if num_outputs >= 3:
        assert data.registry.num_outputs == num_outputs
        return
    caught = {1: "site-0 has 3, site-1 has 2", 2: "site-0 has 3"}[num_outputs]
    with pytest.raises(ValueError, match=rf"num_outputs is {num_outputs}, but {caught}: set num_outputs .* at least 3"):
        trainer.fit(make_model(), data, strategy)
    assert not any(site.is_started for site in sites)


def test_a_site_with_more_outputs_than_others_is_named(three, make_model, make_trainer, tmp_path, caplog) -> None:
    """One label that is wrong would otherwise widen everybody's net without a word."""
    wrong = three.clients[1].y_N.clone()
    wrong[0] = 254
    clients = [three.clients[0], dataclasses.replace(three.clients[1], y_N=wrong)]
    sites = make_sites(clients, tmp_path, lambda: (make_model(), FedAvg(num_epochs=1)))
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    assert federate(trainer, BadChannel(sites), strategy).registry.num_outputs == 255
    assert "site-1 has 255 outputs, other sites as few as 3: all nets have 255; if that is a wrong" in caplog.text
    caplog.clear()
    assert federate(trainer, BadChannel(sites[:1]), strategy).registry.num_outputs == 3
    assert not caplog.text


def test_a_resent_message_trains_once(make_federation, make_model, monkeypatch) -> None:
    trained = []
    original = SequentialExecutor._run_client

    def count(self, client, request):
        trained.append(client)
        return original(self, client, request)

    monkeypatch.setattr(SequentialExecutor, "_run_client", count)
    trainer, data, strategy, model, channel = make_federation()  # which delivers every message at least twice

    def restart(round_idx: int) -> None:
        channel.sites[:] = [
            Site(site.client_data, make_model(), FedAvg(num_epochs=1), site.folder, policy=OPEN)
            for site in channel.sites
        ]

    channel.before_round = restart
    trainer.fit(model, data, strategy)

    assert sorted(trained) == [0, 0, 1, 1, 2, 2]


def test_a_site_outside_of_any_federation_and_unknown_messages(three, make_model, tmp_path) -> None:
    (site,) = make_sites(three.clients[:1], tmp_path, lambda: (make_model(), FedAvg()))

    def why(wire: bytes) -> str:
        response = Message.read(site.respond(wire))
        assert response.kind == "failure"
        return str(response.about["why"])

    assert "not in a federation" in why(Message(kind="run").wire)
    assert "knows no message 'shout'" in why(Message(kind="shout").wire)
    assert "not a message" in why(b"junk")


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        (SitePolicy(strategies=["FedProx"]), FedAvg, "client-00.*|site-0: this site runs only FedProx, not FedAvg"),
        (SitePolicy(min_examples=1, secure_only=True), FedAvg, "only under secure aggregation"),
    ],
    ids=["strategy", "secure"],
)
def test_a_site_may_refuse_more_than_the_server_asks(make_federation, policy, kind, message) -> None:
    trainer, data, strategy, model, _ = make_federation(kind, policy=policy)
    with pytest.raises(ValueError, match=message):
        trainer.fit(model, data, strategy)


def test_other_settings_and_other_parameters_are_refused(make_federation, make_model) -> None:
    trainer, data, _, model, _ = make_federation()
    strategy = trainer.executor.strategy = FedAvg(num_epochs=2)
    with pytest.raises(ValueError, match=r"strategy\.num_epochs: 2 then, 1 now"):
        trainer.fit(model, data, strategy)
    trainer, data, strategy, _, _ = make_federation()
    with pytest.raises(ValueError, match="optimizer"):
        trainer.fit(make_model(optimizer=functools.partial(SGD, lr=0.1)), data, strategy)
    trainer, data, strategy, _, _ = make_federation()
    with pytest.raises(ValueError, match="lr_scheduler"):
        trainer.fit(make_model(lr_scheduler=functools.partial(ExponentialLR, gamma=0.5)), data, strategy)


def test_of_an_error_only_its_kind_leaves(make_federation, make_model, caplog) -> None:
    class Careless(ClientModule):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("the patient's name is Ada")

    trainer, data, strategy, model, _ = make_federation(model=lambda: make_model(Careless))
    with (
        caplog.at_level(logging.WARNING),
        pytest.warns(UserWarning, match="in stage 'train' in round 0|left out") as caught,
        pytest.raises(TooFewUpdates),
    ):
        trainer.fit(model, data, strategy)
    assert any("failed" in str(warning.message) and "RuntimeError" in str(warning.message) for warning in caught)
    assert not any("Ada" in str(warning.message) for warning in caught)
    assert "Ada" in caplog.text


def test_states_are_kept_as_long_as_a_checkpoint_has_them(make_federation, make_model, tmp_path) -> None:
    checkpoints = FederatedCheckpoint(every_n_rounds=1, keep=2, every_seconds=0, save_best=False)
    trainer, data, strategy, model, channel = make_federation(callbacks=[checkpoints], num_rounds=5)
    trainer.fit(model, data, strategy)
    assert [len(site.states) for site in channel.sites] == [2, 2, 2]  # of round 4, and of round 5 which is the last

    states = tmp_path / "sites" / "client-01" / "states"
    for path in states.glob("*.state"):
        path.unlink()
    with pytest.raises(ValueError, match=r"client-01: this site does not have the state"):
        trainer.fit(model, data, strategy, ckpt_path="last")


def test_callbacks_that_need_the_data_are_refused(make_federation) -> None:
    with pytest.raises(ValueError, match=r"LabelFlipping reads or changes the clients' data"):
        make_federation(callbacks=[LabelFlipping(ratio=0.4)])
    with pytest.raises(ValueError, match=r"SimilarityLogger reads"):
        make_federation(callbacks=[SimilarityLogger()])


def test_sites_that_do_not_fit_together(make_federation, graphs, tmp_path, make_model) -> None:
    trainer, data, strategy, model, channel = make_federation()
    channel.sites[1].client_data = dataclasses.replace(graphs[1], name=graphs[0].name)
    with pytest.raises(ValueError, match="need distinct names"):
        trainer.fit(model, data, strategy)
    channel.sites[1].client_data = dataclasses.replace(graphs[1], x_NF=graphs[1].x_NF[:, :2])
    with pytest.raises(ValueError, match="num_features must be the same"):
        trainer.fit(model, data, strategy)


def test_nothing_is_computed_where_the_data_are_not(make_federation) -> None:
    trainer, data, strategy, model, _ = make_federation()
    trainer.fit(model, data, strategy)
    with pytest.raises(ValueError, match="at their sites"):
        trainer.run.executor.collator([0])
    with pytest.raises(ValueError, match="at their sites"):
        trainer.run.executor.collator.size(0)
    assert data.clients == (None, None, None)


# ---------------------------------------------------------------- other kinds of clients


def both(make_trainer, local_data, model, strategy, sites, **settings):
    """The same federation in process and over the sites, both having trained."""
    local = make_trainer(num_rounds=2, executor=SequentialExecutor(), **settings)
    expected = local.fit(model(), local_data, strategy())
    remote, the_strategy = make_trainer(num_rounds=2, **settings), strategy()
    data = federate(remote, LoopbackChannel(sites), the_strategy, relation_graph=Ring())
    assert remote.fit(model(), data, the_strategy) == expected
    assert_same_clients(local, sites)


@pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")
@pytest.mark.parametrize("kind", [SheafFMTL, Local, FedProto])
def test_clients_of_different_architectures(kind, three, make_trainer, make_model, tmp_path) -> None:
    def model() -> ClientModule:
        nets = [functools.partial(GCN, hidden_channels=8), functools.partial(GCN, hidden_channels=8, num_layers=3)]
        return ClientModule(nets, functools.partial(SGD, lr=0.05))

    sites = make_sites(three.clients, tmp_path, lambda: (model(), kind(num_epochs=1)))
    both(make_trainer, three, model, lambda: kind(num_epochs=1), sites)


def test_bfloat16(three, make_trainer, make_model, tmp_path) -> None:
    sites = make_sites(three.clients, tmp_path, lambda: (make_model(), FedAvg(num_epochs=1)))
    both(make_trainer, three, make_model, lambda: FedAvg(num_epochs=1), sites, precision="bf16-true")


@pytest.mark.parametrize("batches", [{}, {"drop_last": True}, {"steps_per_epoch": 3}])
def test_examples_in_mini_batches(batches, make_trainer, tmp_path) -> None:
    from fl_lightning.batches.examples import ExampleCollator

    def member(client: int) -> ClientExamples:
        draw = torch.Generator().manual_seed(client)
        size = 20 + 7 * client
        role_N = torch.arange(size) % 3
        return ClientExamples(
            name=f"client-{client}",
            x_NX=torch.randn(size, 4, generator=draw),
            y_N=torch.randint(3, (size,), generator=draw).index_fill(0, torch.tensor([0]), 2),
            train_mask_N=role_N == 0,
            val_mask_N=role_N == 1,
            test_mask_N=role_N == 2,
        )

    clients = [member(client) for client in range(3)]

    class Given(LightningDataModule):
        has_validation = True
        registry = ClientRegistry.of(clients, task=ExampleClassification(), num_outputs=3)

        def __init__(self) -> None:
            super().__init__()
            self.clients = clients

        def setup(self, stage: str | None = None) -> None: ...

        def collator(self, clients, *, device, dtype):
            return ExampleCollator(clients, batch_size=4, device=device, dtype=dtype, **batches)

    def model() -> ClientModule:
        made = ClientModule(functools.partial(MLP, hidden_channels=5), functools.partial(SGD, lr=0.1))
        made.take_task(ExampleClassification())
        return made

    drawing = Drawing(batch_size=4, **batches)
    sites = [
        Site(each, model(), FedAvg(num_epochs=2), tmp_path / each.name, policy=OPEN, drawing=drawing)
        for each in clients
    ]
    both(make_trainer, Given(), model, lambda: FedAvg(num_epochs=2), sites)


def fewer_edges(client, parameters, client_data, context):
    """The graph without its first edges."""
    return dataclasses.replace(client_data, edge_index_2E=client_data.edge_index_2E[:, 2:])


@dataclass(kw_only=True, eq=False)
class Rewriting(FedAvg):
    """A client's graph loses edges in every round."""

    def stages(self, round_idx: int) -> Sequence[Stage]:
        return [
            dataclasses.replace(stage, program=LocalProgram(rewrite=fewer_edges)) for stage in super().stages(round_idx)
        ]


def test_graphs_that_a_stage_has_rewritten_are_part_of_the_state(three, make_trainer, make_model, tmp_path) -> None:
    def start():
        return make_sites(three.clients, tmp_path / "sites", lambda: (make_model(), Rewriting(num_epochs=1)))

    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    expected = local.fit(make_model(), three, Rewriting(num_epochs=1))
    strategy = Rewriting(num_epochs=1)
    sites = start()
    for ckpt_path in (None, str(tmp_path / "v" / "one.ckpt")):
        trainer = make_trainer(num_rounds=2)
        data = federate(trainer, LoopbackChannel(sites), strategy)
        trainer.callbacks.append(SavesAfter(1, tmp_path / "v" / "one.ckpt"))
        assert trainer.fit(make_model(), data, strategy, ckpt_path=ckpt_path) == expected
        for client, site in enumerate(sites):
            client_data = site.member.executor.rewritten_data()[client]["edge_index_2E"]
            assert torch.equal(client_data, local.run.executor.rewritten_data()[client]["edge_index_2E"])
        sites = start()


# ---------------------------------------------------------------- functions by name


def test_a_function_that_no_site_could_find_is_refused_before_it_is_sent() -> None:
    strategy = FedAvg()
    with pytest.raises(ValueError, match="which a site cannot find by a name"):
        describe(Evaluation(output=lambda client, parameters, batch, context: None), strategy)
    with pytest.raises(ValueError, match="which a site cannot find by a name"):
        describe(Evaluation(output=describe), strategy)
