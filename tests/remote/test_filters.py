import json
import math

import pytest
import torch
from sites import BadChannel, make_sites

from fl_lightning import Payload
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import GaussianNoise, Percentile, SitePolicy, TopK, federate
from fl_lightning.remote.accounting import PrivacyAccountant
from fl_lightning.remote.filters import CannotFilter
from fl_lightning.strategies import FedAvg, FedProto, FedSheafHN

pytest.importorskip("dp_accounting.gaussian_mechanism", reason="needs the extra privacy")


@pytest.fixture
def answer() -> Payload:
    return Payload(
        clients=(3,),
        parameters={"w": torch.tensor([[1.0, 2.0, 10.0]])},
        extras={"embedding": torch.tensor([[-3.0, 0.1]], dtype=torch.bfloat16)},
        num_examples=torch.tensor([17]),
        num_steps=torch.tensor([4]),
    )


KNOWN = {"w": torch.tensor([[1.0, 0.0, 9.5]]), "other": torch.zeros(1)}  # changes: 0, 2, 0.5; -3, 0.1


def test_only_the_largest_changes_of_parameters_and_outputs_leave(answer) -> None:
    actual = TopK(fraction=0.4)(answer, KNOWN)
    assert actual.parameters["w"].tolist() == [[1.0, 2.0, 9.5]]
    assert actual.extras["embedding"].tolist() == [[-3.0, 0.0]]
    assert actual.extras["embedding"].dtype == torch.bfloat16
    assert (actual.num_examples, actual.num_steps) == (answer.num_examples, answer.num_steps)
    assert TopK(fraction=1.0)(answer, KNOWN).parameters["w"].tolist() == answer.parameters["w"].tolist()


def test_changes_below_the_percentile_are_dropped_and_large_ones_cut(answer) -> None:
    actual = Percentile(percentile=60, limit=1.5)(answer, KNOWN)
    assert actual.parameters["w"].tolist() == [[1.0, 1.5, 10.0]]
    assert actual.extras["embedding"].tolist() == [[-1.5, 0.0]]
    assert Percentile(percentile=0, limit=None)(answer, KNOWN).parameters["w"].tolist() == [[1.0, 2.0, 10.0]]


def test_noise_of_the_stated_size_on_a_clipped_answer(tmp_path) -> None:
    many = Payload(clients=(0,), parameters={"w": torch.full((1, 20_000), 5.0)}, num_examples=torch.tensor([17]))
    noise = GaussianNoise(clip_norm=0.5, noise_multiplier=3.0)
    noise.open(tmp_path)

    first, second = (noise(many, {}) for _ in range(2))

    clipped = 0.5 / math.sqrt(20_000)
    assert first.parameters["w"].mean().item() == pytest.approx(clipped, abs=5 * 3.0 / math.sqrt(20_000))
    assert first.parameters["w"].std().item() == pytest.approx(3.0, rel=0.05)  # 3 x 2 x 0.5
    assert not torch.equal(first.parameters["w"], second.parameters["w"])
    assert first.num_examples.tolist() == [1]
    short = Payload(clients=(0,), parameters={"w": torch.full((1, 2), 1e-3)})
    quiet = GaussianNoise(clip_norm=1.0, noise_multiplier=1e-9)
    quiet.open(tmp_path / "other")
    assert torch.allclose(quiet(short, {}).parameters["w"], short.parameters["w"], atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(torch.float64, [1.0, -1.0, 1.0, 0.0, 1.0, 0.0]), (torch.float32, [0.0, 0.0, 2.0, 0.0, 0.0, 0.0])],
)
def test_changes_that_overflow_are_clipped_to_finite_ones(kind, expected, tmp_path) -> None:
    """From parameters near the largest number, which a server may send, a change overflows, or its square does."""
    most = torch.finfo(kind).max
    known = {"w": torch.tensor([[-most, most, 0.0, 0.0, 0.0, 0.0]], dtype=kind)}
    trained = torch.tensor([[most, -most, torch.inf, torch.nan, most / 4, 1.0]], dtype=kind)
    noise = GaussianNoise(clip_norm=2.0, noise_multiplier=1e-9)
    noise.open(tmp_path)
    moved = noise.change((trained.double() - known["w"].double())[0], 1)
    assert moved.tolist() == pytest.approx(expected, abs=1e-7)
    assert noise(Payload(clients=(0,), parameters={"w": trained}), known).parameters["w"].isfinite().all()


