"""What leaves a run scores what the run reported, or is refused by name."""

import copy
import functools
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from task_data import Clouds, graph_data
from torch import nn
from torch_geometric.nn import GraphSAGE
from trained_runs import loaded

import fl_lightning as fl
from fl_lightning import strategies
from fl_lightning.callbacks import FederatedCheckpoint, RunReport
from fl_lightning.command_line import main
from fl_lightning.models import GCN
from fl_lightning.strategies import APFL, FedAvg, FedGNN, FedSheafHN, Local, Strategy
from fl_lightning.trained import GraphModel
from fl_lightning.trained.export import export

ROOT = Path(__file__).parents[2]
KINDS = sorted(
    {
        kind
        for kind in vars(strategies).values()
        if inspect.isclass(kind) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)
FEW = (APFL, FedAvg, FedGNN, FedSheafHN)
TINY = {
    "num_epochs": 2,
    "init_epochs": 1,
    "pretrain_epochs": 1,
    "refine_epochs": 1,
    "num_federated_rounds": 1,
    "num_join_epochs": 1,
    "num_finetune_epochs": 1,
    "num_neighbors": 2,
}
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(make_trainer: Any, data: Any, strategy: Strategy, client: Any, **settings: Any) -> Any:
    """The trainer of a run of two rounds, which has a report and checkpoints."""
    kept = [FederatedCheckpoint(every_seconds=0), RunReport()]
    trainer = make_trainer(num_rounds=2, callbacks=kept, **settings)
    trainer.fit(client, data, strategy)
    return trainer


def fit(*given: Any, **settings: Any) -> Path:
    """The folder of such a run."""
    folder: Path = trained(*given, **settings).run.folder
    return folder


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.__name__, marks=() if kind in FEW else pytest.mark.full) for kind in KINDS],
)
def test_every_client_scores_what_was_reported(kind, federation, make_model, make_trainer) -> None:
    strategy = kind(**{name: value for name, value in TINY.items() if name in inspect.signature(kind).parameters})
    given = copy.deepcopy(strategy), make_model(kind, dropout=0.5)
    trainer = trained(make_trainer, federation, strategy, make_model(kind, dropout=0.5))
    run = fl.load_run(trainer.run.folder, client=given[1], data=federation, strategy=copy.deepcopy(given[0]))
    assert_scores(run, run.recorded.client_values("test/acc"))
    last = trainer.run.scores[""]
    value_C, weight_C = last.extras["test/acc"].unbind(dim=1)
    scored = {federation.registry.names[c]: float(value_C[i] / weight_C[i]) for i, c in enumerate(last.clients)}
    run = fl.load_run(
        trainer.run.folder, checkpoint="last", client=make_model(kind, dropout=0.5), data=federation, strategy=given[0]
    )
    assert run.round_idx == 1
    assert_scores(run, scored)


def assert_scores(run: Any, reported: dict[str, float]) -> None:
    """Predictions and models, unless they are refused, score what was reported for each client."""
    assert len(reported) == 5
    for name, predicted in run.predictions().items():
        data = run.data(name)
        assert accuracy(predicted, data) == pytest.approx(reported[name], abs=1e-5)
        assert len(run.embeddings()[name]) == len(predicted)
        model = client_or_refusal(run, name)
        if not isinstance(model, str):
            with torch.no_grad():
                assert accuracy(model(data.x_NF, data.edge_index_2E), data) == pytest.approx(reported[name], abs=1e-5)
        else:
            assert model.startswith(f"{run.strategy} predicts with")


def client_or_refusal(run: Any, name: str) -> Any:
    try:
        return run.client(name)
    except ValueError as error:
        return str(error)


def accuracy(predicted: torch.Tensor, data: Any) -> float:
    right_N = predicted.argmax(dim=1) == data.y_N[: len(predicted)]  # some strategies add nodes
    return float(right_N[data.test_mask_N[: len(predicted)]].float().mean())


