"""Secure aggregation: a federation's sums, drop-outs at every step, and what a lying server is refused."""

import contextlib
import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from saving import SavesAfter
from sites import OPEN, BadChannel, make_sites
from strategies.test_contract import STRATEGIES, tiny

from fl_lightning import Payload, SequentialExecutor, Stage
from fl_lightning.remote import LoopbackChannel, Message, Site, SitePolicy, TopK, federate, masking
from fl_lightning.remote.secure import check_share, check_stage, mean_of, summand, threshold_of, weighting_of
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedPer, FedProto
from fl_lightning.strategies.mixing import CoordinateMedian

pytest.importorskip("Crypto.Protocol.SecretSharing", reason="needs the extra remote")
pytestmark = pytest.mark.filterwarnings("ignore:.*it is left out")


def sums(kind) -> bool:
    try:
        weighting_of(tiny(kind))
    except ValueError:
        return False
    return True


SUMS = [kind for kind in STRATEGIES if sums(kind)]


def all_rounds_failed():
    """A run of which no round counts ends so; what became of its rounds is looked at afterward."""
    return contextlib.suppress(TooFewUpdates)


class Lossy(LoopbackChannel):
    """Loses the responses of some clients to messages of some kinds, from a round on.

    Args:
        sites: The sites.
        lost: Kinds of messages and clients.
        since: First round in which they are lost.
    """

    def __init__(self, sites, lost=(), since=0) -> None:
        super().__init__(sites)
        self.lost, self.since, self.round_idx = set(lost), since, 0
        self.heard: list[tuple[int, Message, Message]] = []

    def ask(self, messages):
        for client, message in messages.items():
            address = message.about.get("place")
            self.round_idx = address[1] if address else self.round_idx
            response = Message.read(self.sites[client].respond(message.wire))
            self.heard.append((client, message, response))
            if (message.kind, client) in self.lost and self.round_idx >= self.since:
                continue
            yield client, response


@pytest.fixture
def federation_of(graphs, make_model, make_trainer, tmp_path):
    def build(
        make=lambda: FedAvg(num_epochs=1),
        channel=LoopbackChannel,
        policy=OPEN,
        num_rounds=2,
        count=3,
        names="sites",
        **settings,
    ):
        sites = make_sites(graphs[:count], tmp_path / names, lambda: (make_model(make()), make()), policy)
        trainer, strategy, way = make_trainer(num_rounds=num_rounds), make(), channel(sites)
        data = federate(trainer, way, strategy, secure=True, **settings)
        return trainer, data, strategy, make_model(make()), way

    return build


# ---------------------------------------------------------------- arithmetic


def test_shares_tell_a_secret_from_the_threshold_on() -> None:
    secret = bytes(range(32))
    shares = masking.split_secret(secret, 3, 5)
    for chosen in itertools.combinations(range(5), 3):
        assert masking.join_secret({address: shares[address] for address in chosen}, 3) == secret
    assert masking.join_secret(dict(enumerate(shares)), 3) == secret
    with pytest.raises(ValueError, match="do not fit together"):
        masking.join_secret(dict(list(enumerate(shares))[:2]), 3)
    assert masking.join_secret(dict(list(enumerate(shares))[:2]), 2) != secret


def test_sealed_shares_open_for_one_alone() -> None:
    ours, theirs, third = (masking.X25519PrivateKey.generate() for _ in range(3))
    sealed = masking.seal(ours, masking.public_of(theirs), ["sum", 0, 1], b"a share of a seed, and" + bytes(26))
    assert masking.unseal(theirs, masking.public_of(ours), ["sum", 0, 1], sealed).startswith(b"a share of a seed")
    for key, about, text in [
        (third, ["sum", 0, 1], sealed),
        (theirs, ["sum", 0, 2], sealed),
        (theirs, ["sum", 0, 1], sealed[:-1] + bytes([sealed[-1] ^ 1])),
    ]:
        with pytest.raises(ValueError, match="changed in transit"):
            masking.unseal(key, masking.public_of(ours), about, text)


