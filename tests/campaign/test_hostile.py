"""Hostile servers, sites and files: each is told, and what it is next to goes on as if it were not there."""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.damage import damaged
from campaign.record import Record
from run_folders import record as run_record
from run_folders import write_run
from sites import OPEN, make_sites
from strategies.test_contract import tiny
from torch_geometric.data import Data
from wrong_messages import ANY, EVALUATE, RUN, Liar, Wrong, raw

from fl_lightning.data import FileSource, prepare_graph
from fl_lightning.remote import LoopbackChannel, Message, federate
from fl_lightning.report.compare_command import main as compare
from fl_lightning.report.report_command import main as report
from fl_lightning.strategies import FedAvg, FedOpt, FedPer, FedProto, FedProx
from fl_lightning.study.store import Store
from fl_lightning.yaml_input import parse_yaml, yaml

STRATEGIES = (FedAvg, FedProx, FedPer, FedOpt, FedProto)
HOSTILE = "client-01"
Number = int | float | str | bool | None


def tried(record: Record, kind: str, trials: Iterator[tuple[str, bool]]) -> None:
    """Count trials, and name those that were lost."""
    lost = []
    for name, survived in trials:
        record.count(kind, survived=survived)
        lost += [] if survived else [name]
    assert not lost, f"{kind}: {lost}"


# ---------------------------------------------------------------- sites


def anything(draw: random.Random, depth: int = 0) -> Any:
    """A value that JSON holds."""
    simple: list[Number] = [None, True, -1, 0, 10**15, 1e308, -0.5, "", "x" * 200, "\x1b[2J", "../..", "ab" * 32]
    if depth > 3 or draw.random() < 0.7:
        return draw.choice(simple)
    parts = [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    return parts if draw.random() < 0.5 else {str(index): part for index, part in enumerate(parts)}


def mutated(message: Message, draw: random.Random) -> bytes:
    """A message with one of its facts or tensors as another, or some other bytes."""
    about, tensors = dict(message.about), dict(message.tensors)
    kind = draw.randrange(4)
    if kind == 0:
        about[draw.choice([*about, "more"])] = anything(draw)
    elif kind == 1:
        about.pop(draw.choice(list(about)))
    elif kind == 2 and tensors:
        name = draw.choice(list(tensors))
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: torch.cat([t, t]),
            lambda t: t.flatten()[:-1].clone(),
            lambda t: t.to(torch.complex64) if t.is_floating_point() else t.float(),
            lambda t: torch.full_like(t, -(10**6)),
            lambda t: t.double() * float("nan"),
        ]
        tensors[name] = draw.choice(changes)(tensors[name])
    else:
        wire = bytearray(message.wire)
        for _ in range(8):
            wire[draw.randrange(len(wire))] = draw.randrange(256)
        return bytes(wire)
    return raw(json.dumps({"kind": message.kind, "about": about, "names": list(tensors)}), tensors)


