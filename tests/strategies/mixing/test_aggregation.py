"""Robust aggregation: cases by hand, what a malicious client can and cannot do, and the strategies' use of it."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import Callback, Participation, Payload, SequentialExecutor, strategies
from fl_lightning.federation import Federation
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import SCAFFOLD, FedAux, FedAvg, FedDyn, FedPer, FedPub, FedRep, Kin
from fl_lightning.strategies.mixing import aggregation
from fl_lightning.strategies.mixing.aggregation import Aggregation, CoordinateMedian, Krum, NormClipping, TrimmedMean
from fl_lightning.strategies.mixing.base import Mixing

RULES = [
    CoordinateMedian(),
    TrimmedMean(trim_fraction=0.2),
    Krum(num_malicious=1),
    Krum(num_malicious=1, num_selected=3),
    NormClipping(max_norm=1.0),
    NormClipping(),
]
all_rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{vars(rule)}")
MIXING_STRATEGIES = sorted(
    {
        kind
        for kind in vars(strategies).values()
        if inspect.isclass(kind) and issubclass(kind, Mixing) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)


def apply(rule: Aggregation, mixing: list[list[float]], parameters: list[list[float]], received=None) -> list:
    parameters_CP = torch.tensor(parameters, dtype=torch.float64)
    received_CP = torch.zeros_like(parameters_CP) if received is None else torch.tensor(received, dtype=torch.float64)
    return rule(torch.tensor(mixing, dtype=torch.float64), parameters_CP, received_CP).tolist()


def random_case(num_clients: int, num_parameters: int, *, num_rows: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    parameters_CP = torch.randn(num_clients, num_parameters, generator=draw, dtype=torch.float64)
    received_CP = torch.randn(num_clients, num_parameters, generator=draw, dtype=torch.float64)
    mixing_RC = torch.rand(num_rows, num_clients, generator=draw, dtype=torch.float64)
    return mixing_RC / mixing_RC.sum(dim=1, keepdim=True), parameters_CP, received_CP


# ---------------------------------------------------------------- by hand


def test_weighted_median() -> None:
    parameters = [[-3.0, 4.0], [1.0, -1.0], [2.0, -5.0], [10.0, 0.5]]

    # first column: -3 (0.1), 1 (0.3), 2 (0.6); second: -5 (0.3), -1 (0.5: exactly half), 0.5
    assert apply(CoordinateMedian(), [[0.1, 0.2, 0.3, 0.4]], parameters) == [[2.0, -0.25]]
    # nobody but the last; and two clients that weigh nothing
    assert apply(CoordinateMedian(), [[0, 0, 0, 1], [0.5, 0, 0, 0.5]], parameters) == [[10.0, 0.5], [3.5, 2.25]]


@pytest.mark.parametrize("num_clients", [1, 2, 5, 6, 10, 12, 14, 20, 30, 49, 98, 100])
def test_with_equal_weights_the_median_is_the_plain_one(num_clients) -> None:
    _, parameters_CP, received_CP = random_case(num_clients, 7)
    equal_1C = torch.full((1, num_clients), 1 / num_clients, dtype=torch.float64)

    actual = CoordinateMedian()(equal_1C, parameters_CP, received_CP)

    torch.testing.assert_close(actual[0], parameters_CP.quantile(0.5, dim=0), rtol=1e-14, atol=1e-15)


def test_trimmed_mean() -> None:
    parameters = [[-9.0, 4.0], [1.0, 2.0], [2.0, -8.0], [4.0, 1.0], [100.0, -2.0]]
    weights = [0.1, 0.2, 0.3, 0.2, 0.2]
    # first column without -9 and 100; second without -8 (0.3) and 4 (0.1)
    expected = [(0.2 * 1 + 0.3 * 2 + 0.2 * 4) / 0.7, (0.2 * 2 + 0.2 * 1 - 0.2 * 2) / 0.6]

    assert apply(TrimmedMean(trim_fraction=0.2), [weights], parameters)[0] == pytest.approx(expected, rel=1e-14)
    # two of five at either end leave the median, whatever its weight
    assert apply(TrimmedMean(trim_fraction=0.3), [weights], parameters)[0] == pytest.approx([2.0, 1.0], rel=1e-14)
    # a row that takes something of three clients trims among the three: 1, 4, 100 and 1, 2, -2
    row = [0, 0.5, 0, 0.25, 0.25]
    assert apply(TrimmedMean(trim_fraction=0.2), [row], parameters)[0] == pytest.approx([4.0, 1.0], rel=1e-14)
    # two clients have no middle
    row = [0, 0.5, 0, 0, 0.5]
    assert apply(TrimmedMean(trim_fraction=0.4), [row], parameters)[0] == pytest.approx([50.5, 0.0], rel=1e-14)


def test_krum() -> None:
    parameters = [[0.0], [1.0], [1.5], [10.0], [-20.0]]
    weights = [0.1, 0.2, 0.3, 0.2, 0.2]
    # each client's two nearest: 1 + 2.25, 0.25 + 1, 0.25 + 2.25, 72.25 + 81, 400 + 441
    scores = aggregation.krum_scores(torch.tensor(parameters), 1)

    torch.testing.assert_close(scores, torch.tensor([3.25, 1.25, 2.5, 153.25, 841.0], dtype=torch.float64))
    assert apply(Krum(num_malicious=1), [weights], parameters) == [[1.0]]
    two = apply(Krum(num_malicious=1, num_selected=2), [weights, [0.5, 0, 0, 0.5, 0]], parameters)
    assert two[0] == pytest.approx([(0.2 * 1 + 0.3 * 1.5) / 0.5], rel=1e-14)
    assert two[1] == pytest.approx([1.25], rel=1e-14)  # a row without anyone chosen takes them alike


def test_krum_sees_distances_that_are_small_beside_the_parameters() -> None:
    parameters_CP = 1000 + 1e-3 * torch.tensor([[0.0], [1.0], [1.5], [10.0], [-20.0]])
    assert aggregation.krum_scores(parameters_CP, 1).argmin() == 1


def test_norm_clipping() -> None:
    received = [[1.0, 1.0], [1.0, 1.0], [2.0, 0.0]]
    parameters = [[4.0, 5.0], [0.4, 1.8], [2.0, -10.0]]  # updates (3, 4), (-0.6, 0.8), (0, -10)
    weights = [0.5, 0.25, 0.25]
    clipped = [[2.2, 2.6], [0.4, 1.8], [2.0, -2.0]]
    to_median = [[4.0, 5.0], [0.4, 1.8], [2.0, -5.0]]
    for max_norm, clients in ((2.0, clipped), (None, to_median), (100.0, parameters)):
        expected = [sum(w * client[i] for w, client in zip(weights, clients, strict=True)) for i in range(2)]
        actual = apply(NormClipping(max_norm=max_norm), [weights, [1, 0, 0]], parameters, received)
        assert actual[0] == pytest.approx(expected, rel=1e-14)
        assert actual[1] == pytest.approx(clients[0], rel=1e-14)


def test_norm_clipping_of_clients_that_did_not_move() -> None:
    assert apply(NormClipping(), [[0.5, 0.5, 0]], [[1.0], [1.0], [3.0]], [[1.0], [1.0], [1.0]]) == [[1.0]]


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_one_malicious_client_moves_the_mean_only(sign, seed) -> None:
    mixing_RC, parameters_CP, received_CP = random_case(7, 30, seed=seed, num_rows=3)
    mixing_RC = (mixing_RC + 1) / (mixing_RC + 1).sum(dim=1, keepdim=True)  # nobody has half of the weight
    parameters_CP[4] = sign * 1e6
    benign_BP = parameters_CP[[0, 1, 2, 3, 5, 6]]
    low_P, high_P = benign_BP.min(dim=0).values, benign_BP.max(dim=0).values

    for rule in RULES[:4]:
        found_RP = rule(mixing_RC, parameters_CP, received_CP)
        assert ((found_RP >= low_P) & (found_RP <= high_P)).all(), type(rule)
    clipped_RP = NormClipping(max_norm=1.0)(mixing_RC, parameters_CP, received_CP)
    assert (clipped_RP - mixing_RC @ received_CP).norm(dim=1).max() <= 1 + 1e-9
    assert (mixing_RC @ parameters_CP).abs().min() > 1e4


def test_without_anything_to_clip_or_trim_it_is_the_plain_mixing() -> None:
    mixing_RC, parameters_CP, received_CP = random_case(6, 40, num_rows=6)
    plain_RP = mixing_RC @ parameters_CP

    assert torch.equal(NormClipping(max_norm=1e9)(mixing_RC, parameters_CP, received_CP), plain_RP)
    torch.testing.assert_close(TrimmedMean(trim_fraction=0)(mixing_RC, parameters_CP, received_CP), plain_RP)
    everyone = Krum(num_malicious=0, num_selected=6)(mixing_RC, parameters_CP, received_CP)
    torch.testing.assert_close(everyone, plain_RP)


@all_rules
def test_equal_clients_stay_as_they_are(rule) -> None:
    parameters_CP = torch.tensor([[0.25, -3.0, 7.0]]).expand(6, 3)
    actual = rule(torch.full((2, 6), 1 / 6), parameters_CP, torch.zeros(6, 3) if vars(rule) == {} else parameters_CP)
    torch.testing.assert_close(actual, parameters_CP[:2])


@all_rules
@pytest.mark.parametrize("tied", [False, True])
def test_the_order_of_the_clients_plays_no_part(rule, tied) -> None:
    order = torch.tensor([4, 0, 6, 3, 1, 5, 2])
    mixing_CC, parameters_CP, received_CP = random_case(7, 50, num_rows=7)
    if tied:  # many equal coordinates, though never two equal clients
        parameters_CP[:, :40] = parameters_CP[:, :40].round()
    common_1C = mixing_CC[:1]

    torch.testing.assert_close(
        rule(common_1C[:, order], parameters_CP[order], received_CP[order]),
        rule(common_1C, parameters_CP, received_CP),
        rtol=1e-12,
        atol=1e-12,
    )
    torch.testing.assert_close(
        rule(mixing_CC[order][:, order], parameters_CP[order], received_CP[order]),
        rule(mixing_CC, parameters_CP, received_CP)[order],
        rtol=1e-12,
        atol=1e-12,
    )


@all_rules
def test_columns_may_be_taken_in_parts(rule, monkeypatch) -> None:
    case = random_case(7, 50, num_rows=2)
    whole = rule(*case)
    monkeypatch.setattr(aggregation, "CHUNK_NUMBERS", 7 * 12)
    torch.testing.assert_close(rule(*case), whole, rtol=1e-14, atol=1e-15)


@all_rules
def test_the_parameters_type_and_values_are_kept(rule) -> None:
    mixing_RC, parameters_CP, received_CP = (tensor.float() for tensor in random_case(7, 5))
    before = parameters_CP.clone(), received_CP.clone()
    assert rule(mixing_RC.double(), parameters_CP, received_CP).dtype == torch.float32
    assert torch.equal(parameters_CP, before[0])
    assert torch.equal(received_CP, before[1])


# ---------------------------------------------------------------- in strategies


class Watch(Aggregation):
    """Plain mixing that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, mixing_RC: Tensor, parameters_CP: Tensor, received_CP: Tensor) -> Tensor:
        self.seen.append((mixing_RC, parameters_CP.clone(), received_CP.clone()))
        return mixing_RC.to(parameters_CP) @ parameters_CP


