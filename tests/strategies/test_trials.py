"""Settings that are chosen while training, on the clients' validation examples."""

import dataclasses
import functools

import pytest
import torch
from both_executors import both_executors
from saving import SavesAfter

from fl_lightning import Callback, Participation
from fl_lightning.models import ProjectionGCN
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage, StageAddress
from fl_lightning.strategies import FedAux, Kin, SheafRidge
from fl_lightning.strategies.mixing import NormClipping
from fl_lightning.strategies.mixing.fedaux import FedAuxClient
from fl_lightning.strategies.trials import ON_OFF, SHARES, Trials

kin = functools.partial(Kin, common_share=0.5, similarity_temperature=5.0)
ridge = functools.partial(
    SheafRidge,
    num_neighbors=2,
    attention="qkv",
    num_hidden_layers=2,
    hidden_channels=8,
    strength=0.8,
    personal=["head.*"],
    masked_averaging=False,
)
similar_head = functools.partial(kin, validate_personal=["head.*"])
kin_temperature = functools.partial(kin, validate_similarity_temperature=[1.0, 5.0, 50.0])
ridge_head = functools.partial(ridge, personal=[], validate_personal=["head.*"])
both_families = pytest.mark.parametrize("strategy", [kin, ridge], ids=["Kin", "SheafRidge"])
both_heads = pytest.mark.parametrize("strategy", [similar_head, ridge_head], ids=["Kin's head", "SheafRidge's head"])
all_choices = pytest.mark.parametrize(
    "strategy",
    [kin, ridge, similar_head, ridge_head, kin_temperature],
    ids=["Kin", "SheafRidge", "Kin's head", "SheafRidge's head", "Kin's temperature"],
)


class WatchTrials(Callback):
    """Keeps what was tried, how it scored and what was chosen."""

    def __init__(self) -> None:
        self.rounds, self.models = [], []

    def on_round_start(self, trainer) -> None:
        self.rounds.append([])

    def on_send(self, trainer, stage, payload) -> None:
        if stage.name.startswith("try "):
            self.models.append({name: tensor.clone() for name, tensor in payload.extras.items()})

    def on_upload(self, trainer, stage, payload):
        if stage.name.startswith("try "):
            self.rounds[-1].append((stage.name, payload.extras["validation_score"].sum(dim=0)))
        return payload


def choose(trials: Trials, scores: dict[str, float], clients=(0, 1)) -> bool:
    """Update all trials; what is not named scores 0."""
    done = False
    for stage in trials.stages(trials.every * 2 - 1):
        score_C2 = torch.tensor([[scores.get(stage.name, 0.0), 1.0]]).expand(len(clients), -1)
        done = trials.ingest(stage, Payload(clients=clients, extras={"validation_score": score_C2}))
    return done


def test_the_neighbors_are_one_step_of_one_setting_away() -> None:
    trials = Trials({"share": SHARES, "moved": ON_OFF}, {"share": 0.25, "moved": 0.0}, 3)

    assert [round_idx for round_idx in range(9) if trials.are_due(round_idx)] == [2, 5, 8]
    assert list(trials.candidates()) == [
        "try share=0.25 moved=0",
        "try share=0 moved=0",
        "try share=0.5 moved=0",
        "try share=0.25 moved=1",
    ]
    assert not trials.stages(0) + trials.stages(3)
    assert not Trials({"share": SHARES}, {"share": 0.3}, None).stages(1)


def test_the_best_neighbor_is_the_choice_and_the_present_one_if_level() -> None:
    trials = Trials({"share": SHARES, "moved": ON_OFF}, {"share": 0.25, "moved": 0.0}, 2)

    assert choose(trials, {})
    assert trials.choice == {"share": 0.25, "moved": 0.0}
    assert choose(trials, {"try share=0.5 moved=0": 0.5, "try share=0.25 moved=1": 0.25})
    assert trials.choice == {"share": 0.5, "moved": 0.0}
    restored = Trials({"share": SHARES, "moved": ON_OFF}, {"share": 0.25, "moved": 0.0}, 2)
    restored.load_state_dict(trials.state_dict())
    assert restored.candidates() == trials.candidates()