def test_masks_are_drawn_alike_from_all_of_64_bits_and_cancel() -> None:
    ours, theirs = (masking.X25519PrivateKey.generate() for _ in range(2))
    added = masking.pairwise_mask(ours, masking.public_of(theirs), "sum", 4000, adds=True)
    taken = masking.pairwise_mask(theirs, masking.public_of(ours), "sum", 4000, adds=False)
    assert not (added + taken).any()
    assert 0.27 < (added.astype(float) / 2.0**64).std() < 0.31  # 12^-1/2
    other = masking.pairwise_mask(ours, masking.public_of(theirs), "another sum", 4000, adds=True)
    assert not np.array_equal(other, added)


@pytest.mark.parametrize("count", [3, 100])
def test_precision_and_room_at_the_edges(count) -> None:
    """Each summand is off by 2^-25 at most; x w must be below 2^38 / n, and below it nothing wraps around."""
    draw = np.random.default_rng(0)
    x_CD, w_C = draw.normal(size=(count, 50)), draw.integers(1, 9, size=count).astype(float)
    total_D = sum(masking.to_whole(torch.from_numpy(x_D), w, count) for x_D, w in zip(x_CD, w_C, strict=True))
    found_D = masking.from_whole(total_D)
    exact_D = np.append((x_CD * w_C[:, None]).sum(0), w_C.sum())
    assert np.abs(found_D.numpy() - exact_D).max() <= count * 2.0**-25
    edge = 2.0**38 / count * (1 - 1e-12)
    for sign in (1, -1):
        largest = masking.to_whole(torch.tensor([sign * edge], dtype=torch.float64), 1.0, count)
        total = masking.from_whole(sum([largest] * count))
        assert total[0].item() == pytest.approx(sign * edge * count, rel=1e-9)
    for wrong in (edge * 1.001, -edge * 1.001, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="numbers too large"):
            masking.to_whole(torch.tensor([wrong], dtype=torch.float64), 1.0, count)


def test_the_threshold() -> None:
    assert [threshold_of(count, 2 / 3) for count in (3, 4, 5, 6, 7, 9, 10)] == [3, 3, 4, 5, 5, 7, 7]
    assert [threshold_of(count, 0.5) for count in (3, 4, 5, 10)] == [2, 3, 3, 6]
    assert threshold_of(5, 1.0) == 5
    for share in (0.4, 1.1, float("nan")):
        with pytest.raises(ValueError, match="secure_share must be in"):
            check_share(share)


def test_the_weighted_mean_of_an_answer() -> None:
    like = {"w": torch.zeros(2, 500), "b": torch.zeros(3)}
    responses = [
        Payload(
            clients=(client,),
            parameters={name: torch.randn(1, *p.shape) for name, p in like.items()},
            num_examples=torch.tensor([5 + client]),
        )
        for client in range(3)
    ]
    total_D = masking.from_whole(sum(masking.to_whole(*summand(each, "examples"), 3) for each in responses))
    whole = mean_of(total_D, (0, 1, 2), Stage(name="train", upload=("w", "b")), like)
    for name in like:
        mean = sum((5 + client) * responses[client].parameters[name] for client in range(3)) / 18
        assert torch.allclose(whole.parameters[name], mean.expand(3, *like[name].shape), atol=1e-6)
    with pytest.raises(ValueError, match="asks for the client outputs a"):
        check_stage(Stage(name="s", client_outputs={"a": lambda *_: torch.ones(1)}))


# ---------------------------------------------------------------- federations


def test_which_strategies_are_content_with_sums() -> None:
    assert {"FedAvg", "FedProx", "FedPer", "FedOpt", "Ditto", "APFL", "PerFedAvg"} <= {kind.__name__ for kind in SUMS}
    assert not {"PFedMe", "SCAFFOLD", "FedAux", "FedSheafHN", "DPSGD", "FedProto"} & {kind.__name__ for kind in SUMS}
    with pytest.raises(ValueError, match=r"strategy\.aggregation of FedAvg needs the response of each client"):
        weighting_of(FedAvg(aggregation=CoordinateMedian()))


