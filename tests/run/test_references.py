"""``trainer.references``: Local and Pooled with a run's settings, trained once."""

import functools
import json

import pytest
from torch.optim import Adam

import fl_lightning.run.references
from fl_lightning import ClientModule, report
from fl_lightning.models import GCN
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.remote.job_schema import job_of
from fl_lightning.report.folder import read
from fl_lightning.strategies import FedAvg, FedProto, Local, Pooled
from fl_lightning.testing.federations import small_graphs


def client(**settings) -> ClientModule:
    return ClientModule(functools.partial(GCN, hidden_channels=8), functools.partial(Adam, lr=0.05), **settings)


@pytest.fixture
def data(tmp_path):
    return small_graphs(tmp_path / "cache")


@pytest.fixture
def fits(monkeypatch):
    """The strategies that were trained."""
    trained = []
    fit = fl_lightning.FederatedTrainer.fit

    def counted(self, client=None, data=None, strategy=None, **settings):
        trained.append(type(strategy).__name__)
        return fit(self, client, data, strategy, **settings)

    monkeypatch.setattr(fl_lightning.FederatedTrainer, "fit", counted)
    return trained


def test_references_are_what_their_strategies_come_to(data, make_trainer, fits) -> None:
    settings = {"num_rounds": 2, "seed": 3}
    trainer = make_trainer(references=["local", "pooled"], **settings)
    result = trainer.fit(client(), data, FedAvg(num_epochs=2))
    assert fits == ["FedAvg", "Local", "Pooled"]
    references = trainer.run.references
    for strategy in (Local(num_epochs=2), Pooled(num_epochs=2)):
        assert make_trainer(**settings).fit(client(), data, strategy) == references[type(strategy).__name__]
    assert result == make_trainer(**settings).fit(client(), data, FedAvg(num_epochs=2))  # nothing of theirs is in it
    kept = json.loads((trainer.run.folder / "result.json").read_text())["references"]
    assert kept["Pooled"]["test/acc"] == references["Pooled"]["test/acc"]


@pytest.mark.full
def test_they_are_trained_once_for_data_and_settings(data, make_trainer, fits, tmp_path) -> None:
    def references(num_rounds=1, made=client, strategy=FedAvg, **settings):
        fits.clear()
        trainer = make_trainer(references=["local"], num_rounds=num_rounds, **settings)
        trainer.fit(made(), data, strategy())
        return fits[1:], trainer.run.references["Local"]

    first, metrics = references()
    assert (first, references()) == (["Local"], ([], metrics))
    assert references(strategy=FedProto) == ([], metrics)
    for other in (
        {"num_rounds": 2},
        {"made": lambda: ClientModule(functools.partial(GCN, hidden_channels=9))},
        {"strategy": functools.partial(FedAvg, num_epochs=1)},
    ):
        assert references(**other)[0] == ["Local"], other
    for path in (tmp_path / "cache" / "references").rglob("result.json"):
        path.write_text(path.read_text()[:40])
    assert references() == (["Local"], metrics)  # damaged ones are trained again


def test_what_nobody_knows_is_not_kept(data, make_trainer, fits) -> None:
    for _ in range(2):
        own = ClientModule(lambda num_features, num_outputs: GCN(num_features, num_outputs, hidden_channels=8))
        make_trainer(references=["pooled"], num_rounds=1).fit(own, data, FedAvg())
    assert fits == ["FedAvg", "Pooled"] * 2


@pytest.mark.full
def test_a_run_shows_its_references(data, make_trainer, capsys) -> None:
    trainer = make_trainer(references=["local", "pooled"], num_rounds=3, default_callbacks=True, logger=True)
    trainer.fit(client(), data, FedAvg())
    shown = capsys.readouterr().out
    page = (trainer.run.folder / "report.html").read_text()
    for name in ("Local", "Pooled"):
        value = f"{trainer.run.references[name]['test/acc']:.4f}"
        assert f"{name}" in shown
        assert value in shown
        assert f"{name}, test" in page
    compared = report.compare([trainer.run.folder]).document().html()
    assert "Pooled (reference)" in compared


def test_a_model_that_only_the_run_has_is_not_asked_of_them(data, make_trainer) -> None:
    trainer = make_trainer(references=["local"], num_rounds=1, monitor="trained/val/acc")
    trainer.fit(client(), data, FedAvg())
    assert trainer.run.references["Local"]["best_round"] == 0
    assert read(trainer.run.folder).reference("trained/test/acc")["Local"] >= 0


def test_wrong_ones_are_refused(data, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"trainer.references holds 'oracle': give local, pooled, or both"):
        make_trainer(references=["oracle"])
    with pytest.raises(ValueError, match="give each once"):
        make_trainer(references=["local", "local"])
    with pytest.raises(
        ValueError, match=r"trainer.references is \['local'\], but the clients' data are at their sites"
    ):
        federate(make_trainer(references=["local"]), LoopbackChannel([]), FedAvg())
    with pytest.raises(ValueError, match=r"trainer.references is \['pooled'\], but"):
        job_of({"strategy": "FedAvg", "trainer": {"references": ["pooled"]}}, name="wards", sites=["a", "b"])