def test_only_clients_that_responded_every_trial_count() -> None:
    trials = Trials({"share": (0.0, 1.0)}, {"share": 0.0}, 1)
    scores = {"try share=0": [[0.0, 1.0], [9.0, 1.0]], "try share=1": [[1.0, 1.0]]}
    for name, score in scores.items():
        clients = tuple(range(len(score)))
        trials.ingest(Stage(name=name), Payload(clients=clients, extras={"validation_score": torch.tensor(score)}))

    assert trials.choice == {"share": 1.0}


def test_a_client_finds_a_trial_whatever_its_own_choice() -> None:
    strategy = kin(validate_every=2)
    strategy.trials = Trials({"share": SHARES}, {"share": 0.0}, 2)
    address = StageAddress(phase="round", round_idx=1, name="try share=1")

    assert list(strategy.stage(address).client_outputs) == ["validation_score"]
    strategy.trials = Trials({"share": SHARES}, {"share": 0.0}, None)
    strategy.shared = ()
    with pytest.raises(ValueError, match="no stage"):
        strategy.stage(address)


@both_families
@both_executors
def test_the_validation_examples_choose(strategy, executor, federation, make_model, make_trainer) -> None:
    watch = WatchTrials()
    trainer = make_trainer(executor=executor(), num_rounds=6, callbacks=watch)
    trainer.fit(make_model(), federation, built := strategy(validate_every=2))

    assert [bool(tried) for tried in watch.rounds] == [False, True] * 3
    best, _ = max(watch.rounds[-1], key=lambda tried: float(tried[1][0] / tried[1][1]))
    assert built.trials.choice in [dict(built.trials.candidates()[best])]
    num_val = sum(int(client.val_mask_N.sum()) for client in federation.clients)
    assert all(int(score[1]) == num_val for _, score in watch.rounds[-1])
    first, *others = watch.models[-len(watch.rounds[-1]) :]
    assert any(not torch.equal(first[name], tensor) for other in others for name, tensor in other.items())
    assert {f"server/{name}" for name in built.trials.choice} <= trainer.run.history[-1].keys()


@both_heads
@both_executors
def test_whose_the_head_is_is_chosen_too(strategy, executor, federation, make_model, make_trainer) -> None:
    watch = WatchTrials()
    trainer = make_trainer(executor=executor(), num_rounds=2, callbacks=watch)
    trainer.fit(make_model(), federation, built := strategy(validate_every=2, masked_averaging=True))

    trained = trainer.run.executor.state().parameters
    heads = [name for name in trained if name.startswith("head.")]
    tried = dict(zip([name for name, _ in watch.rounds[-1]], watch.models, strict=True))
    assert {name[-1] for name in tried} == {"0", "1"}
    for name, model in tried.items():
        own = [torch.allclose(model[parameter], trained[parameter], atol=1e-6) for parameter in trained]
        assert own == [name.endswith("personal=1") and parameter in heads for parameter in trained]
    assert trainer.run.history[-1]["server/personal"] == built.trials.choice["personal"]


@both_heads
def test_who_has_not_trained_is_given_a_head(strategy, federation, make_model, make_trainer) -> None:
    held_out = Participation(held_out_fraction=0.2)
    trainer = make_trainer(num_rounds=3, participation=held_out)
    trainer.fit(make_model(), federation, built := strategy(validate_every=5))

    (unseen_client,) = set(range(5)) - set(built.federation.training_clients)
    models = built.model_for(range(5)).parameters["head.weight"]
    assert built.trials.choice["personal"] == 1.0
    assert not torch.equal(models[unseen_client], built.federation.parameters["head.weight"])
    assert all(
        not torch.equal(models[unseen_client], other) for client, other in enumerate(models) if client != unseen_client
    )