def test_a_file_gives_the_model_back(federation, make_model, make_trainer, tmp_path, monkeypatch) -> None:
    folder = fit(make_trainer, federation, FedAvg(num_epochs=1), fl.ClientModule())
    run = fl.load_run(folder, data=federation, strategy=FedAvg(num_epochs=1))
    export(run, run.names[2], tmp_path / "there" / "model.pt")
    loaded = runpy.run_path(str(tmp_path / "there" / "load_model.py"))["load"]()
    data = run.data(run.names[2])
    assert type(loaded) is GraphModel
    assert torch.equal(loaded(data.x_NF, data.edge_index_2E), run.client(run.names[2])(data.x_NF, data.edge_index_2E))
    assert run.same(run.global_model(), loaded, run.names[2])  # FedAvg has one model
    name = '"""\nimport os; os.mkdir("evil")\n"""\\new\\users'
    monkeypatch.setattr(run, "names", [*run.names, name])
    monkeypatch.setattr(run, "client", lambda _: run.global_model())
    monkeypatch.setattr(run, "same", lambda *_: True)
    made = runpy.run_path(str(export(run, name, tmp_path / "named" / "model.pt")))
    assert made["WHAT"].startswith(name)
    monkeypatch.undo()
    assert not Path("evil").exists()
    with pytest.raises(ValueError, match="there is no training client 'nobody': give one of client"):
        run.client("nobody")
    with pytest.raises(ValueError, match=r"give the name of a file for torch or safetensors.*such as model.pt"):
        export(run, run.names[0], tmp_path / "model.onnx")
    export(run, run.names[2], tmp_path / "other" / "model.safetensors")
    assert run.same(runpy.run_path(str(tmp_path / "other" / "load_model.py"))["load"](), loaded, run.names[2])
    (tmp_path / "load_mine.py").write_text("mine")
    with pytest.raises(ValueError, match=r"load_mine.py, which would load the model, is there already"):
        export(run, run.names[0], tmp_path / "mine.pt")


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("net", [GCN, pyg.GCN], ids=["own", "plain"])
def test_a_model_of_another_precision_comes_back(precision, net, federation, make_trainer, tmp_path) -> None:
    client = fl.ClientModule(functools.partial(net, hidden_channels=8, num_layers=2))
    folder = fit(make_trainer, federation, FedAvg(num_epochs=1), copy.deepcopy(client), precision=precision)
    run = fl.load_run(folder, client=client, data=federation, strategy=FedAvg(num_epochs=1))
    model = runpy.run_path(str(export(run, "client-01", tmp_path / "model.pt")))["load"]()
    trained, data = run.client("client-01"), run.data("client-01")
    assert (
        next(model.parameters()).dtype
        == next(trained.parameters()).dtype
        == {"64-true": torch.float64, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}[precision]
    )
    x = data.x_NF.to(next(model.parameters()).dtype)
    with torch.no_grad():
        assert torch.equal(model(x, data.edge_index_2E), trained(x, data.edge_index_2E))


