"""A site's files: of their owner alone, and damaged one by one they are made again, or refused with what to do."""

import contextlib
import json
import os
import random
import sqlite3
import stat

import pytest
import torch
from sites import OPEN, make_sites
from wrong_messages import raw

from fl_lightning.files import secret_file, whole_file
from fl_lightning.remote import LoopbackChannel, Message, Refused, federate
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.sealed import account_key
from fl_lightning.strategies import FedAvg

SECURE = ("sums.sqlite", "account_key")


@pytest.fixture
def trained(graphs, given_clients, make_model, make_trainer, tmp_path):
    """Train three sites for two rounds; their folders, and a function that opens them again."""

    def make(*, secure=False):
        clients = given_clients(graphs[:3]).clients
        builders = lambda: (make_model(), FedAvg(num_epochs=1))  # noqa: E731
        folder = tmp_path / "sites"
        sites = make_sites(clients, folder, builders, OPEN)
        trainer, strategy = make_trainer(num_rounds=2), FedAvg(num_epochs=1)
        trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy, secure=secure), strategy)
        return folder / "client-01", lambda: make_sites(clients, folder, builders, OPEN)[1]

    return make


def versions(whole: bytes) -> list[bytes]:
    draw = random.Random(0)
    flipped = bytearray(whole)
    flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    return [b"", b"no such file", whole[: len(whole) // 2], bytes(flipped)]


def test_all_files_are_of_their_owner_alone(trained) -> None:
    folder, _ = trained(secure=True)
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_all_could_read_is_closed(trained) -> None:
    folder, again = trained()
    folder.chmod(0o755)
    again()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["start", "response"])
@pytest.mark.parametrize("version", range(4))
def test_a_kept_message_that_is_damaged_is_set_aside(trained, name: str, version: int) -> None:
    folder, again = trained()
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(versions(whole)[version])
    site = again()
    assert site.is_started == (name != "start")
    assert site.last is None
    assert (folder / f"{name}.damaged").exists()
    response = Message.read(site.respond(Message(kind="load", about={"state": "00" * 32}).wire))
    assert ("not in a federation" if name == "start" else "does not have the state") in response.about["why"]


@pytest.mark.parametrize("name", SECURE)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_what_a_site_must_remember_is_refused_where_it_is_damaged(trained, name: str, version: int) -> None:
    folder, again = trained(secure=True)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(versions(whole)[version])
    with pytest.raises(Refused, match=r"restore it from a copy"):
        again()


def test_every_row_of_the_book_is_sealed(trained) -> None:
    folder, again = trained(secure=True)
    whole = (folder / "sums.sqlite").read_bytes()
    for table, column in (
        ("sums", "state"),
        ("sums", "members"),
        ("work", "work"),
        ("evaluations", "models"),
        ("masked", "summand"),
    ):
        with contextlib.closing(sqlite3.connect(folder / "sums.sqlite")) as book, book:
            changed = book.execute(f"UPDATE {table} SET {column} = '7' WHERE rowid IN (SELECT max(rowid) FROM {table})")
            assert changed.rowcount == 1
        with pytest.raises(Refused, match=r"sums\.sqlite of this site's account .*\(a row is damaged\)"):
            again()
        (folder / "sums.sqlite").write_bytes(whole)
    assert again().is_started


ENTRIES = {
    "sums": lambda ledger: ledger.enter("run", "new", ["a"], run="r", work=None),
    "work": lambda ledger: ledger.enter("run", "new", ["a"], run="r", work="w"),
    "evaluations": lambda ledger: ledger.count_models("r", 0, "new", 1, 9),
    "masked": lambda ledger: ledger.mask("new", "s"),
    "counts": lambda ledger: ledger.count_models("r", 0, "new", 1, 9),
}


@pytest.mark.parametrize("table", ENTRIES)
def test_rows_that_were_deleted_are_missed(trained, table: str) -> None:
    folder, again = trained(secure=True)
    site = again()
    with contextlib.closing(sqlite3.connect(folder / "sums.sqlite")) as book, book:
        newest = "" if table == "counts" else f"WHERE rowid IN (SELECT max(rowid) FROM {table})"
        book.execute(f"DELETE FROM {table} {newest}")
    for attempt in (again, lambda: ENTRIES[table](site.ledger)):  # whether the site is restarted or not
        with pytest.raises(ValueError, match=r"sums\.sqlite .*\(rows are missing\): restore it from a copy"):
            attempt()


@pytest.mark.parametrize("name", ["account_key", "privacy.json", "sums.sqlite"])
def test_what_was_lost_is_not_begun_again(trained, name: str) -> None:
    folder, again = trained(secure=True)
    again().accountant.spend(1.0)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    with pytest.raises(Refused, match=name.replace(".", r"\.") + r".* restore it from a copy"):
        again()
    (folder / name).write_bytes(content)
    assert again().is_started
    (folder / "privacy.json").write_bytes(b"")
    with pytest.raises(Refused, match=r"privacy\.json is damaged: restore it from a copy"):
        again()


def test_an_account_of_an_earlier_version_goes_on(trained) -> None:
    folder, again = trained(secure=True)
    with contextlib.closing(sqlite3.connect(folder / "sums.sqlite")) as book, book:
        book.execute("DROP TABLE counts")
    (folder / "account_key").write_bytes((folder / "account_key").read_bytes()[:32])
    assert again().is_started
    (folder / "sums.sqlite").unlink()
    with pytest.raises(Refused, match=r"sums\.sqlite .* restore it from a copy"):
        again()


def test_a_ledger_of_a_version_that_did_not_know_what_was_masked_goes_on(trained) -> None:
    folder, again = trained(secure=True)
    with contextlib.closing(sqlite3.connect(folder / "sums.sqlite")) as book, book:
        book.execute("DROP TABLE masked")
    with pytest.raises(Refused, match=r"sums\.sqlite .* restore it from a copy"):  # it is still counted
        again()
    with contextlib.closing(sqlite3.connect(folder / "sums.sqlite")) as book, book:
        book.execute("DELETE FROM counts WHERE counted = 'masked'")
    ledger = again().ledger
    assert [ledger.mask("label", summand) for summand in ("one", "two", "one")] == [True, False, True]
    assert not again().ledger.mask("label", "two")


def test_an_account_that_was_begun_when_the_process_ended_is_begun_again(tmp_path) -> None:
    account_key(tmp_path)
    (tmp_path / "sums.sqlite").touch()
    assert SumLedger(tmp_path).enter("run", "state", ["a", "b"], run="r", work="w") == "first"
    assert SumLedger(tmp_path).enter("run", "state", ["a"], run="r", work="w") == "refused"


@pytest.mark.parametrize("version", range(4))
def test_a_sum_that_is_damaged_is_begun_again(trained, version: int) -> None:
    folder, again = trained(secure=True)
    (folder / "sum.json").write_bytes(versions((folder / "sum.json").read_bytes())[version])
    site = again()
    assert site.is_started
    assert site.sum.state == {}
    assert (folder / "sum.json.damaged").exists()


@pytest.mark.parametrize("name", ["account_key", "states/digest_key"])
@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key_is_refused(trained, name: str, content: bytes) -> None:
    folder, again = trained()
    (folder / name).write_bytes(content)
    with pytest.raises(Refused, match=r"_key is damaged, it has \d+ bytes: restore it from a copy"):
        again()


def test_a_damaged_state_is_not_gone_on_from(trained) -> None:
    folder, again = trained()
    site = again()
    for path in (folder / "states").glob("*.state"):
        path.write_bytes(versions(path.read_bytes())[3])
    digests = [path.stem for path in (folder / "states").glob("*.state") if path.stem != site.current]
    for digest in digests:
        why = Message.read(site.respond(Message(kind="load", about={"state": digest}).wire)).about["why"]
        assert "restore its folder" in why
    assert digests


def test_links_that_were_planted_are_not_followed(tmp_path, monkeypatch) -> None:
    target, victim = tmp_path / "a.txt", tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda size: "00" * size)  # as if somebody could foresee it
    (tmp_path / f".a.{'00' * 8}.new.txt").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"), whole_file(target) as temporary:
        temporary.write_text("theirs")
    assert victim.read_text() == "mine"
    target.symlink_to(victim)
    monkeypatch.undo()
    with whole_file(target) as temporary:
        temporary.write_text("theirs")
    assert victim.read_text() == "mine"
    assert target.read_text() == "theirs"
    assert not target.is_symlink()