def is_harmless(kind: type, question: str, wrong: Wrong, draw: random.Random, **make: Any) -> bool:
    """Whether a federation ends with finite metrics and blames nobody but the hostile site."""
    clients, folder = make["clients"], make["folder"]
    shutil.rmtree(folder, ignore_errors=True)
    sites = make_sites(clients, folder, lambda: (make["model"](kind), tiny(kind)), OPEN)
    channel = LoopbackChannel([sites[0], Liar(sites[1], question, wrong, draw), *sites[2:]])
    trainer, strategy = make["trainer"](num_rounds=2), tiny(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(make["model"](kind), federate(trainer, channel, strategy), strategy)
        except Exception as error:  # which is what the campaign looks for
            if isinstance(error.__cause__, StopIteration):  # the site's update has no tensor to lie with
                raise LookupError from error
            return False
    finite = all(abs(row["val/acc"]) <= 1 for row in trainer.run.history)
    return finite and len(trainer.run.history) == 2 and set(trainer.run.num_failures) <= {HOSTILE}


def hostile_sites(kinds: list[type], number: int, seed: int, make: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for kind in kinds:
        for question, table in (("run", RUN), ("evaluate", EVALUATE)):
            for name, wrong in {**ANY, **table}.items():
                draw = random.Random(f"{seed} {name}")
                usual = name != "a metric is missing" or kind is not FedProto
                if usual and not (kind is FedProto and any(part in name for part in ("p/", "shape", "whole"))):
                    try:
                        yield f"{kind.__name__}, {question}: {name}", is_harmless(kind, question, wrong, draw, **make)
                    except LookupError:
                        continue
            for trial in range(number):
                draw = random.Random(f"{seed} {kind.__name__} {question} {trial}")
                yield f"{kind.__name__}, {question}, {trial}", is_harmless(kind, question, mutated, draw, **make)


@pytest.fixture
def make(graphs: Any, given_clients: Any, make_model: Any, make_trainer: Any, tmp_path: Path) -> dict[str, Any]:
    """What federations are made of."""
    clients = given_clients(graphs[:4]).clients
    return {"clients": clients, "folder": tmp_path / "sites", "model": make_model, "trainer": make_trainer}


def test_hostile_sites(seed: int, record: Record, make: dict[str, Any]) -> None:
    draw = random.Random(seed)
    wrong = [(f"{trial}", question) for trial in range(6) for question in ("run", "evaluate")]
    trials = (
        (f"{trial} {question}", is_harmless(FedAvg, question, mutated, random.Random(draw.random()), **make))
        for trial, question in wrong
    )
    tried(record, "hostile sites", trials)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_many_hostile_sites(seed: int, record: Record, make: dict[str, Any], kind: type) -> None:
    tried(record, "hostile sites", hostile_sites([kind], 60, seed, make))


# ---------------------------------------------------------------- servers


def hostile_servers(number: int, seed: int, make: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Messages that no server sends: the site responds to each, goes on, and keeps its files."""
    sites = make_sites(make["clients"], make["folder"], lambda: (make["model"](), FedAvg(num_epochs=1)), OPEN)
    heard: list[Message] = []

    class Listening(LoopbackChannel):
        def ask(self, messages: Any) -> Any:
            heard.extend(messages.values())
            yield from super().ask(messages)

    trainer, strategy = make["trainer"](num_rounds=2), FedAvg(num_epochs=1)
    trainer.fit(make["model"](), federate(trainer, Listening(sites), strategy), strategy)
    site = sites[0]
    start, right = (next(message for message in heard if message.kind == kind) for kind in ("start", "evaluate"))
    right = Message(kind="evaluate", about={**right.about, "state": site.current, "forget": []}, tensors=right.tensors)
    before = site.respond(right.wire)
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        message = draw.choice([each for each in heard if each.kind != "start" or draw.random() < 0.2])
        try:
            Message.read(site.respond(mutated(message, draw)))
            survived = site.is_started and (
                message.kind == "start" or site.current == Message.read(before).about["state"]
            )
        except Exception:
            survived = False
        if message.kind == "run" or not survived or message.kind == "start":  # it may have been a right message
            site.respond(start.wire)  # of another federation, such as one under secure aggregation
            site.respond(Message(kind="load", about={"state": Message.read(before).about["state"]}).wire)
            survived = survived or message.kind in ("run", "start")
        yield f"{trial}: {message.kind}", survived and site.respond(right.wire) == before


def test_hostile_servers(seed: int, record: Record, make: dict[str, Any]) -> None:
    tried(record, "hostile servers", hostile_servers(40, seed, make))


@pytest.mark.slow
def test_many_hostile_servers(seed: int, record: Record, make: dict[str, Any]) -> None:
    tried(record, "hostile servers", hostile_servers(900, seed + 1, make))


# ---------------------------------------------------------------- files


def site_files(seed: int, make: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    def sites() -> list[Any]:
        return make_sites(make["clients"], make["folder"], lambda: (make["model"](), FedAvg(num_epochs=1)), OPEN)

    trainer, strategy = make["trainer"](num_rounds=2), FedAvg(num_epochs=1)
    trainer.fit(make["model"](), federate(trainer, LoopbackChannel(sites()), strategy), strategy)
    folder = make["folder"] / "client-00"
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path, content in whole.items():
        for index, version in enumerate(damaged(content, seed)):
            if version == content or (path.name.endswith("_key") and len(version) == len(content)):
                continue  # any 32 bytes are a key
            path.write_bytes(version)
            try:
                site = sites()[0]
                response = Message.read(site.respond(Message(kind="load", about={"state": path.stem}).wire))
                survived = response.kind == "failure" or path.suffix != ".state" or path.read_bytes() == content
            except ValueError as error:
                survived = "restore it" in str(error)
            yield f"{path.name}, version {index}", survived
            for other, right in whole.items():
                other.write_bytes(right)


def test_damaged_site_files(seed: int, record: Record, make: dict[str, Any]) -> None:
    tried(record, "damaged files of sites", site_files(seed, make))


def study_results(number: int, seed: int, folder: Path) -> Iterator[tuple[str, bool]]:
    store = Store(folder)
    for index in range(20):
        store.add({"key": str(index), "val": index / 7, "text": "ä" * index}, {"round": [0.0, index]})
    whole = {path: path.read_bytes() for path in (store.runs, store.rounds)}
    runs, rounds = store.records(), store.history()
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        path = draw.choice(list(whole))
        other = bytearray(whole[path])
        index = draw.randrange(len(other))
        if draw.random() < 0.5:
            other[index] ^= 1 << draw.randrange(8)
        else:
            other[index : index + draw.randrange(1, 200)] = draw.randbytes(draw.randrange(100))
        path.write_bytes(other)
        actual, history = store.records(), store.history()
        is_true = all(runs[key] == each for key, each in actual.items())
        is_true &= all(rounds[key] == each for key, each in history.items())
        yield f"{path.name}, trial {trial}", is_true and len(actual) + len(history) >= 20
        path.write_bytes(whole[path])


def test_damaged_study_results(seed: int, record: Record, tmp_path: Path) -> None:
    tried(record, "damaged results of studies", study_results(300, seed, tmp_path))


def reports(seed: int, folder: Path, capsys: Any, every: int) -> Iterator[tuple[str, bool]]:
    run = write_run(folder / "run" / "version_0", run_record=run_record((0.5, 0.6, 0.7)))
    whole = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".csv", ".json", ".yaml")}
    for path, content in whole.items():
        for index, version in enumerate(damaged(content, seed)[::every]):
            path.write_bytes(version)
            codes = [report([str(run)]), compare([str(run), "--output", str(folder / "c.html")])]
            said = capsys.readouterr().err.splitlines()
            yield f"{path.name}, {index}", set(codes) <= {0, 2} and len(said) == codes.count(2)
            path.write_bytes(content)


def test_damaged_runs_in_reports(seed: int, record: Record, tmp_path: Path, capsys: Any) -> None:
    tried(record, "damaged runs in reports", reports(seed, tmp_path, capsys, 12))


@pytest.mark.slow
def test_many_damaged_runs_in_reports(seed: int, record: Record, tmp_path: Path, capsys: Any) -> None:
    tried(record, "damaged runs in reports", reports(seed + 1, tmp_path, capsys, 1))


# ---------------------------------------------------------------- inputs


def yaml_texts(number: int, seed: int) -> Iterator[tuple[str, bool]]:
    parts = [
        "a",
        "&x ",
        "*x",
        "[",
        "]",
        "{",
        "}",
        ": ",
        "- ",
        "\n",
        "  ",
        "<<: ",
        "!!int ",
        "010",
        "1:30",
        "9" * 50,
        '"',
    ]
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        text = "".join(draw.choice(parts) * draw.choice([1, 1, 1, 100]) for _ in range(draw.randrange(1, 40)))
        try:
            parse_yaml(text)
        except yaml.YAMLError:
            pass
        except Exception:
            yield repr(text), False
            continue
        yield repr(text), True


def test_yaml_texts(seed: int, record: Record) -> None:
    tried(record, "YAML texts", yaml_texts(600, seed))


def graphs_of_all_kinds(number: int, seed: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """Loops, double edges, isolated nodes, odd types: prepared without a change of features or labels, or refused."""
    types = [torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float64, torch.bool]
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        nodes, edges = draw.randrange(2, 12), draw.randrange(0, 40)
        labels = [draw.randrange(-1, 4) for _ in range(nodes)]
        ends = [[draw.randrange(nodes) for _ in range(edges)] for _ in range(2)]
        data = Data(
            x=torch.rand(nodes, 3).to(draw.choice(types)),
            edge_index=torch.tensor(ends, dtype=draw.choice([torch.int32, torch.int64, torch.int16])).reshape(2, edges),
            y=torch.tensor(labels).to(draw.choice([torch.int64, torch.int32, torch.float32])),
        )
        data.x.requires_grad_(data.x.is_floating_point() and draw.random() < 0.3)
        torch.save(data, folder / "graph.pt")
        source = FileSource(str(folder / "graph.pt"), undirected=draw.random() < 0.5)
        try:
            actual = prepare_graph(source.load(folder), source.preparation, str(source))
            same = torch.equal(actual.x, data.x.detach().float()) and actual.y.tolist() == labels
            loops = bool((actual.edge_index[0] == actual.edge_index[1]).any())
            double = actual.edge_index.shape[1] != torch.unique(actual.edge_index, dim=1).shape[1]
            survived = same and not loops and not double
        except ValueError as error:
            survived = "graph.pt" in str(error)
        except Exception:
            survived = False
        yield f"trial {trial}", survived


def test_graphs_of_all_kinds(seed: int, record: Record, tmp_path: Path) -> None:
    tried(record, "graphs of all kinds", graphs_of_all_kinds(400, seed, tmp_path))
