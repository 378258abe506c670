"""Resumes with other settings."""

import functools

import pytest
import torch

from fl_lightning import ClientModule, Participation
from fl_lightning.callbacks import SignFlip
from fl_lightning.models import GCN
from fl_lightning.relations.topology import Ring, Star
from fl_lightning.run import checkpoint
from fl_lightning.run.settings import differences, of_config, of_objects
from fl_lightning.strategies import DPSGD, FedAvg, FedProx

CONFIG = """
seed_everything: 0
ckpt_path: null
trainer:
  num_rounds: 10
  accelerator: cpu
  monitor: null
  callbacks:
  - class_path: fl_lightning.callbacks.EarlyStopping
    init_args: {patience: 3}
strategy:
  class_path: fl_lightning.strategies.FedProx
  init_args: {mu: 0.1, num_epochs: 3}
model:
  init_args:
    net: {class_path: fl_lightning.models.GCN, init_args: {dropout: 0.5}}
data:
  root: null
  batch_size: 8
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_rounds: 10", "num_rounds: 20"),
        ("accelerator: cpu", "accelerator: gpu"),
        ("patience: 3", "patience: 9"),
        ("root: null", "root: /elsewhere"),
        ("ckpt_path: null", "ckpt_path: last"),
        ("accelerator: cpu", "evaluate_union: true"),
        ("  init_args:\n    net:", "  init_args:\n    metrics: [f1, ece]\n    net:"),
    ],
)
def test_what_leaves_the_mathematics_alone_is_no_difference(old: str, new: str) -> None:
    assert old in CONFIG
    assert differences(of_config(CONFIG), of_config(CONFIG.replace(old, new))) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("num_rounds: 10", "num_rounds: 5", "trainer.num_rounds: 10 then, 5 now"),
        ("monitor: null", "monitor: val/loss", "trainer.monitor: None then, val/loss now"),
        ("mu: 0.1", "mu: 1.0", "strategy.init_args.mu: 0.1 then, 1.0 now"),
        ("dropout: 0.5", "dropout: 0", "model.init_args.net.init_args.dropout: 0.5 then, 0 now"),
        ("batch_size: 8", "batch_size: null", "data.batch_size: 8 then, None now"),
        ("callbacks.EarlyStopping", "callbacks.SignFlip", "trainer.callbacks"),
        ("callbacks.EarlyStopping", "somewhere.Unknown", "trainer.callbacks"),
    ],
)
def test_what_changes_the_mathematics_is_named(old: str, new: str, expected: str) -> None:
    actual = differences(of_config(CONFIG), of_config(CONFIG.replace(old, new)))
    assert actual
    assert all(line.startswith(expected) for line in actual)


def test_objects_tell_what_they_were_made_with() -> None:
    def described(strategy, **settings):
        return of_objects(strategy=strategy, participation=Participation(**settings))

    assert differences(described(FedProx()), described(FedProx())) == []
    assert differences(described(FedAvg(num_epochs=3)), described(FedAvg(num_epochs=4))) == [
        "strategy.num_epochs: 3 then, 4 now"
    ]
    assert differences(described(FedAvg(), fraction=0.5), described(FedAvg())) == [
        "participation.fraction: 0.5 then, 1.0 now"
    ]
    assert (
        "strategy.topology.class"
        in differences(described(DPSGD(topology=Ring())), described(DPSGD(topology=Star())))[0]
    )


def test_anything_can_be_described_and_stored(tmp_path) -> None:
    class Odd:
        __slots__ = ()

    odd = [Odd(), torch.zeros(3), functools.partial(Ring), len, {"a": {1, 2}}, lambda: 0]
    torch.save(of_objects(odd=odd), tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == of_objects(odd=odd)


@pytest.fixture
def path(tmp_path, federation, make_model, make_trainer):
    trainer = make_trainer(num_rounds=1)
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    path = tmp_path / "federation/version_0/checkpoints/last.ckpt"
    trainer.save_checkpoint(path)
    return path


def test_a_resume_from_python_compares_what_it_can(path, federation, make_model, make_trainer) -> None:
    def resume(num_epochs: int, taken: bool):
        trainer = make_trainer(num_rounds=2)
        trainer.fit(make_model(), federation, FedAvg(num_epochs=num_epochs), str(path), resume_with_changes=taken)
        return trainer

    with pytest.raises(
        ValueError, match=r"made with other settings; strategy\.num_epochs: 1 then, 2 now\. Use the conf"
    ):
        resume(2, taken=False)
    with pytest.warns(UserWarning, match=r"resumed with other settings; strategy\.num_epochs: 1 then, 2 now"):
        trainer = resume(2, taken=True)
    longer = "from round 1 on: trainer.num_rounds: 1 then, 2 now"
    assert trainer.run.changes == [longer, "from round 1 on: strategy.num_epochs: 1 then, 2 now"]
    assert len(trainer.run.history) == 2
    assert resume(1, taken=True).run.changes == [longer]
    make_trainer().test(make_model(), federation, FedAvg(num_epochs=7), str(path))  # the state is what counts


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": functools.partial(torch.optim.SGD, lr=5.0)}, r"model\.optimizer\.lr: 0\.1 then, 5\.0 now"),
        ({"optimizer": torch.optim.Adam}, r"model\.optimizer\.class: SGD then"),
        ({"gradient_clip_val": 0.5}, r"model\.gradient_clip_val: None then, 0\.5 now"),
        (
            {"net": functools.partial(GCN, hidden_channels=8, dropout=0.9)},
            r"model\.net\.0\.dropout: 0\.0 then, 0\.9 now",
        ),
    ],
    ids=["learning rate", "optimizer", "clipping", "dropout"],
)
def test_a_resume_from_python_compares_the_clients(settings, expected, tmp_path, federation, make_trainer) -> None:
    before = {
        "net": functools.partial(GCN, hidden_channels=8, dropout=0.0),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    }
    trainer, path = make_trainer(num_rounds=1), tmp_path / "a.ckpt"
    trainer.fit(ClientModule(**before), federation, FedAvg(num_epochs=1))
    trainer.save_checkpoint(path)
    with pytest.raises(ValueError, match=f"made with other settings; {expected}"):
        make_trainer(num_rounds=2).fit(ClientModule(**before | settings), federation, FedAvg(num_epochs=1), str(path))
    content = checkpoint.read(path)
    later_parts = ("model", "data", "trainer.callbacks")
    content["settings"] = {name: value for name, value in content["settings"].items() if name not in later_parts}
    checkpoint.write(path, content)  # as older versions wrote it
    later = make_trainer(num_rounds=2, callbacks=SignFlip(clients=[1]))
    later.fit(ClientModule(**before | settings), federation, FedAvg(num_epochs=1), str(path))
    assert len(later.run.history) == 2


def test_a_setting_that_another_version_lacks_has_its_default() -> None:
    """A checkpoint could not be resumed with the same configuration after a setting had been added."""
    whole = """