def set_up(algorithm: Mixing, dtype: torch.dtype = torch.float32) -> Mixing:
    parameters = {"convs.0": torch.tensor([[1.0, -1.0]], dtype=dtype), "head.0": torch.tensor(0.5, dtype=dtype)}
    algorithm.setup(
        Federation(
            num_clients=4,
            training_clients=(0, 1, 2, 3),
            num_features=1,
            parameters=parameters,
            seed=0,
            device=torch.device("cpu"),
        )
    )
    return algorithm


def answers(dtype: torch.dtype = torch.float32) -> Payload:
    return Payload(
        clients=(0, 1, 3),
        parameters={
            "convs.0": torch.tensor([[[2.0, 0.0]], [[-3.0, 5.0]], [[1.0, 1e6]]], dtype=dtype),
            "head.0": torch.tensor([0.25, -1.0, -1e6], dtype=dtype),
        },
        num_examples=torch.tensor([1, 3, 2]),
    )


@pytest.mark.parametrize("kind", MIXING_STRATEGIES, ids=lambda kind: kind.__name__)
def test_every_mixing_strategy_takes_an_aggregation_or_has_no_such_setting(kind) -> None:
    rule = CoordinateMedian()
    if "aggregation" not in inspect.signature(kind).parameters:
        assert kind().aggregation is None
        return
    shares = {"common_share": 0.5} if getattr(kind(), "common_share", 0) is None else {}
    assert kind(aggregation=rule, **shares).aggregation is rule
    assert kind().aggregation is None