@pytest.mark.parametrize("kind", SUMS, ids=lambda kind: kind.__name__)
def test_the_server_learns_the_sum_alone_and_that_is_enough(
    kind, federation_of, graphs, given_clients, make_model, make_trainer, assert_same
) -> None:
    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    expected = local.fit(make_model(kind), given_clients(graphs[:3]), tiny(kind))
    trainer, data, strategy, model, channel = federation_of(lambda: tiny(kind), BadChannel)

    result = trainer.fit(model, data, strategy)

    assert_same(trainer.state_dict()["strategy"], local.state_dict()["strategy"], tolerance=2e-4)
    for question, response in channel.responses:
        if question.kind in ("run", "evaluate"):
            assert tuple(response.tensors) == ("s/masked",)
        else:
            assert not response.tensors
    assert result["val/acc"] == pytest.approx(expected["val/acc"], abs=0.05)
    assert result["test/acc_weighted"] == pytest.approx(expected["test/acc_weighted"], abs=0.05)
    assert not [name for name in result if name.endswith(("_std", "_worst"))]


def test_metrics_are_the_open_runs_and_of_no_client(federation_of, graphs, make_model, make_trainer, tmp_path) -> None:
    make = functools.partial(FedAvg, num_epochs=1)
    sites = make_sites(graphs[:4], tmp_path / "open", lambda: (make_model(), make()))
    plain, strategy = make_trainer(num_rounds=2), make()
    plain.fit(make_model(), federate(plain, LoopbackChannel(sites), strategy), strategy)
    trainer, data, strategy, model, _ = federation_of(make, count=4)

    trainer.fit(model, data, strategy)

    for secure, plainly in zip(trainer.run.history, plain.run.history, strict=True):
        for name in ("val/acc", "test/acc", "test/acc_weighted", "train/loss", "trained/val/acc"):
            assert secure[name] == pytest.approx(plainly[name], abs=1e-5), name
    assert all(not scores.extras for scores in trainer.run.scores.values())
    assert not [name for name in trainer.run.history[-1] if name.endswith(("_std", "_worst"))]


def test_filters_come_before_the_masks(federation_of) -> None:
    policy = SitePolicy(min_examples=1, secure_only=True, filters=[TopK(fraction=0.5)])
    trainer, data, strategy, model, _ = federation_of(policy=policy)
    trainer.fit(model, data, strategy)
    assert trainer.run.history[-1]["num_failures"] == 0


class Remembers(TopK):
    """Lets everything through, and remembers over how many clients a response is summed."""

    def change(self, numbers_D, summed_with):
        self.summed_with = summed_with
        return numbers_D


def test_noise_is_shared_among_as_many_as_must_survive(federation_of) -> None:
    """Four clients shared it, so a server that dropped one of them opened a sum with three quarters of the variance."""
    noise = Remembers(fraction=1.0)
    policy = SitePolicy(min_examples=1, filters=[noise])
    trainer, data, strategy, model, _ = federation_of(policy=policy, num_rounds=1, count=4)
    trainer.fit(model, data, strategy)
    assert noise.summed_with == threshold_of(4, trainer.executor.sums.share) == 3


def test_strategies_that_need_rows_are_refused(federation_of) -> None:
    with pytest.raises(ValueError, match="FedProto needs the response of each client"):
        federation_of(FedProto)


