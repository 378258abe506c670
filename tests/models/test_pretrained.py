"""A net starts from the weights in a file."""

import functools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fl_lightning as fl
from fl_lightning.command_line import main
from fl_lightning.models import GCN, Pretrained
from fl_lightning.strategies import FedAvg, FedSheafHN, SheafRidge

ROOT = Path(__file__).parents[2]


@pytest.fixture
def weights(tmp_path) -> Path:
    torch.manual_seed(5)
    torch.save(GCN(6, 3, hidden_channels=8).state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def start_of(trainer: Any, client: Any, data: Any, strategy: Any) -> dict[str, torch.Tensor]:
    """What the first client is sent first."""
    seen: dict[str, torch.Tensor] = {}

    class Watch(fl.Callback):
        def on_send(self, trainer: Any, stage: Any, payload: Any) -> None:
            if payload is not None and not seen:
                seen.update({name: value[0].clone() for name, value in payload.parameters.items()})

    trainer.callbacks.append(Watch())
    trainer.fit(client, data, strategy)
    return seen


def test_clients_start_from_the_file(weights, federation, make_trainer) -> None:
    net = functools.partial(Pretrained, net=functools.partial(GCN, hidden_channels=8), file=str(weights))
    start = start_of(make_trainer(num_rounds=1), fl.ClientModule(net), federation, FedAvg(num_epochs=1))
    expected = torch.load(weights)
    assert set(start) == set(expected)
    for name, value in start.items():
        assert torch.equal(value, expected[name])


def test_what_fits_is_taken_if_asked(weights) -> None:
    five = functools.partial(GCN, hidden_channels=8)
    with pytest.raises(ValueError, match=r"does not fit GCN: head.weight is \(3, 8\), in the net \(5, 8\).*take the 4"):
        Pretrained(6, 5, five, str(weights))
    net = Pretrained(6, 5, five, str(weights), partly=True)
    saved = torch.load(weights)
    assert isinstance(net, GCN)
    assert torch.equal(net.state_dict()["convs.0.weight"], saved["convs.0.weight"])
    assert net.state_dict()["head.weight"].shape == (5, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "is no state_dict: write one with torch.save"),
        ({"weight": torch.ones(2)}, "it lacks convs.0.weight; .*the net has no weight; give the net that it is of"),
        ({"convs.0.weight": torch.full((6, 8), torch.nan)}, "convs.0.weight is not finite"),
        (None, "is damaged, or no state_dict that loads with weights_only=True"),
    ],
)
def test_files_that_do_not_fit_are_named(content, message, tmp_path) -> None:
    torch.save(content, tmp_path / "w.pt")
    if content is None:
        (tmp_path / "w.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match=message):
        Pretrained(6, 3, functools.partial(GCN, hidden_channels=8), str(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match=r"file: there is no .*none.pt"):
        Pretrained(6, 3, GCN, str(tmp_path / "none.pt"))


def test_a_method_with_a_start_of_its_own_says_so(weights, federation, make_trainer) -> None:
    net = functools.partial(Pretrained, net=functools.partial(GCN, hidden_channels=8), file=str(weights))
    with pytest.raises(ValueError, match=r"model\.net is Pretrained, but FedSheafHN generates parameters from a start"):
        make_trainer(num_rounds=1).fit(fl.ClientModule(net), federation, FedSheafHN(num_neighbors=2))
    with pytest.warns(UserWarning, match=r"model\.net is a net with weights, but FedSheafHN generates parameters"):
        make_trainer(num_rounds=1).fit(fl.ClientModule(GCN(6, 3)), federation, FedSheafHN(num_neighbors=2))
    start = start_of(make_trainer(num_rounds=1), fl.ClientModule(net), federation, SheafRidge(num_neighbors=2))
    assert torch.allclose(start["convs.0.weight"], torch.load(weights)["convs.0.weight"], atol=1e-6)


def test_modules_of_pytorch(tmp_path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    torch.save(net.state_dict(), tmp_path / "w.pt")

    def build(in_channels: int, out_channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(in_channels, 3), nn.ReLU(), nn.Linear(3, out_channels))

    x = torch.rand(20, 4)
    data = fl.FederatedDataModule([(x, torch.arange(20) % 2)] * 2)
    client = fl.ClientModule(functools.partial(Pretrained, net=build, file=str(tmp_path / "w.pt")))
    trainer = fl.FederatedTrainer(num_rounds=1, default_callbacks=False, logger=False, default_root_dir=str(tmp_path))
    start = start_of(trainer, client, data, FedAvg(num_epochs=1))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in start.items())
    assert len(start) == 4


def test_the_file_of_a_net_with_batch_norm_fits_it(tmp_path) -> None:
    def build(in_channels: int, out_channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(in_channels, 3), nn.BatchNorm1d(3), nn.Linear(3, out_channels))

    net = build(4, 2)
    net(torch.rand(8, 4))
    torch.save(net.state_dict(), tmp_path / "w.pt")
    state = Pretrained(4, 2, build, str(tmp_path / "w.pt")).state_dict()
    assert set(state) == set(net.state_dict()) - {"1.num_batches_tracked"}
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in state.items())
    with pytest.raises(ValueError, match=r"does not fit Sequential: 2\.weight"):
        Pretrained(4, 5, build, str(tmp_path / "w.pt"))


def test_a_reference_is_not_taken_from_other_weights(weights, federation, make_trainer, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    net = functools.partial(Pretrained, net=functools.partial(GCN, hidden_channels=8), file=str(weights))
    client = fl.ClientModule(net, optimizer=functools.partial(torch.optim.SGD, lr=1e-9))
    losses = []
    for scale in (1.0, 30.0):
        torch.save({name: scale * value for name, value in torch.load(weights).items()}, weights)
        trainer = make_trainer(num_rounds=1, references=["local"])
        trainer.fit(client, federation, FedAvg(num_epochs=1))
        losses.append(trainer.run.references["Local"]["train/loss"])
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_command_line(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    config = ["--config", str(ROOT / "configs/quickstart.yaml"), "--data.source.init_args.num_nodes=240"]
    assert main(["fit", *config, "--strategy=FedAvg", "--trainer.num_rounds=1"]) == 0
    assert main(["export", "runs/quickstart/version_0", "--global", "--to", "model.pt"]) == 0
    net = ["--model.net=Pretrained", "--model.net.net=fl_lightning.models.GCN", "--model.net.net.hidden_channels=64"]
    words = [*config, "--strategy=FedPer", "--trainer.num_rounds=1", *net, "--model.net.file=model.pt"]
    assert main(["fit", *words]) == 0
    assert main(["export", "runs/quickstart/version_1", "--client", "client-00", "--to", "tuned.pt"]) == 0
    loaded = runpy.run_path("load_tuned.py")["load"]()
    assert loaded is not None