def test_the_account_is_that_of_the_library_and_lives_in_the_folder(tmp_path) -> None:
    from dp_accounting import GaussianDpEvent, pld

    account = PrivacyAccountant(tmp_path, delta=1e-5)
    assert account.epsilon() == 0
    library = pld.PLDAccountant()
    for multiplier in (4.0, 4.0, 5.0):
        account.spend(multiplier)
        library.compose(GaussianDpEvent(multiplier))
    assert account.epsilon() == pytest.approx(library.get_epsilon(1e-5), rel=1e-3)
    again = PrivacyAccountant(tmp_path, delta=1e-5)
    assert again.num_responses == 3
    assert again.epsilon() == account.epsilon() < again.epsilon(4.0)


def test_the_budget_ends_the_updates(answer, tmp_path) -> None:
    noise = GaussianNoise(clip_norm=1.0, noise_multiplier=2.0, max_epsilon=2.5)
    noise.open(tmp_path)
    assert PrivacyAccountant(tmp_path, delta=1e-5).epsilon(2.0) < 2.5
    noise(answer, KNOWN)
    with pytest.raises(CannotFilter, match=r"the privacy budget is spent: ε would be .*, max_epsilon is 2.5"):
        noise(answer, KNOWN)
    assert json.loads((tmp_path / "privacy.json").read_text())["num_answers"] == 1


def test_noise_that_is_shared_in_a_sum(tmp_path) -> None:
    """Each of t clients adds a t-th of the variance; what is in no sum is refused."""
    many = Payload(clients=(0,), parameters={"w": torch.zeros(1, 20_000)}, num_examples=torch.tensor([17]))
    noise = GaussianNoise(clip_norm=0.5, noise_multiplier=3.0, distributed=True)
    noise.open(tmp_path)
    assert noise(many, {}, summed_with=4).parameters["w"].std().item() == pytest.approx(1.5, rel=0.05)  # 3 / 4^1/2
    with pytest.raises(CannotFilter, match="distributed is for secure aggregation"):
        noise(many, {})
    assert PrivacyAccountant(tmp_path, delta=1e-5).num_responses == 1


def test_what_cannot_be_filtered_is_refused(answer, tmp_path) -> None:
    whole = Payload(clients=(0,), extras={"votes": torch.tensor([[1, 2]])})
    with pytest.raises(CannotFilter, match="votes are whole"):
        TopK(fraction=0.5)(whole, {})
    rows = Payload(clients=(0,), extras={"soft": torch.ones(1, 2, 3)}, lengths={"soft": torch.tensor([2])})
    noise = GaussianNoise(clip_norm=1.0, noise_multiplier=1.0)
    noise.open(tmp_path)
    with pytest.raises(CannotFilter, match="soft have a row for each"):
        noise(rows, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(fraction=0), "TopK.fraction"),
        (lambda: Percentile(percentile=100), "Percentile.percentile"),
        (lambda: Percentile(limit=0), "Percentile.limit"),
        (lambda: GaussianNoise(clip_norm=0, noise_multiplier=1), "GaussianNoise.clip_norm"),
        (lambda: GaussianNoise(clip_norm=1, noise_multiplier=-1), "GaussianNoise.noise_multiplier"),
        (lambda: GaussianNoise(clip_norm=1, noise_multiplier=1, delta=0), "GaussianNoise.delta"),
        (lambda: SitePolicy(min_examples=0), "site.min_examples"),
    ],
)
def test_settings_out_of_range(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def noisy() -> SitePolicy:
    noise = GaussianNoise(clip_norm=1.0, noise_multiplier=1.0, max_epsilon=30)
    return SitePolicy(min_examples=1, filters=[noise], metrics="plain")


@pytest.mark.parametrize("kind", [FedAvg, FedProto, FedSheafHN])
def test_a_federation_with_noise_on_all_that_leaves(kind, graphs, make_model, make_trainer, tmp_path) -> None:
    settings = {
        "num_epochs": 1,
        **({"num_neighbors": 2, "init_epochs": 1, "hidden_channels": 8} if kind is FedSheafHN else {}),
    }
    sites = []
    for graph in graphs[:3]:
        sites += make_sites([graph], tmp_path / "sites", lambda: (make_model(), kind(**settings)), noisy())
    channel, trainer, strategy = BadChannel(sites), make_trainer(num_rounds=2), kind(**settings)

    trainer.fit(make_model(), federate(trainer, channel, strategy, relation_graph=Ring()), strategy)

    runs = [response for question, response in channel.responses if question.kind == "run"]
    assert {int(response.tensors["num_examples"]) for response in runs} == {1}
    accounts = [json.loads((site.folder / "privacy.json").read_text()) for site in sites]
    stages = 2 + (kind is FedSheafHN)
    assert [account["num_answers"] for account in accounts] == [stages] * 3  # what is resent has no noise of its own
    assert all(0 < account["epsilon"] < 30 for account in accounts)