def test_what_fails_its_check_leaves_what_was_there(federation, make_trainer, tmp_path, monkeypatch) -> None:
    run = loaded(make_trainer, federation)
    export(run, run.names[0], tmp_path / "there" / "model.pt")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    monkeypatch.setattr(run, "same", lambda *_: False)
    with pytest.raises(ValueError, match="it computes something else"):
        export(run, run.names[1], tmp_path / "there" / "model.pt")
    assert set(before) == {"model.pt", "load_model.py"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before


def test_one_file_of_python_loads_one_model(federation, make_trainer, tmp_path) -> None:
    run = loaded(make_trainer, federation, Local)
    loader = export(run, run.names[0], tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"--to .*m.safetensors: .*load_m.py loads m.pt: .*or delete m.pt"):
        export(run, run.names[1], tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
    assert run.same(runpy.run_path(str(loader))["load"](), run.client(run.names[0]), run.names[0])


def test_numbers_of_numpy_and_infinite_ones_are_written(federation, make_trainer, tmp_path) -> None:
    def client() -> fl.ClientModule:
        numbers = {"hidden_channels": np.int64(8), "dropout": np.float64(0.25), "num_layers": 2}
        return fl.ClientModule(net=functools.partial(Bounded, bounds=(-np.inf, np.float32(1)), **numbers))

    folder = fit(make_trainer, federation, FedAvg(num_epochs=1), client())
    run = fl.load_run(folder, client=client(), data=federation, strategy=FedAvg(num_epochs=1))
    loader = export(run, None, tmp_path / "model.pt")
    assert "bounds=(float('-inf'), 1.0), hidden_channels=8, dropout=0.25" in loader.read_text()
    model = runpy.run_path(str(loader))["load"]()
    assert model.net.bounds == (-np.inf, 1)
    assert run.same(model, run.global_model(), run.names[0])


class Bounded(GCN):
    def __init__(self, *args: Any, bounds: tuple[float, float], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.bounds = bounds


def test_edges_may_come_in_any_order_with_loops_and_twice(federation, make_trainer) -> None:
    folder = fit(make_trainer, federation, FedAvg(num_epochs=1), fl.ClientModule())
    run = fl.load_run(folder, data=federation, strategy=FedAvg(num_epochs=1))
    model, data = run.global_model(), run.data(run.names[0])
    edges = data.edge_index_2E
    loops = torch.arange(data.size).expand(2, -1)
    other = torch.cat([edges.flip(1), loops, edges[:, :3]], dim=1)
    assert torch.allclose(model(data.x_NF, other), model(data.x_NF, edges), atol=1e-6)


def test_weights_of_repeated_edges_are_added_as_in_a_clients_graph() -> None:
    model = GraphModel(GCN(3, 2, hidden_channels=4)).eval()
    x, edges = torch.randn(4, 3), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    weights = torch.tensor([0.5, 0.5, 2.0, 2.0])
    twice = model(x, torch.cat([edges, edges], dim=1), torch.cat([0.25 * weights, 0.75 * weights]))
    assert torch.allclose(twice, model(x, edges, weights), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_users_own_class_comes_back(federation, make_trainer, tmp_path) -> None:
    def client() -> fl.ClientModule:
        return fl.ClientModule(net=GraphSAGE(6, 4, 2, 3))

    folder = fit(make_trainer, federation, Local(num_epochs=1), client())
    run = fl.load_run(folder, client=client(), data=federation, strategy=Local(num_epochs=1))
    model = run.client(run.names[0])
    assert type(model) is GraphSAGE
    GraphSAGE(6, 4, 2, 3).load_state_dict(model.state_dict())
    data = run.data(run.names[0])
    assert accuracy(model(data.x_NF, data.edge_index_2E), data) == pytest.approx(
        run.recorded.client_values("test/acc")[run.names[0]], abs=1e-5
    )
    with pytest.raises(ValueError, match="Local left each client a model of its own"):
        run.global_model()
    with pytest.raises(ValueError, match="the net GraphSAGE cannot be made in another program"):
        export(run, run.names[0], tmp_path / "model.pt")  # from an object, whose settings nobody knows


class Bonds(nn.Module):
    """A user's net for whole graphs, whose features are called otherwise."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv = pyg.GATConv(num_features, 8, edge_dim=2)
        self.classifier = nn.Linear(8, num_classes)

    def forward(self, atoms: Any, edge_index: Any, edge_attr: Any, batch: Any) -> torch.Tensor:
        """A row for each graph."""
        pooled = pyg.global_add_pool(self.conv(atoms, edge_index, edge_attr).relu(), batch)
        logits: torch.Tensor = self.classifier(pooled)
        return logits


@pytest.mark.filterwarnings("ignore")
def test_a_users_own_net_for_graphs_comes_back(make_trainer, tmp_path) -> None:
    data = graph_data(batch_size=4, edge_attributes=2, cache_dir=str(tmp_path))
    folder = fit(make_trainer, data, Local(num_epochs=1), fl.ClientModule(net=Bonds))
    run = fl.load_run(folder, client=fl.ClientModule(net=Bonds), data=data, strategy=Local(num_epochs=1))
    name = run.names[0]
    model = run.client(name)
    assert type(model) is Bonds
    union, graph_N = run.data(name).union, run.data(name).graph_of_N
    logits = model(union.x_NF, union.edge_index_2E, union.edge_attr_EK, graph_N)
    assert torch.allclose(logits.softmax(dim=1), run.predictions()[name], atol=1e-6)
    loaded = runpy.run_path(str(export(run, name, tmp_path / "model.pt")))["load"]()
    assert type(loaded) is Bonds
    assert run.same(loaded, model, name)


@pytest.mark.filterwarnings("ignore")
def test_a_users_own_module_for_examples_comes_back(make_trainer) -> None:
    data = fl.FederatedDataModule(Clouds())
    data.setup()
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    folder = fit(make_trainer, data, Local(num_epochs=1), fl.ClientModule(net=net))
    run = fl.load_run(folder, client=fl.ClientModule(net=net), data=data, strategy=Local(num_epochs=1))
    model = run.client("a")
    assert type(model) is nn.Sequential
    own = run.data("a")
    assert accuracy(model(own.x_NX), own) == pytest.approx(run.recorded.client_values("test/acc")["a"], abs=1e-5)


def test_what_keeps_a_model_from_being_everybodys_is_named(make_trainer) -> None:
    data = fl.FederatedDataModule(Clouds())
    data.setup()
    client = fl.ClientModule(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)))
    folder = fit(make_trainer, data, FedAvg(num_epochs=1), client)
    run = fl.load_run(folder, client=client, data=data, strategy=FedAvg(num_epochs=1))
    with pytest.raises(ValueError, match=r"each client its own running statistics .*set to shared, or use client"):
        run.global_model()


def test_a_net_of_the_current_folder_comes_back(tmp_path, monkeypatch, capsys) -> None:
    """Its name is in a configuration, which is in another folder, and in the run's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "net_of_mine.py").write_text(
        "from torch_geometric.nn import GCNConv\n\n\nclass Net(GCNConv):\n"
        "    def __init__(self, num_features, num_classes):\n        super().__init__(num_features, num_classes)\n"
    )
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "mine.yaml").write_text(
        "strategy: FedAvg\nmodel: {net: net_of_mine.Net}\ntrainer: {num_rounds: 2, accelerator: cpu}\n"
        "data: {source: {class_path: PlantedCommunities, init_args: {num_nodes: 90}}, partitioner: GivenPartitioner}\n"
    )
    assert main(["fit", "--config", "settings/mine.yaml"]) == 0
    assert main(["export", "runs/federation/version_0", "--client", "client-00", "--to", "mine.pt"]) == 0
    run = fl.load_run("runs/federation/version_0")
    assert run.same(runpy.run_path("load_mine.py")["load"](), run.client("client-00"), "client-00")
    _comes_back_in_an_interpreter(tmp_path, monkeypatch)


def _comes_back_in_an_interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python searches the current folder as ``''``: the run's folder while its configuration was read."""
    monkeypatch.delitem(sys.modules, "net_of_mine")
    monkeypatch.setattr(sys, "path", ["", *(each for each in sys.path if each != str(folder))])
    before = list(sys.path)
    assert fl.load_run("runs/federation/version_0").names[0] == "client-00"
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "net_of_mine")
    (folder / "net_of_mine.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"cannot be rebuilt: .*net_of_mine.Net' cannot be imported: .*No module"):
        fl.load_run("runs/federation/version_0")


def test_a_rule_stays(federation, make_model, make_trainer, tmp_path) -> None:
    folder = fit(make_trainer, federation, APFL(num_epochs=1), make_model(APFL, dropout=0.5))
    run = fl.load_run(folder, client=make_model(APFL, dropout=0.5), data=federation, strategy=APFL(num_epochs=1))
    with pytest.raises(ValueError, match="APFL computes outputs by a rule of its own"):
        export(run, run.names[0], tmp_path / "model.pt")
    assert not list(tmp_path.glob("*.pt"))


def test_what_is_no_run(tmp_path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        fl.load_run(tmp_path / "none")
    (tmp_path / "metrics.csv").write_text("round\n0\n")
    with pytest.raises(ValueError, match=r"has no checkpoints/best.ckpt: train with the callback FederatedCheckpoint"):
        fl.load_run(tmp_path)
    with pytest.raises(ValueError, match="checkpoint must be 'best' or 'last', got 'first'"):
        fl.load_run(tmp_path, checkpoint="first")


def test_lightnings_way_of_loading_names_ours(tmp_path) -> None:
    torch.save({}, tmp_path / "best.ckpt")
    with pytest.raises(TypeError, match=r"of a whole federation: fl_lightning\.load_run\(folder\)\.client\(name\)"):
        fl.ClientModule.load_from_checkpoint(tmp_path / "best.ckpt")


@pytest.mark.full
def test_a_run_of_the_command_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    small = ["--trainer.num_rounds", "2", "--data.source.init_args.num_nodes", "240"]
    assert main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *small]) == 0
    folder = "runs/quickstart/version_0"
    for checkpoint in ("best", "last"):
        assert main(["export", folder, "--client", "client-03", "--checkpoint", checkpoint]) == 0
        run = fl.load_run(folder, checkpoint=checkpoint)
        loaded = runpy.run_path("load_model.py")["load"]()
        assert run.same(loaded, run.client("client-03"), "client-03")
    assert main(["export", folder, "--client", "nobody"]) == 2
    assert main(["export", folder, "--global"]) == 2
    said = "FedSheafHN left each client a model of its own: use client(name), --client NAME"
    assert said in capsys.readouterr().err