def test_none_is_the_weighted_mean_to_the_last_bit() -> None:
    strategy = set_up(FedAvg())
    upload = answers()
    weights = torch.tensor([1 / 6, 3 / 6, 2 / 6], dtype=torch.float64)
    expected = {name: weights.float() @ tensor.reshape(3, -1) for name, tensor in upload.parameters.items()}

    strategy.aggregate(strategy.stages(0)[0], upload)

    for name, tensor in strategy.models.items():
        assert torch.equal(tensor.flatten(), expected[name].flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fedavg_with_the_median(dtype) -> None:
    strategy = set_up(FedAvg(aggregation=CoordinateMedian()), dtype)

    strategy.aggregate(strategy.stages(0)[0], answers(dtype))

    # weights 1/6, 1/2, 1/3: -3 (1/2), then 1; 0 (1/6), then 5 (2/3); -1e6 (1/3), then -1 (5/6)
    assert strategy.models["convs.0"].flatten().tolist() == [-1.0, 5.0]
    assert strategy.models["head.0"].tolist() == [-1.0]
    assert all(tensor.dtype == dtype for tensor in strategy.models.values())


@pytest.mark.filterwarnings("ignore:strategy.aggregation withstands wrong parameters")
@pytest.mark.parametrize("kind", [FedAvg, FedPer, FedPub, FedAux, FedDyn], ids=lambda kind: kind.__name__)
def test_the_rule_sees_what_was_received_and_sent(kind, federation, make_model, make_trainer) -> None:
    sent: list[Payload] = []
    arrived: list[Payload] = []

    class Keep(Callback):
        def on_send(self, trainer: Any, stage: Any, payload: Any) -> None:
            parameters = {name: tensor.clone() for name, tensor in payload.parameters.items()}
            sent.append(Payload(clients=payload.clients, parameters=parameters))

        def on_stage_end(self, trainer: Any, stage: Any, payload: Payload) -> None:
            arrived.append(payload)

    rule = Watch()
    trainer = make_trainer(callbacks=Keep(), participation=Participation(num_clients=3), precision="64-true")
    result = trainer.fit(make_model(kind), federation, kind(aggregation=rule))
    plain = make_trainer(participation=Participation(num_clients=3), precision="64-true").fit(
        make_model(kind), federation, kind()
    )

    assert len(rule.seen) == len(arrived) == 3
    for (mixing_RC, sent_CP, received_CP), down, up in zip(rule.seen, sent, arrived, strict=True):
        assert tuple(mixing_RC.shape) == (3 if trainer.run.strategy.personalized else 1, 3)
        for matrix_CP, payload in ((received_CP, down), (sent_CP, up)):
            expected = torch.cat([tensor.flatten(1) for tensor in payload.rows(up.clients).parameters.values()], dim=1)
            assert torch.equal(matrix_CP, expected)
    assert result["test/loss"] == pytest.approx(plain["test/loss"], rel=1e-6)


class Shout(Callback):
    """Client 1 sends a million for every parameter."""

    def on_upload(self, trainer: Any, stage: Any, payload: Payload) -> Payload:
        row = payload.clients.index(1)
        for tensor in payload.parameters.values():
            tensor[row] = 1e6
        return payload


def test_what_a_rule_does_not_protect_is_said(federation, make_model, make_trainer) -> None:
    with pytest.warns(
        UserWarning,
        match=r"wrong parameters, but SCAFFOLD also trusts the client outputs "
        r".*: gradients",
    ):
        make_trainer(num_rounds=1).fit(make_model(), federation, SCAFFOLD(aggregation=CoordinateMedian()))


def test_stages_without_parameters_need_no_rule(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(make_model(), federation, FedRep(aggregation=CoordinateMedian()))
    assert trainer.run.round_idx == 1


@pytest.mark.filterwarnings("ignore:client-0 in round")
def test_feddyn_learns_nothing_from_a_model_that_the_rule_leaves_out(quadratics) -> None:
    class Shouts(Callback):
        def on_upload(self, trainer: Any, stage: Any, payload: Payload) -> Payload:
            payload.parameters["x"][0] = 1e6
            return payload

    strategy = FedDyn(regularization=0.5, aggregation=CoordinateMedian())
    quadratics(strategy, SequentialExecutor(), num_rounds=2, callbacks=Shouts())
    assert float(strategy.sent["x"].abs()) < 100


@pytest.mark.filterwarnings("ignore:client-01 in round")
@pytest.mark.filterwarnings("ignore:strategy.aggregation withstands wrong parameters")
@pytest.mark.parametrize("kind", [FedAvg, FedPub], ids=lambda kind: kind.__name__)
def test_a_federation_withstands_a_malicious_client(kind, federation, make_model, make_trainer) -> None:
    sizes = {}
    rules: dict[str, Aggregation | None] = {
        "median": CoordinateMedian(),
        "trimmed": TrimmedMean(trim_fraction=0.2),
        "krum": Krum(num_malicious=1),
        "clipped": NormClipping(),
        "none": None,
    }
    for name, rule in rules.items():
        trainer = make_trainer(callbacks=Shout())
        build = functools.partial(kind, similarity_temperature=0.1) if kind is FedPub else kind
        trainer.fit(make_model(kind), federation, build(aggregation=rule))
        sizes[name] = max(float(tensor.abs().max()) for tensor in trainer.run.strategy.models.values())

    assert sizes.pop("none") > 1e4
    assert max(sizes.values()) < 100


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Kin(aggregation=CoordinateMedian()),
            r"strategy\.common_share is null, .*\.aggregation ranks",
        ),
        (lambda: TrimmedMean(trim_fraction=0.5), r"TrimmedMean\.trim_fraction .* in \[0, 0\.5\), got 0\.5"),
        (lambda: TrimmedMean(trim_fraction=-0.1), r"TrimmedMean\.trim_fraction .* got -0\.1"),
        (lambda: Krum(num_malicious=-1), r"Krum\.num_malicious must not be negative, got -1"),
        (lambda: Krum(num_selected=0), r"Krum\.num_selected must be at least 1, got 0"),
        (lambda: NormClipping(max_norm=0.0), r"NormClipping\.max_norm must be positive, or null .*, got 0\.0"),
        (lambda: NormClipping(max_norm=float("nan")), r"NormClipping\.max_norm must be positive"),
        (
            lambda: Krum(num_malicious=2).check(6),
            r"Krum\.num_malicious=2 needs at least 7 clients in every round, but there are 6: lower it to at most 1, "
            r"or let more clients take part \(trainer\.participation\)",
        ),
        (
            lambda: Krum(num_malicious=0).check(2),
            r"at least 3 clients .* there are 2: let more clients take part",
        ),
        (lambda: Krum(num_malicious=1, num_selected=5).check(5), r"Krum\.num_selected=5 of 5 clients .* at most 4"),
    ],
)
def test_settings_out_of_range(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_too_few_clients_are_refused_before_training_and_make_a_round_failed(
    federation, make_model, make_trainer
) -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"Krum\.num_malicious=2 needs at least 7 .* there are 5"):
        trainer.fit(make_model(), federation, FedAvg(aggregation=Krum(num_malicious=2)))
    assert not trainer.started
    trainer = make_trainer(participation=Participation(num_clients=4))
    with pytest.raises(ValueError, match=r"Krum\.num_malicious=1 needs at least 5 .* there are 4"):
        trainer.fit(make_model(), federation, FedAvg(aggregation=Krum(num_malicious=1)))
    assert not trainer.has_run
    missing = Participation(dropout_probability=0.2, max_failed_rounds=9)
    trainer = make_trainer(participation=missing, num_rounds=9)
    trainer.fit(make_model(), federation, FedAvg(aggregation=Krum(num_malicious=1)))
    assert {(row["num_participants"] < 5, row["failed_round"]) for row in trainer.run.history} == {
        (True, 1),
        (False, 0),
    }
    missing.max_failed_rounds = 1
    with pytest.raises(TooFewUpdates, match=r"fewer than 5 clients responded \(strategy\.aggregation needs as many\)"):
        trainer.fit(make_model(), federation, FedAvg(aggregation=Krum(num_malicious=1)))