def test_files_are_secret_from_the_first_byte(tmp_path) -> None:
    with whole_file(tmp_path / "key", secret=True) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    assert secret_file(tmp_path / "site" / "other", lambda: b"x") == b"x"
    assert stat.S_IMODE((tmp_path / "site").stat().st_mode) == 0o700


def test_what_a_killed_process_left_goes_after_a_while(tmp_path) -> None:
    old, new, other = (tmp_path / f".a.{digit * 16}.new.txt" for digit in "012")
    for path in (old, new):
        path.write_text("half")
    other.with_name(f".b.{'2' * 16}.new.txt").write_text("half")
    os.utime(old, (0, 0))
    with whole_file(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
    assert not old.exists()
    assert new.exists()
    assert len(list(tmp_path.iterdir())) == 3


START = {
    "index": -1,
    "num_outputs": 10**8,
    "num_features": [7, 7],
    "own": ["features"],
    "names": ["a\x1b[2J"],
    "kind": "examples",
    "precision": "8-true",
    "dtype": "load",
    "seed": -1,
    "layout": {"sparse_features": "yes"},
    "training_clients": [99],
    "federation": "../x",
    "settings": [1],
    "secure": 1,
    "strategy": 7,
    "more": 1,
}


@pytest.mark.parametrize("name", START)
def test_a_wrong_start_leaves_the_site_as_it_was(trained, name: str) -> None:
    folder, again = trained()
    site = again()
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    start = Message.read((folder / "start").read_bytes()[:-64])
    wrong = Message(kind="start", about={**start.about, name: START[name]}, tensors=start.tensors)
    response = Message.read(site.respond(wrong.wire))
    assert response.kind == "failure"
    assert "wrong" in response.about["why"]
    assert site.is_started
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept


@pytest.mark.parametrize(
    ("changed", "tensors"),
    [
        ({"dtype": "float64"}, {}),
        ({"dtype": "float16"}, {}),
        ({"precision": "64-true"}, {}),
        ({"precision": "bf16-true"}, {}),
        ({"num_outputs": 2}, {}),
        ({"layout": {}}, {}),
        ({"layout": {"sparse_features": True, "more": True}}, {}),
        ({"layout": {"sparse_features": 1}}, {}),
        ({}, {"relation": torch.ones(3, 3, dtype=torch.complex64)}),
        ({}, {"relation": torch.ones(3, 3, dtype=torch.bool)}),
        ({}, {"relation": torch.ones(3, 3).to(torch.float8_e4m3fn)}),
        ({}, {"relation": torch.full((3, 3), torch.inf)}),
        ({}, {"relation": torch.ones(2, 3)}),
    ],
)
def test_a_start_that_no_server_makes_of_the_sites_cards(trained, changed: dict, tensors: dict) -> None:
    folder, again = trained()
    site = again()
    start = Message.read((folder / "start").read_bytes()[:-64])
    assert (start.about["precision"], start.about["num_outputs"]) == ("32-true", 3)
    response = Message.read(site.respond(Message(kind="start", about={**start.about, **changed}, tensors=tensors).wire))
    names = " ".join([*changed, *tensors]) if changed.keys() != {"precision"} else "dtype"
    assert response.about["why"] == f"the server's message 'start' is wrong: its {names} cannot be this site's"
    assert site.respond(start.wire)


TYPES = ["complex64", "bool", "int64", "float16", "float64", "float8_e4m3fn", "uint16"]


@pytest.mark.parametrize("dtype", TYPES)
def test_models_of_another_type_than_the_sites_are_not_trained_from(trained, dtype: str) -> None:
    _, again = trained()
    site = again()
    net = {f"p/{name}": parameter[None] for name, parameter in site.member.known.items()}
    address = {"phase": "round", "round_idx": 2, "name": "train"}
    about = {"address": address, "work_fraction": 1.0, "state": site.last.about["state"]}
    first = next(iter(net))
    wrong = {**net, first: net[first].to(getattr(torch, dtype))}
    why = Message.read(site.respond(Message(kind="run", about=about, tensors=wrong).wire)).about["why"]
    assert f"the server sends '{first}' of shape (1, 6, 8) and type {dtype}, which is not expected" in why
    assert Message.read(site.respond(Message(kind="run", about=about, tensors=net).wire)).kind == "response"


@pytest.mark.parametrize("dtype", TYPES)
def test_other_numbers_that_arrive_are_real(trained, dtype: str) -> None:
    _, again = trained()
    member = again().member
    tensors = {"s/more": torch.ones(1, 2).to(getattr(torch, dtype))}
    if dtype in ("complex64", "float8_e4m3fn", "uint16"):
        with pytest.raises(Refused, match=rf"'s/more' of shape \(1, 2\) and type {dtype}, which is not expected"):
            member.check_tensors(Message(kind="run", tensors=tensors))
    else:
        member.check_tensors(Message(kind="run", tensors=tensors))


QUESTIONS = {
    "run": [
        {"address": {"phase": "callback", "round_idx": 0, "name": "train"}},
        {"address": {"phase": "round", "round_idx": -1, "name": "train"}},
        {"address": [1]},
        {"work_fraction": 2.0},
        {"work_fraction": float("nan")},
        {"shares": {"0": "ab"}},
        {"shares": {"0": "xy"}},
        {"clients": "01"},
        {"state": "../../x"},
    ],
    "evaluate": [
        {"evaluations": [["", {"tuning": None, "output": None}]] * 470},
        {"evaluations": {"": 1}},
        {
            "evaluations": [
                ["", {"tuning": {"made": {"module": "os", "name": "system"}, "settings": {}}, "output": None}]
            ]
        },
        {"round_idx": "1"},
        {"forget": ["/etc/passwd"]},
        {"forget": 7},
    ],
    "forget": [{"forget": ["../start"]}, {"forget": {}}],
    "sum_keys": [{"purpose": "predict", "place": ["x"], "nonce": "ab" * 16}, {"place": [1.5]}, {"nonce": "ab"}],
    "sum_shares": [{"keys": [1]}, {"keys": {"-1": {}}}, {"keys": {"0": "ab"}}],
    "sum_confirm": [{"survivors": []}, {"survivors": [0, 0]}, {"survivors": [-1]}],
    "sum_reveal": [{"survivors": [0, 1, 2], "confirmed": {"0": 7}}, {"survivors": [0], "confirmed": {}}],
    "load": [{"state": None}],
    "unknown\x1b": [{}],
}


@pytest.mark.parametrize(("kind", "facts"), [(kind, facts) for kind, each in QUESTIONS.items() for facts in each])
def test_a_hostile_server_is_refused(trained, kind: str, facts: dict) -> None:
    folder, again = trained()
    site = again()
    about = {
        "run": {"address": {"phase": "round", "round_idx": 1, "name": "train"}, "work_fraction": 1.0},
        "evaluate": {"evaluations": [["", {"tuning": None, "output": None}]], "round_idx": 0, "forget": []},
    }.get(kind, {}) | ({"state": site.current} if kind in ("run", "evaluate", "load") else {})
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reported = json.dumps({"kind": kind, "about": {**about, **facts}, "names": []})
    response = Message.read(site.respond(raw(reported, {})))
    assert response.kind == "failure"
    assert response.about["why"].isprintable()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