KINDS = ("sum_keys", "sum_shares", "run", "sum_reveal")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drop_out_at_any_step_leaves_the_sum_of_the_others(
    kind, federation_of, graphs, given_clients, make_model, make_trainer
) -> None:
    """Of four clients one is lost at a step; the model is the weighted mean over those whose numbers came."""
    trainer, data, strategy, model, _ = federation_of(
        channel=lambda sites: Lossy(sites, {(kind, 3)}), num_rounds=1, count=4
    )
    trainer.fit(model, data, strategy)

    present = 4 if kind == "sum_reveal" else 3
    local, averaged = make_trainer(num_rounds=1, executor=SequentialExecutor()), FedAvg(num_epochs=1)
    local.fit(make_model(), given_clients(graphs[:present]), averaged)
    assert trainer.run.history[0]["failed_round"] == 0
    assert trainer.run.history[0]["num_failures"] == 4 - present
    for name, tensor in strategy.models.items():
        assert torch.allclose(tensor, averaged.models[name], atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_below_the_threshold_a_round_is_failed_and_says_why(kind, federation_of) -> None:
    trainer, data, strategy, model, _ = federation_of(
        channel=lambda sites: Lossy(sites, {(kind, 2), (kind, 3)}, since=1), num_rounds=2, count=4
    )
    with pytest.warns(UserWarning, match=r"the secure sum failed: 2 clients .*, 3 are needed .*\(secure aggregation\)"):
        trainer.fit(model, data, strategy)
    assert [row["failed_round"] for row in trainer.run.history] == [0, 1]


def test_three_clients_need_all_three(federation_of) -> None:
    def channel(sites):
        return BadChannel(sites, absent={(0, 2)})

    trainer, data, strategy, model, _ = federation_of(lambda: FedPer(num_epochs=1), channel)
    with pytest.warns(UserWarning, match=r"the secure sum failed: 2 clients .*, 3 are needed .*client-02"):
        trainer.fit(model, data, strategy)
    assert [row["failed_round"] for row in trainer.run.history] == [1, 0]


def test_a_client_whose_answer_was_lost_goes_on(federation_of) -> None:
    """It may have been summed, so it does not train again from where it was: it goes on from where it is."""

    class LostOnce(Lossy):
        def ask(self, messages):
            for client, response in super().ask(messages):
                if not (self.heard[-1][1].kind == "run" and client == 3 and self.round_idx == 0):
                    yield client, response

    trainer, data, strategy, model, _ = federation_of(channel=LostOnce, num_rounds=3, count=4)
    trainer.fit(model, data, strategy)
    assert [row["num_failures"] for row in trainer.run.history] == [1, 0, 0]


def test_a_resume_sums_the_same_again(federation_of, make_model, make_trainer, assert_same, tmp_path) -> None:
    trainer, data, strategy, model, channel = federation_of(num_rounds=3, count=4)
    trainer.callbacks.append(SavesAfter(1, tmp_path / "v" / "one.ckpt"))
    whole = trainer.fit(model, data, strategy)
    again, the_strategy = make_trainer(num_rounds=3), FedAvg(num_epochs=1)
    way = federate(again, channel, the_strategy, secure=True)
    assert_same(again.fit(make_model(), way, the_strategy, ckpt_path=str(tmp_path / "v" / "one.ckpt")), whole)
    assert [row["num_failures"] for row in again.run.history] == [0, 0, 0]


def test_a_resume_over_other_clients_is_refused_by_the_sites(federation_of, make_trainer, make_model, tmp_path) -> None:
    trainer, data, strategy, model, channel = federation_of(num_rounds=3, count=4)
    trainer.callbacks.append(SavesAfter(1, tmp_path / "v" / "one.ckpt"))
    trainer.fit(model, data, strategy)
    again, the_strategy = make_trainer(num_rounds=3), FedAvg(num_epochs=1)
    way = federate(again, Lossy(channel.sites, {("sum_keys", 3)}), the_strategy, secure=True)
    with pytest.warns(UserWarning, match="its state was already summed over other clients"):
        again.fit(make_model(), way, the_strategy, ckpt_path=str(tmp_path / "v" / "one.ckpt"))
    assert again.run.history[1]["failed_round"] == 1


# ---------------------------------------------------------------- a lying server


@pytest.fixture
def four(federation_of):
    """Four sites after one round of a federation, and a way to have them do the steps of a sum."""
    trainer, data, strategy, model, channel = federation_of(channel=Lossy, num_rounds=1, count=4)
    trainer.fit(model, data, strategy)
    return Liar(channel, trainer.run.executor.digests, strategy.models)


class Liar:
    """A server that does the steps of a sum by hand."""

    def __init__(self, channel, digests, models) -> None:
        self.sites, self.digests, self.heard = channel.sites, dict(digests), channel.heard
        self.nonce = 0
        self.tensors = {f"p/{name}": tensor for name, tensor in models.items()}

    def ask(self, client, kind, **about) -> Message:
        return Message.read(self.sites[client].respond(self.message(kind, **about).wire))

    def message(self, kind, **about) -> Message:
        return Message(kind=kind, about=about, tensors=self.tensors if kind == "run" else {})

    def keys(self, clients, address, states=None):
        self.nonce += 1
        about = {"purpose": "run", "place": list(address), "nonce": f"{self.nonce:032x}"}
        responses = {c: self.ask(c, "sum_keys", **about, state=(states or self.digests)[c]) for c in clients}
        return {str(c): {name: response.about[name] for name in KEYS} for c, response in responses.items()}

    def shares(self, clients, keys):
        responses = {c: self.ask(c, "sum_shares", keys=keys) for c in clients}
        return {c: response.about.get("shares", response.about.get("why")) for c, response in responses.items()}

    def run(self, client, shares, stage_address, members, states=None) -> Message:
        sealed = {str(peer): shares[peer][str(client)] for peer in members if peer != client}
        address = dict(zip(("phase", "round_idx", "name"), stage_address, strict=True))
        state = (states or self.digests)[client]
        return self.ask(client, "run", address=address, work_fraction=1.0, state=state, shares=sealed)

    def whole(self, clients, address, states=None):
        """All up to the masked numbers; the responses by client."""
        keys = self.keys(clients, address, states)
        shares = self.shares(clients, keys)
        return {c: self.run(c, shares, address, clients, states) for c in clients}


KEYS = ("sealing", "masking", "certificate", "signature")
ROUND_1 = ("round", 1, "train")


def test_one_client_several_times_is_no_set(four) -> None:
    """[c, c, c] passed the count and drew no mask."""
    keys = four.keys([0], ROUND_1)
    own = keys["0"]
    for reported in ({"0": own, "1": own, "2": own}, {"0": own}, {"0": own, "1": own}):
        why = four.shares([0], reported)[0]
        assert ("must be distinct" if len(reported) == 3 else "needs at least 3 clients in a sum") in why
    response = four.ask(
        0,
        "run",
        address={"phase": "round", "round_idx": 1, "name": "train"},
        work_fraction=1.0,
        state=four.digests[0],
        shares={"0": "00", "1": "00"},
    )
    assert response.kind == "failure"
    assert not response.tensors
    old = four.ask(
        0,
        "run",
        address={"phase": "round", "round_idx": 1, "name": "train"},
        work_fraction=1.0,
        state=four.digests[0],
        clients=[0, 0, 0],
    )
    assert old.kind == "failure"


def test_two_rounds_from_one_state_are_refused(four) -> None:
    """Sets 0123 and 012 from one state told client 3's response exactly."""
    before = dict(four.digests)
    first = four.whole([0, 1, 2, 3], ROUND_1)
    assert all(response.kind == "response" for response in first.values())
    for address in (ROUND_1, ("round", 2, "train")):
        about = {"purpose": "run", "place": list(address), "nonce": "99" * 16}
        keys = {str(c): four.ask(c, "sum_keys", **about, state=before[c]) for c in (0, 1, 2)}
        moved = [keys[c].about["state"] != before[int(c)] for c in keys]
        public = {c: {name: keys[c].about[name] for name in KEYS} for c in keys}
        shares = four.shares([0, 1, 2], public)
        for client in (0, 1, 2):
            response = four.run(client, shares, address, [0, 1, 2], before)
            assert response.kind == "failure"
            assert not response.tensors
        assert all(moved) == (
            address != ROUND_1
        )  # a site goes on from the next state, where a server lost its response


def test_a_state_is_summed_over_the_same_clients_in_every_run(
    federation_of, make_model, make_trainer, tmp_path
) -> None:
    """A second start under another label, and an honest run with a site less, from the same common start."""
    trainer, data, strategy, model, channel = federation_of(num_rounds=1, count=4)
    trainer.fit(model, data, strategy)
    fewer, the_strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    way = federate(fewer, LoopbackChannel(channel.sites[:3]), the_strategy, secure=True)
    with all_rounds_failed(), pytest.warns(UserWarning, match="over other clients .* in a run with another seed"):
        fewer.fit(make_model(), way, the_strategy)
    assert [row["failed_round"] for row in fewer.run.history] == [1]


@pytest.mark.parametrize("same_account", [True, False])
def test_another_run_name_does_not_help(same_account, graphs, make_model, make_trainer, tmp_path) -> None:
    """Each run has a folder of its own; the book of sums is the site's. Without it the attack would go through."""
    actual = []
    for name, count in (("one", 4), ("two", 3)):
        sites = [_site(graph, make_model, tmp_path, name, same_account) for graph in graphs[:count]]
        trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
        with all_rounds_failed():
            trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy, secure=True), strategy)
        actual.append(trainer.run.history[0]["failed_round"])
    assert actual == [0, int(same_account)]


