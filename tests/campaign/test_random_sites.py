"""Random settings of every strategy come to the same at sites as in one process: metrics, server and clients."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from campaign.draws import CASES, Drawn
from campaign.record import Record
from saving import SavesAfter
from sites import BadChannel, assert_same_clients, make_sites, server_of

from fl_lightning import Callback, ClientModule, SequentialExecutor
from fl_lightning.callbacks import EarlyStopping, FederatedCheckpoint
from fl_lightning.relations import Ring
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.strategies import Pooled, Strategy
from fl_lightning.tasks import Drawing

NUM_DRAWS, NUM_ROUNDS = 2, 4
AT_SITES = [case for case in CASES if case[0] is not Pooled]  # which no site takes part in

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # many settings warn, as they should


@pytest.mark.parametrize("number", range(NUM_DRAWS))
@pytest.mark.parametrize(("kind", "on"), AT_SITES, ids=lambda part: getattr(part, "__name__", part))
def test_random_settings_at_sites(
    kind: type[Strategy],
    on: str,
    number: int,
    seed: int,
    record: Record,
    federation: Any,
    make_trainer: Any,
    assert_same: Any,
    tmp_path: Path,
) -> None:
    draw = random.Random(f"{seed}, {kind.__name__}, {on}, {number}, sites")
    drawn = Drawn(kind=kind, on=on, num_rounds=NUM_ROUNDS, at_sites=True, draw=draw)
    data = drawn.data(federation, tmp_path)
    stops_early, channel = draw.random() < 0.3, draw.choice((LoopbackChannel, BadChannel))
    print(stops_early, channel)

    def trainer(executor: Any = None) -> Any:
        callbacks = [EarlyStopping(patience=1)] if stops_early else []
        return make_trainer(executor=executor, participation=drawn.participation(), callbacks=callbacks, **drawn.given)

    def at_site() -> tuple[ClientModule, Strategy]:
        client = drawn.model()
        client.take_task(data.task)
        return client, drawn.strategy()

    def fit_at_sites(ckpt_path: Path | None, *callbacks: Callback) -> tuple[Any, Any, Any]:
        sites = make_sites(data.clients, tmp_path / "sites", at_site, drawing=Drawing(**drawn.batches))
        remote, strategy = trainer(), drawn.strategy()
        remote.callbacks += callbacks
        there = federate(remote, channel(sites), strategy, relation_graph=Ring(), num_outputs=data.registry.num_outputs)
        result = remote.fit(drawn.model(), there, strategy, ckpt_path=ckpt_path and str(ckpt_path))
        return remote, result, sites

    survived = False
    try:
        local = trainer(SequentialExecutor())
        try:
            expected = local.fit(drawn.model(), data, drawn.strategy())
        except ValueError as refused:
            said = (
                f"{re.escape(str(refused))}|sites that cannot join as a client: .*ValueError"  # each says why at home
            )
            with pytest.raises(ValueError, match=said):
                fit_at_sites(None)
            survived = True
            return
        saved = tmp_path / "elsewhere" / "two.ckpt"
        for ckpt_path in (None, saved) if local.run.round_idx >= 2 else (None,):
            remote, result, sites = fit_at_sites(ckpt_path, FederatedCheckpoint(), SavesAfter(2, saved))
            assert_same(result, expected)
            assert_same(server_of(remote), server_of(local))
            assert_same_clients(local, sites)
        survived = True
    finally:
        record.count(f"random settings at sites, {on}", survived=survived)
