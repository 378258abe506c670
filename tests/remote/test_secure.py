import pytest
import torch
from sites import OPEN, BadChannel, make_sites
from strategies.test_contract import STRATEGIES, tiny

from fl_lightning import Payload, SequentialExecutor, Stage
from fl_lightning.remote import LoopbackChannel, Message, SitePolicy, TopK, federate
from fl_lightning.remote.secure import PairwiseMasks, check_stage, masked, unmasked, weighting_of
from fl_lightning.strategies import FedAvg, FedPer, FedProto
from fl_lightning.strategies.mixing import CoordinateMedian


def sums(kind) -> bool:
    try:
        weighting_of(tiny(kind))
    except ValueError:
        return False
    return True


SUMS = [kind for kind in STRATEGIES if sums(kind)]


@pytest.fixture
def masks(tmp_path):
    all_masks = [
        PairwiseMasks(tmp_path / str(client)) for client in range(3) if (tmp_path / str(client)).mkdir() is None
    ]
    keys = {client: each.public for client, each in enumerate(all_masks)}
    for each in all_masks:
        each.meet(keys)
    return all_masks


def test_masks_cancel_in_the_sum_and_hide_each_answer(masks) -> None:
    like = {"w": torch.zeros(2, 500), "b": torch.zeros(3)}
    stage = Stage(name="train", upload=("w", "b"))
    answers = [
        Payload(
            clients=(client,),
            parameters={name: torch.randn(1, *p.shape) for name, p in like.items()},
            num_examples=torch.tensor([5 + client]),
        )
        for client in range(3)
    ]
    sent = [masked(masks[client], answers[client], "examples", [0, 1, 2], "round 0") for client in range(3)]

    whole = unmasked(
        Payload(clients=(0, 1, 2), signals={"masked": torch.cat([each.signals["masked"] for each in sent])}),
        stage,
        like,
    )

    for name in like:
        mean = sum((5 + client) * answers[client].parameters[name] for client in range(3)) / 18
        assert torch.allclose(whole.parameters[name], mean.expand(3, *like[name].shape), atol=1e-6)
    for each in sent:
        assert set(each.tensors()) == {"masked"}
        assert each.num_examples is None
        spread = each.signals["masked"].double().std() / 2.0**64
        assert 0.25 < spread < 0.33  # as of numbers drawn alike from all of 64 bits: 12^-1/2
    other = masked(masks[0], answers[0], "examples", [0, 1, 2], "round 1").signals["masked"]
    assert not torch.equal(other, sent[0].signals["masked"])
    again = masked(masks[0], answers[0], "examples", [0, 1, 2], "round 0").signals["masked"]
    assert torch.equal(again, sent[0].signals["masked"])


def test_what_masks_refuse(masks) -> None:
    row = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="needs 3 clients in a round, this one has 2"):
        masks[0].mask(row, 1.0, 0, [0, 1], "round 0")
    with pytest.raises(ValueError, match="numbers too large"):
        masks[0].mask(row * 1e12, 1.0, 0, [0, 1, 2], "round 0")
    with pytest.raises(ValueError, match="asks for the signals a"):
        check_stage(Stage(name="s", signals={"a": lambda *_: torch.ones(1)}))


def test_which_strategies_are_content_with_sums() -> None:
    assert {"FedAvg", "FedProx", "FedPer", "FedOpt", "Ditto", "APFL", "PerFedAvg"} <= {kind.__name__ for kind in SUMS}
    assert not {"PFedMe", "SCAFFOLD", "FedAux", "FedSheafHN", "DPSGD", "FedProto"} & {kind.__name__ for kind in SUMS}
    with pytest.raises(ValueError, match="FedAvg needs the answer of each client"):
        weighting_of(FedAvg(aggregation=CoordinateMedian()))


@pytest.fixture
def federation_of(graphs, make_model, make_trainer, tmp_path):
    def build(make, channel=LoopbackChannel, policy=OPEN, num_rounds=2):
        sites = make_sites(graphs[:3], tmp_path / "sites", lambda: (make_model(make()), make()), policy)
        trainer, strategy, way = make_trainer(num_rounds=num_rounds), make(), channel(sites)
        return trainer, federate(trainer, way, strategy, secure=True), strategy, make_model(make()), way

    return build


@pytest.mark.parametrize("kind", SUMS, ids=lambda kind: kind.__name__)
def test_the_server_learns_the_sum_alone_and_that_is_enough(
    kind, federation_of, graphs, given_clients, make_model, make_trainer, assert_same
) -> None:
    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    local.fit(make_model(kind), given_clients(graphs[:3]), tiny(kind))
    trainer, data, strategy, model, channel = federation_of(lambda: tiny(kind), BadChannel)

    trainer.fit(model, data, strategy)

    assert_same(trainer.state_dict()["strategy"], local.state_dict()["strategy"], tolerance=2e-4)
    runs = [answer for question, answer in channel.answers if question.kind == "run"]
    assert len(runs) >= 6
    assert {tuple(answer.tensors) for answer in runs} == {("s/masked",)}


def test_filters_come_before_the_masks(federation_of, make_trainer) -> None:
    policy = SitePolicy(min_examples=1, secure_only=True, filters=[TopK(fraction=0.5)])
    trainer, data, strategy, model, _ = federation_of(lambda: FedAvg(num_epochs=1), policy=policy)
    trainer.fit(model, data, strategy)
    assert trainer.run.history[-1]["num_failures"] == 0


def test_strategies_that_need_rows_are_refused(federation_of) -> None:
    with pytest.raises(ValueError, match="FedProto needs the answer of each client"):
        federation_of(FedProto)


@pytest.mark.filterwarnings("ignore:.*it is left out")
def test_a_round_in_which_a_client_is_missing_is_void(federation_of) -> None:
    def channel(sites):
        return BadChannel(sites, absent={(0, 2)})

    trainer, data, strategy, model, _ = federation_of(lambda: FedPer(num_epochs=1), channel)
    with pytest.warns(UserWarning, match=r"the sum cannot be read without client-02 \(secure aggregation\)"):
        trainer.fit(model, data, strategy)
    assert [row["void"] for row in trainer.run.history] == [1, 0]


def test_a_stage_is_answered_to_one_message_alone(federation_of) -> None:
    trainer, data, strategy, model, channel = federation_of(lambda: FedAvg(num_epochs=1), BadChannel)
    trainer.fit(model, data, strategy)
    question = next(question for question, _ in channel.answers if question.kind == "run")
    site = channel.sites[0]

    forged = Message(kind="run", about={**question.about, "clients": [0, 1, 3]}, tensors=question.tensors)
    answer = Message.read(site.answer(forged.wire))

    assert answer.kind == "failure"
    assert "asked for already, with other clients or from another model" in answer.about["why"]


def test_keys_do_not_change_within_a_federation(federation_of) -> None:
    trainer, data, strategy, model, channel = federation_of(lambda: FedAvg(num_epochs=1), BadChannel)
    trainer.fit(model, data, strategy)
    keys = next(question for question, _ in channel.answers if question.kind == "keys").about["keys"]
    site = channel.sites[0]

    def why(changed):
        answer = Message.read(site.answer(Message(kind="keys", about={"keys": {**keys, **changed}}).wire))
        return answer.about["why"] if answer.kind == "failure" else ""

    assert why({}) == ""
    assert "has changed the other sites' public keys" in why({"1": keys["2"]})
    assert "another public key of this site" in why({"0": keys["2"]})