def _site(graph, make_model, folder, run_name, same_account):
    own = folder / "federations" / run_name / graph.name
    account = folder / "account" / graph.name if same_account else own
    return Site(graph, make_model(), FedAvg(num_epochs=1), own, policy=OPEN, account=account)


def test_a_run_with_another_seed_may_have_other_clients(federation_of, make_model, make_trainer) -> None:
    """Said before the run: what the two differ by is told, and only noise is against it."""
    trainer, data, strategy, model, channel = federation_of(num_rounds=1, count=4)
    trainer.fit(model, data, strategy)
    fewer, the_strategy = make_trainer(num_rounds=1, seed=7), FedAvg(num_epochs=1)
    fewer.fit(
        make_model(), federate(fewer, LoopbackChannel(channel.sites[:3]), the_strategy, secure=True), the_strategy
    )
    assert fewer.run.history[0]["failed_round"] == 0


class DeadForAllButOne(LoopbackChannel):
    """Sends all clients but the first a model whose weights get no gradient."""

    def ask(self, messages):
        for client, message in messages.items():
            sent = message
            if message.kind == "run" and client:
                dead = {n: torch.full_like(t, -1.0 * n.endswith("bias")) for n, t in message.tensors.items()}
                sent = dataclasses.replace(message, tensors=dead)
            response = Message.read(self.sites[client].respond(sent.wire))
            yield client, dataclasses.replace(response, about={**response.about, "to": message.name})


