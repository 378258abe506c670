"""A federation of sites, reached through bytes, against the same one in process: every strategy, bit for bit."""

import pytest
from saving import SavesAfter
from sites import Absent, BadChannel, assert_same_clients, make_sites, server_of
from strategies.test_contract import STRATEGIES, tiny

from fl_lightning import SequentialExecutor
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.strategies import Kin, Pooled, SheafRidge
from fl_lightning.testing.federations import GROUPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum"),
    pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree"),
]
at_sites = [kind for kind in STRATEGIES if kind is not Pooled]  # which has all data in one place
every_strategy = pytest.mark.parametrize("kind", at_sites, ids=lambda kind: kind.__name__)


def quick(kind):
    strategy = tiny(kind)
    strategy.num_epochs = 1
    if hasattr(strategy, "groups"):
        strategy.groups = GROUPS[:3]  # which no site tells of
    return strategy


@pytest.fixture
def three(graphs, given_clients):
    return given_clients(graphs[:3])


@every_strategy
def test_loopback_is_the_run_in_process(kind, three, make_model, make_trainer, assert_same, tmp_path) -> None:
    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    expected = local.fit(make_model(kind), three, quick(kind))
    sites = make_sites(three.clients, tmp_path / "sites", lambda: (make_model(kind), quick(kind)))
    remote, strategy = make_trainer(num_rounds=2), quick(kind)

    data = federate(remote, LoopbackChannel(sites), strategy, relation_graph=Ring())
    result = remote.fit(make_model(kind), data, strategy)

    assert_same(result, expected)
    assert_same(server_of(remote), server_of(local))
    assert_same_clients(local, sites)
    assert [len(site.states) for site in sites] == [1, 1, 1]  # no state is left that nobody needs


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: Kin(common_share=0.5, validate_every=1),
        lambda: SheafRidge(num_neighbors=2, strength=0.8, validate_every=1),
    ],
    ids=["Kin", "SheafRidge"],
)
def test_trials_at_sites_choose_the_same(strategy, three, make_model, make_trainer, assert_same, tmp_path) -> None:
    local = make_trainer(num_rounds=3, executor=SequentialExecutor())
    expected = local.fit(make_model(), three, strategy())
    sites = make_sites(three.clients, tmp_path / "sites", lambda: (make_model(), strategy()))
    remote, built = make_trainer(num_rounds=3), strategy()

    result = remote.fit(make_model(), federate(remote, LoopbackChannel(sites), built), built)

    assert_same(result, expected)
    assert_same(server_of(remote), server_of(local))


@pytest.mark.filterwarnings("ignore:.*it is left out")
@every_strategy
def test_faults_on_the_way_and_a_resume_change_nothing(
    kind, three, make_model, make_trainer, assert_same, tmp_path
) -> None:
    """Duplicated, lost and late messages, an absent client, sites that are started again, a resume of the server."""
    absent, late = {(1, 2)}, {(0, 1)}
    local = make_trainer(num_rounds=3, executor=Absent(absent | late))
    expected = local.fit(make_model(kind), three, quick(kind))

    def start_sites():
        return make_sites(three.clients, tmp_path / "sites", lambda: (make_model(kind), quick(kind)))

    def fit(channel, num_rounds, ckpt_path=None):
        trainer, strategy = make_trainer(num_rounds=num_rounds), quick(kind)
        data = federate(trainer, channel, strategy, relation_graph=Ring())
        trainer.callbacks.append(SavesAfter(2, tmp_path / "v" / "two.ckpt"))
        return trainer, trainer.fit(make_model(kind), data, strategy, ckpt_path=ckpt_path)

    channel = BadChannel(start_sites(), absent=absent, late=late)

    def restart_before_round_1(round_idx):
        if round_idx == 1:
            channel.sites[:] = start_sites()

    channel.before_round = restart_before_round_1
    fit(channel, 3)  # goes on after the checkpoint: the sites' present states are not those of the checkpoint
    sites = start_sites()
    resumed, result = fit(LoopbackChannel(sites), 3, str(tmp_path / "v" / "two.ckpt"))

    assert channel.held_back
    assert_same(result, expected)
    assert_same(server_of(resumed), server_of(local))
    assert_same_clients(local, sites)