trainer: {num_rounds: 10, evaluate_union: false, evaluate_every: 1}
strategy: {class_path: fl_lightning.strategies.FedProx, init_args: {num_epochs: 3, personal: [], mu: 0.1}}
model: {class_path: fl_lightning.ClientModule, init_args: {lr_scheduler: null, running_statistics: personal}}
data: {drop_last: false, seed: 0, batch_size: null}
"""
    older = """
trainer: {num_rounds: 10}
strategy: {class_path: fl_lightning.strategies.FedProx, init_args: {num_epochs: 3, mu: 0.1}}
model: {class_path: fl_lightning.ClientModule}
data: {seed: 0}
"""
    for then, now in ((older, whole), (whole, older)):
        assert differences(of_config(then), of_config(now)) == []
    changed = whole.replace("lr_scheduler: null", "lr_scheduler: StepLR").replace("drop_last: false", "drop_last: true")
    assert differences(of_config(older), of_config(changed)) == [
        "model.init_args.lr_scheduler: not set then, StepLR now",
        "data.drop_last: not set then, True now",
    ]
    assert differences({"x": 1}, {"x": 1, "model.other": None}) == ["model.other: not set then, None now"]


def test_so_has_a_setting_of_an_object_that_another_version_lacks() -> None:
    now = of_objects(strategy=FedAvg(num_epochs=2), participation=Participation())
    older = {"strategy": {"class": "FedAvg", "num_epochs": 2}, "participation": {"class": "Participation"}}
    assert differences(older, now) == []
    assert differences(older, of_objects(strategy=FedAvg(num_epochs=2), participation=Participation(fraction=0.5))) == [
        "participation.fraction: not set then, 0.5 now"
    ]