def test_a_model_for_one_member_alone_tells_nothing_about_it(federation_of) -> None:
    """The others' weights stayed 0, so the sum was the first client's update, exact to 5e-8."""
    trainer, data, strategy, model, _ = federation_of(channel=DeadForAllButOne, num_rounds=1, count=4)
    with all_rounds_failed(), pytest.warns(UserWarning, match="a site sent numbers that are not its own"):
        trainer.fit(model, data, strategy)
    assert [row["failed_round"] for row in trainer.run.history] == [1]


class SendsEachItsOwn(FedAvg):
    """A server-side mistake: the masks of its clients would not cancel."""

    def configure(self, stage, clients):
        index_C = torch.arange(len(clients))
        return super().configure(stage, clients)._map(clients, lambda t: t + index_C.view(-1, *[1] * (t.dim() - 1)))


def test_a_strategy_that_sends_different_models_is_told(federation_of) -> None:
    trainer, data, strategy, model, _ = federation_of(lambda: SendsEachItsOwn(num_epochs=1), num_rounds=1)
    with all_rounds_failed(), pytest.warns(UserWarning, match="the strategy sends its clients different models"):
        trainer.fit(model, data, strategy)
    assert [row["failed_round"] for row in trainer.run.history] == [1]


def test_survivors_are_reported_once_and_shares_of_one_kind(four) -> None:
    responses = four.whole([0, 1, 2, 3], ROUND_1)
    assert all(response.kind == "response" for response in responses.values())
    assert "at least 3" in four.ask(0, "sum_reveal", survivors=[0, 1], confirmed={}).about["why"]
    assert "do not belong to a sum" in four.ask(0, "sum_reveal", survivors=[0, 1, 2, 7], confirmed={}).about["why"]
    assert "do not belong to a sum" in four.ask(0, "sum_reveal", survivors=[1, 0, 2], confirmed={}).about["why"]
    assert "an item twice" in four.ask(0, "sum_reveal", survivors=[0, 1, 1, 2], confirmed={}).about["why"]
    assert "not in the sum" in four.ask(0, "sum_reveal", survivors=[1, 2, 3], confirmed={}).about["why"]
    first = four.ask(0, "sum_reveal", survivors=[0, 1, 2], confirmed={})
    assert set(first.about["seeds"]) == {"0", "1", "2"}
    assert set(first.about["keys"]) == {"3"}
    assert "over other clients" in four.ask(0, "sum_reveal", survivors=[0, 1, 2, 3], confirmed={}).about["why"]
    assert four.ask(0, "sum_reveal", survivors=[0, 1, 2], confirmed={}).wire == first.wire