@both_heads
def test_an_unseen_client_keeps_the_head_that_it_has_trained(strategy, federation, make_model, make_trainer) -> None:
    heads = []

    class Look(Callback):
        def on_evaluate(self, trainer, metrics, prefix) -> None:
            if prefix == "unseen/":
                (unseen_client,) = trainer.run.unseen_clients
                models = built.model_for(range(5)).parameters
                trained = {name: part[unseen_client] for name, part in trainer.run.executor.state().parameters.items()}
                heads.append(torch.allclose(models["head.weight"][unseen_client], trained["head.weight"], atol=1e-6))
                heads.append(torch.allclose(models["head.bias"][unseen_client], trained["head.bias"], atol=1e-6))
                heads.append(
                    torch.allclose(models["convs.1.weight"][unseen_client], trained["convs.1.weight"], atol=1e-3)
                )

    built = strategy(validate_every=5)
    held_out = Participation(held_out_fraction=0.2)
    make_trainer(num_rounds=3, participation=held_out, callbacks=Look()).fit(make_model(), federation, built)

    assert heads == [True, True, False]


@all_choices
def test_the_result_is_the_model_of_the_choice(strategy, federation, make_model, make_trainer) -> None:
    watch = WatchTrials()
    trainer = make_trainer(num_rounds=2, callbacks=watch)
    trainer.fit(make_model(), federation, strategy(validate_every=2))

    best = max(score[0] / score[1] for _, score in watch.rounds[-1])
    scores = trainer.run.scores[""].extras["val/acc"].sum(dim=0)
    assert float(scores[0] / scores[1]) == pytest.approx(float(best))


@both_families
def test_without_trials_nothing_changes(strategy, federation, make_model, make_trainer, assert_same) -> None:
    """A run in which no trial is due is the run without trials, bit for bit."""
    plain = make_trainer(num_rounds=3).fit(make_model(), federation, strategy())
    actual = make_trainer(num_rounds=3).fit(make_model(), federation, built := strategy(validate_every=5))

    assert_same({name: value for name, value in actual.items() if name[7:] not in built.trials.choice}, plain)


@all_choices
def test_test_labels_choose_nothing(strategy, graphs, given_clients, make_model, make_trainer) -> None:
    chosen = []
    for shift in (0, 1):
        clients = [
            dataclasses.replace(graph, y_N=torch.where(graph.test_mask_N, (graph.y_N + shift) % 3, graph.y_N))
            for graph in graphs
        ]
        watch = WatchTrials()
        make_trainer(num_rounds=4, callbacks=watch).fit(
            make_model(), given_clients(clients), built := strategy(validate_every=2)
        )
        chosen.append((built.trials.choice, str(watch.rounds)))

    assert chosen[0] == chosen[1]


@all_choices
def test_a_resumed_run_goes_on_with_the_choice(
    strategy, federation, make_model, make_trainer, tmp_path, assert_same
) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5, held_out_fraction=0.2)
    trainer = make_trainer(num_rounds=6, callbacks=SavesAfter(3, tmp_path / "three.ckpt"), participation=busy, seed=1)
    whole = trainer.fit(make_model(), federation, strategy(validate_every=2))
    resumed = make_trainer(num_rounds=6, participation=busy, seed=1)
    actual = resumed.fit(make_model(), federation, strategy(validate_every=2), ckpt_path=str(tmp_path / "three.ckpt"))

    assert_same(actual, whole)
    for name in ("strategy", "clients"):
        assert_same(resumed.state_dict()[name], trainer.state_dict()[name])


def test_clients_without_validation_examples_are_reported(graphs, given_clients, make_model, make_trainer) -> None:
    clients = [dataclasses.replace(graph, val_mask_N=torch.zeros_like(graph.val_mask_N)) for graph in graphs]
    with pytest.raises(ValueError, match=r"no client has any: .* strategy\.validate_every to null"):
        make_trainer(num_rounds=2).fit(make_model(), given_clients(clients), kin(validate_every=2))


class LastAlone(Participation):
    """All clients in every round but the fourth, in which the last one is alone."""

    def draw(self, clients, round_idx, seed):
        return dict.fromkeys(clients[-1:] if round_idx == 3 else clients, 1.0), []