def test_a_sum_hides_one_response(four) -> None:
    """Two evaluations under the same masks differed by the metrics of a single client."""
    question, response = [(sent, came) for client, sent, came in four.heard if not client and sent.kind == "evaluate"][
        -1
    ]
    site = four.sites[0]
    other = dataclasses.replace(question, tensors={name: tensor + 1 for name, tensor in question.tensors.items()})
    assert "its masks hide one response" in Message.read(site.respond(other.wire)).about["why"]
    assert site.respond(question.wire) == response.wire


def test_a_sum_of_one_purpose_is_of_no_other(four) -> None:
    """The metrics of a state were summed over 0123, and over 012 in a sum of work, whose clients are counted apart."""
    question = [sent for client, sent, _ in four.heard if not client and sent.kind == "evaluate"][-1]
    shares = four.shares([0, 1, 2], four.keys([0, 1, 2], ("evaluate", question.about["round_idx"])))
    sealed = {str(peer): shares[peer]["0"] for peer in (1, 2)}
    asked = dataclasses.replace(question, about={**question.about, "shares": sealed})
    assert "no sum was started for this" in Message.read(four.sites[0].respond(asked.wire)).about["why"]


def test_a_site_that_is_started_again_does_not_answer_twice(four, make_model, tmp_path) -> None:
    four.whole([0, 1, 2, 3], ROUND_1)
    revealed = four.ask(0, "sum_reveal", survivors=[0, 1, 2], confirmed={})
    old = four.sites[0]
    (four.sites[0],) = make_sites([old.client_data], old.folder.parent, lambda: (make_model(), FedAvg(num_epochs=1)))
    assert four.ask(0, "sum_reveal", survivors=[0, 1, 2], confirmed={}).wire == revealed.wire
    assert "over other clients" in four.ask(0, "sum_reveal", survivors=[0, 1, 2, 3], confirmed={}).about["why"]
    shares = {peer: {"0": "00"} for peer in (1, 2)}
    assert "other clients" in four.run(0, shares, ROUND_1, [0, 1, 2]).about["why"]


def test_keys_of_others_cannot_be_swapped(four) -> None:
    keys = four.keys([0, 1, 2, 3], ROUND_1)
    swapped = {**keys, "0": keys["1"]}
    assert "public keys for this site that are not its own" in four.shares([0], swapped)[0]
    assert isinstance(four.shares([0], keys)[0], dict)
    other = {**keys, "3": four.keys([3], ("round", 2, "train"))["3"]}
    assert "these are different ones" in four.shares([0], other)[0]


def test_where_the_others_reported_of_another_set_shares_do_not_open(four) -> None:
    """Site 0 is told of the members 0123, the others of 012: what they have sealed is of another sum."""
    keys = four.keys([0, 1, 2, 3], ROUND_1)
    shares = four.shares([0], keys) | four.shares([1, 2], {c: keys[c] for c in "012"}) | four.shares([3], keys)
    response = four.run(0, shares, ROUND_1, [0, 1, 2])
    assert "cannot be opened" in response.about["why"]


def test_a_site_may_ask_for_more_company(federation_of) -> None:
    trainer, data, strategy, model, _ = federation_of(
        policy=SitePolicy(min_examples=1, min_sum_clients=5), num_rounds=1, count=4
    )
    with all_rounds_failed(), pytest.warns(UserWarning, match="needs at least 5 clients in a sum"):
        trainer.fit(model, data, strategy)
    with pytest.raises(ValueError, match="min_sum_clients must be at least 3"):
        SitePolicy(min_sum_clients=2)


def test_a_low_threshold_is_refused_by_server_and_site(federation_of) -> None:
    with pytest.raises(ValueError, match="secure_share must be in"):
        federation_of(secure_share=0.3)
    trainer, data, strategy, model, _ = federation_of()
    trainer.executor.sums.share = 0.3
    with pytest.raises(ValueError, match="secure_share must be in"):
        trainer.fit(model, data, strategy)


def test_what_sums_do_not_hide_is_said_before_the_run(federation_of, caplog) -> None:
    trainer, data, strategy, model, _ = federation_of(num_rounds=1)
    trainer.fit(model, data, strategy)
    assert "reveal something about the clients by which they differ, by the difference of their sums" in caplog.text