class WatchChoices(WatchTrials):
    """Keeps the choice after each round, too."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = []

    def on_round_end(self, trainer, metrics) -> None:
        self.choices.append(dict(trainer.run.strategy.trials.choice))


@both_families
def test_a_round_without_validation_examples_chooses_nothing(
    strategy, graphs, given_clients, make_model, make_trainer
) -> None:
    last = dataclasses.replace(graphs[-1], val_mask_N=torch.zeros_like(graphs[-1].val_mask_N))
    watch = WatchChoices()
    trainer = make_trainer(num_rounds=6, participation=LastAlone(), callbacks=watch)
    trainer.fit(make_model(), given_clients([*graphs[:-1], last]), strategy(validate_every=2))
    assert watch.choices[3] == watch.choices[2]
    assert [len(trials) > 0 for trials in watch.rounds] == [False, True, False, True, False, True]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: kin(validate_every=0), "validate_every must be at least 1"),
        (lambda: Kin(common_share=1.5), r"strategy\.common_share must be in \[0, 1\], got 1\.5"),
        (lambda: Kin(common_share=None, aggregation=NormClipping()), r"null, which estimates .* ranks whole clients"),
        (lambda: Kin(validate_every=2, common_share=None), "common_share is null: give common_share a number"),
        (lambda: kin(validate_every=2, aggregation=NormClipping()), r"strategy\.aggregation is set"),
        (lambda: kin(validate_personal=["head.*"]), r"no trials to choose from them: set strategy\.validate_every"),
        (lambda: ridge(validate_personal=["head.*"]), r"no trials to choose from them: set strategy\.validate_every"),
        (
            lambda: FedAux(personalized=False, validate_every=2, validate_personal=["head.*"]),
            r"needs strategy\.personalized",
        ),
        (lambda: kin(validate_similarity_temperature=[5.0]), r"or fix it by strategy\.similarity_temperature"),
        (
            lambda: FedAux(personalized=False, validate_every=2, validate_similarity_temperature=[5.0]),
            r"validate_similarity_temperature needs strategy\.personalized",
        ),
        (lambda: kin_temperature(validate_every=2, validate_similarity_temperature=[5.0, 1.0]), "must rise .* got .5"),
        (
            lambda: kin_temperature(validate_every=2, validate_similarity_temperature=[-1.0, 5.0]),
            "must rise .* got .-1",
        ),
    ],
)
def test_senseless_settings_are_refused(strategy, message) -> None:
    with pytest.raises(ValueError, match=message):
        strategy()


def test_a_start_off_the_grid_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"common_share is 0\.3, .* it must be 0\.0, 0\.25"):
        make_trainer().fit(make_model(), federation, Kin(common_share=0.3, validate_every=2))
    with pytest.raises(ValueError, match=r"similarity_temperature is 4\.0, .* it must be 1\.0, 5\.0, 50\.0"):
        make_trainer().fit(make_model(), federation, kin_temperature(similarity_temperature=4.0, validate_every=2))


def test_temperatures_are_tried(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=2, callbacks=(watch := WatchTrials()))
    trainer.fit(make_model(), federation, built := kin_temperature(validate_every=2))

    tried = {name.rpartition("similarity_temperature=")[2] for name, _ in watch.rounds[-1]}
    assert tried == {"1", "5", "50"}
    with built.trials.supposing({**built.trials.choice, "similarity_temperature": 0.0}):
        assert built.weights(torch.eye(4)).unique().tolist() == [0.25]
    with built.trials.supposing({**built.trials.choice, "similarity_temperature": 1e4}):
        assert torch.equal(built.weights(torch.eye(4)), torch.eye(4))


@both_heads
def test_a_pattern_that_matches_nothing_is_refused(strategy, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"pattern 'tail\.\*' matches none"):
        make_trainer().fit(make_model(), federation, strategy(validate_every=2, validate_personal=["tail.*"]))


def test_one_common_model_tries_what_has_moved(federation, make_model, make_trainer) -> None:
    strategy = FedAux(personalized=False, validate_every=2)
    make_trainer(num_rounds=2).fit(
        FedAuxClient(net=functools.partial(ProjectionGCN, hidden_channels=4)), federation, strategy
    )

    assert list(strategy.trials.grids) == ["masked_averaging"]
