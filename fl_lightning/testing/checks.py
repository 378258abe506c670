"""What every strategy must keep, a function each; ``CHECKS`` has them in order.

A check takes the runs of a strategy and raises an AssertionError that says what to do. Most look at the same few runs.
"""

import copy
import dataclasses
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.executors import SequentialExecutor
from fl_lightning.round.disclosure import describes, what_leaves
from fl_lightning.run.joining import joined
from fl_lightning.strategies import Pooled
from fl_lightning.strategies.hooks import WrongHook, refuse_misnamed_hooks
from fl_lightning.strategies.mixing.base import WrongMixing
from fl_lightning.testing.comparison import assert_same, attributes, learns
from fl_lightning.testing.runs import FAILING, NUM_CLIENTS, NUM_ROUNDS, StrategyRun, StrategyRuns, rows_of

Check = Callable[[StrategyRuns], None]


def check_settings_stay_as_given(runs: StrategyRuns) -> None:
    """Settings are what was given, in a copy, in a pickle, after ``dataclasses.replace`` and after a run."""
    given = settings_of(runs.strategy)
    kind = type(runs.strategy)
    copies = {"copy.deepcopy": copy.deepcopy(runs.strategy), "a run": runs.everyone.strategy}
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind:  # one that can be imported
        copies["pickle"] = pickle.loads(pickle.dumps(runs.strategy))
    if "__dataclass_fields__" in vars(kind):
        copies["dataclasses.replace"] = dataclasses.replace(runs.strategy)
    for after, strategy in copies.items():
        result = settings_of(strategy)
        changed = [name for name, value in given.items() if not is_same_setting(result[name], value)]
        assert not changed, (
            f"{', '.join(changed)} differ after {after}: leave settings as they are given, and keep what follows from "
            "them in attributes made in setup"
        )


def check_hooks_and_mixing(runs: StrategyRuns) -> None:
    """No method is a misnamed hook, and W has the right shape and rows that sum to one."""
    try:
        refuse_misnamed_hooks(runs.strategy)
        assert runs.sequential
    except (WrongMixing, WrongHook) as error:
        raise AssertionError(str(error)) from error


def check_metrics_are_finite_and_models_trained(runs: StrategyRuns) -> None:
    """All metrics are finite, and the parameters that the stages train have moved."""
    run = runs.sequential
    for row in run.history:
        endless = [name for name, value in row.items() if not math.isfinite(value)]
        assert not endless, f"{', '.join(endless)} are not finite in round {row['round']:g}"
    state = run.trainer.run.executor.state()
    endless = [name for name, tensor in state.tensors().items() if not tensor.isfinite().all()]
    assert not endless, f"the clients' {', '.join(endless)} are not finite"
    parameters = run.trainer.run.architectures[0]  # without running statistics that are kept local
    named = {name for name in parameters for stage in run.strategy.stages(0) if stage.trains(name)}
    still = sorted(named - run.seen.trained)
    assert not still, f"{', '.join(still)} are the initial ones after {NUM_ROUNDS} rounds: see `trained` of the stages"


def check_executors_agree(runs: StrategyRuns) -> None:
    """The sequential and the stacked executor come to the same models, server, scores and metrics."""
    advice = (
        "the stacked executor computes all clients at once, so what a stage computes must be a pure function of one "
        "client, its batch and its context, and its random draws must come from `context` or `batch.key`"
    )
    for one, other in ((runs.sequential, runs.stacked), (runs.everyone_sequential, runs.everyone)):
        for num_rounds, expected in one.seen.states.items():
            result = other.seen.states[num_rounds]
            for part in ("parameters", "signals"):
                assert_same(result["clients"][part], expected["clients"][part], tolerance=1e-9, advice=advice)
            assert_same(result["strategy"], expected["strategy"], tolerance=1e-9, advice=advice)
            scores = (run.seen.scores[num_rounds] for run in (other, one))
            assert_same(*scores, tolerance=1e-6, advice=advice)  # scores are float32
        assert_same(other.history, one.history, tolerance=1e-6, advice=advice)
        assert_same(other.result, one.result, tolerance=1e-6, advice=advice)


def check_server_state_is_complete(runs: StrategyRuns) -> None:
    """A new server that loads a checkpoint of any round is what the one was that wrote it."""
    run = runs.sequential
    for num_rounds, path in run.seen.checkpoints.items():
        state = torch.load(path, map_location="cpu", weights_only=True)["strategy"]
        loaded = load(runs, run, state)
        assert_same(
            attributes(loaded),
            run.seen.attributes[num_rounds],
            advice=f"after round {num_rounds} a server that loads the checkpoint differs from the one that wrote it: "
            "name in server_state what lives on between rounds; begin the names of attributes with an underscore that "
            "are made anew whenever they are needed",
        )
        shared = memory_of(loaded.state_dict()) & memory_of(state)
        assert not shared, "load_state_dict must copy the tensors that it is given"


def check_state_replaces_a_later_one(runs: StrategyRuns) -> None:
    """A server that has gone on and loads an earlier state sends what it sent then."""
    run = runs.sequential
    for num_rounds, state in run.seen.states.items():
        first = next((seen for seen in run.seen.stages if seen.round_idx == num_rounds), None)
        if first is None or first.sent is None or num_rounds == NUM_ROUNDS:
            continue
        strategy = load(runs, run, run.seen.states[NUM_ROUNDS]["strategy"])
        for clients in (run.trainer.run.training_clients, first.sent.clients):
            strategy.evaluations(clients)
            strategy.configure(first.stage, clients)
        strategy.load_state_dict(state["strategy"])
        payload = strategy.configure(first.stage, first.sent.clients)
        assert payload is not None
        assert_same(
            payload.named(),
            first.sent.named(),
            advice="after load_state_dict the server still uses what it had: forget there what is computed from the "
            "state and kept",
        )


def check_resume_is_exact(runs: StrategyRuns) -> None:
    """A run that is resumed from the checkpoint of any round gives the same results in all later rounds."""
    resumed_after = [(runs.sequential, SequentialExecutor(), r) for r in range(1, NUM_ROUNDS)]
    for run, executor, num_rounds in (*resumed_after, (runs.stacked, None, NUM_ROUNDS // 2)):
        with torch.random.fork_rng([]):
            resumed = runs.run(executor, participation=runs.busy(), resumed=run.seen.checkpoints[num_rounds])
        advice = (
            f"a run that is resumed after round {num_rounds} differs: name in server_state what lives on between rounds"
        )
        sent = [seen for seen in run.seen.stages if seen.round_idx >= num_rounds]
        for again, before in zip(resumed.seen.stages, sent, strict=True):
            where = f"{advice} (sent in stage {before.stage.name!r} of round {before.round_idx})"
            assert (again.sent is None) == (before.sent is None), where
            if again.sent is not None and before.sent is not None:
                assert again.sent.clients == before.sent.clients, where
                assert_same(again.sent.named(), before.sent.named(), advice=where)
        for later, state in resumed.seen.states.items():
            assert_same(state, run.seen.states[later], advice=f"{advice} (state after round {later})")
        assert_same(resumed.result, run.result, advice=advice)


def check_same_seed_gives_the_same(runs: StrategyRuns) -> None:
    """The seed alone decides: not the state of the global random generators."""
    advice = (
        "two runs of one seed differ: draw random numbers from keys (`federation.keys`, `batch.key`, "
        "`kernels.randomness.generator`) and not from torch's global generator"
    )
    assert_same(runs.repeated.result, runs.everyone.result, advice=advice)
    assert_same(runs.repeated.history, runs.everyone.history, advice=advice)


def check_failing_client_is_left_out(runs: StrategyRuns) -> None:
    """If a client fails, all others and the server are as if it had not taken part."""
    if isinstance(runs.strategy, Pooled):  # pooled data cannot leave out a client
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a client failed
        failing, without = runs.failing(), runs.without()
    others = [client for client in range(NUM_CLIENTS) if client != FAILING]
    advice = "aggregate must use only the clients of `upload`, which lacks those that failed, and weight these"
    states = [run.trainer.run.executor.state() for run in (failing, without)]
    for part in ("parameters", "extras"):
        result, expected = (rows_of(dict(getattr(state, part)), others) for state in states)
        assert_same(result, expected, tolerance=1e-6, advice=advice)
    servers = (run.strategy.state_dict() for run in (failing, without))
    assert_same(*servers, tolerance=1e-6, advice=advice)


def check_uploads_are_as_declared(runs: StrategyRuns) -> None:
    """Uploads have what the stages declare, with a detached row for each client, ascending."""
    for seen in (*runs.sequential.seen.stages, *runs.stacked.seen.stages):
        upload, stage = seen.upload, seen.stage
        expected = ("flat",) if stage.flat else stage.upload
        assert tuple(upload.parameters) == tuple(expected), f"stage {stage.name!r} has sent {list(upload.parameters)}"
        names = {name if name in stage.client_outputs else name.partition("/")[0] for name in upload.extras}
        assert not upload.clients or names == set(stage.client_outputs), (
            f"stage {stage.name!r} has sent {sorted(names)}"
        )
        assert upload.clients == tuple(sorted(upload.clients)), "clients of an upload ascend"
        examples = [runs.data.clients[client].num_examples for client in upload.clients]
        assert upload.num_examples is None or upload.num_examples.tolist() == examples, "num_examples is wrong"
        assert not seen.shared_memory, f"the clients' {seen.shared_memory} share memory with what they sent"


def check_payloads_are_not_written_to(runs: StrategyRuns) -> None:
    """Neither side writes into the tensors of the other."""
    for seen in (*runs.sequential.seen.stages, *runs.stacked.seen.stages):
        where = f"in stage {seen.stage.name!r} of round {seen.round_idx}"
        assert not seen.clients_wrote, f"clients write into {seen.clients_wrote} of the payload {where}: copy it first"
        assert not seen.server_wrote, f"aggregate writes into {seen.server_wrote} of the upload {where}: copy it first"


def check_communication_is_described(runs: StrategyRuns) -> None:
    """The ledger can say in words what leaves a client; what clients send each other is counted for each of them."""
    names = list(runs.sequential.trainer.run.architectures[0])
    for seen in runs.sequential.seen.stages:
        stage = seen.stage
        silent = [name for name, signal in stage.client_outputs.items() if not describes(signal)]
        assert not silent, (
            f"stage {stage.name!r} sends {', '.join(silent)}, and nothing says what that is: give the function that "
            "computes it a docstring, whose first line is written beside the bytes in communication.csv"
        )
        assert not seen.upload.tensors() or what_leaves(stage, names)
        if seen.peer_bytes is not None:
            is_count = [isinstance(count, int) and count >= 0 for count in seen.peer_bytes]
            wanted = "peer_bytes gives a whole number of bytes for each client of the upload"
            assert is_count == [True] * len(seen.upload.clients), f"{wanted}, got {list(seen.peer_bytes)}"


def check_server_metrics_are_named(runs: StrategyRuns) -> None:
    """What ``metrics`` returns are numbers under ``server/...``, and says in a docstring what they are."""
    for run in (runs.sequential, runs.everyone):
        for name, value in run.strategy.metrics().items():
            assert name.startswith("server/"), f"metrics() returns {name!r}: begin its name with server/"
            assert isinstance(value, int | float), f"{name} is a {type(value).__name__}: give a number"
    assert type(runs.strategy).metrics.__doc__, "give metrics() a docstring that says what its metrics are"


def check_main_evaluation_is_of_the_models_for_the_clients(runs: StrategyRuns) -> None:
    """``evaluations`` scores under the empty prefix what ``model_for`` gives, for any clients in any order."""
    strategy = runs.everyone.strategy
    model, main = strategy.model_for((3, 1)), strategy.evaluations((3, 1))[""].payload
    evaluated = main if main is not None and main.parameters else None  # client outputs are for a rule of prediction
    assert (model is None) == (evaluated is None), "model_for and evaluations do not agree whose models are the result"
    if model is not None and evaluated is not None:
        assert model.clients == evaluated.clients == (3, 1), "the models are not those of the clients asked for"
        assert_same(dict(model.parameters), dict(evaluated.parameters))


def check_evaluation_changes_nothing(runs: StrategyRuns) -> None:
    """To score the models twice gives the same, and leaves clients and server as they are."""
    for run in (runs.everyone_sequential, runs.everyone):
        before = copy.deepcopy(run.trainer.state_dict())
        metrics, again = (run.trainer.evaluate(run.trainer.run.training_clients) for _ in range(2))
        assert_same(again, metrics, advice="a second evaluation gives something else")
        assert_same(run.trainer.state_dict(), before, advice="an evaluation must not change the state")


def check_checkpoint_scores_as_reported(runs: StrategyRuns) -> None:
    """The checkpoint of the best round scores and predicts on test what the run reported."""
    run = runs.stacked
    path = str(run.seen.checkpoints[int(run.result["best_round"]) + 1])
    trainer = runs.trainer(participation=runs.busy())
    result = trainer.test(*runs.parts(), ckpt_path=path)
    advice = "a checkpoint does not score as the run that wrote it"
    assert_same(result, {name: run.result[name] for name in result}, tolerance=1e-6, advice=advice)
    predicted = trainer.predict(*runs.parts(), ckpt_path=path)
    if "test/acc" in run.result:
        right = []
        for client, predicted_NK in predicted.items():
            local = runs.data.clients[client]
            right.append((predicted_NK.argmax(dim=1) == local.y_N)[local.test_mask_N].double().mean())
        assert abs(float(torch.stack(right).mean()) - run.result["test/acc"]) < 1e-6, "predictions are of other models"


def check_unseen_clients_do_not_train_the_server(runs: StrategyRuns) -> None:
    """Clients that join at the end get models of their own; neither the other clients nor the server change."""
    for run in (runs.sequential, runs.stacked):
        new, old = run.trainer.run.unseen_clients, run.trainer.run.training_clients
        assert run.trainer.run.scores["unseen/"].clients == tuple(new)
        last, best = (run.seen.states[r] for r in (len(run.history), int(run.result["best_round"]) + 1))
        after, selected = run.trainer.run.executor.state().parameters, last["clients"]
        trained = [client for client in selected["clients"] if client in old]
        rows = [selected["clients"].index(client) for client in trained]
        moved = [n for n, before in selected["parameters"].items() if not torch.equal(after[n][trained], before[rows])]
        assert not moved, f"{', '.join(moved)} of clients that had trained before changed when others joined"
        server = run.seen.joined
        for name, part in best["strategy"].items():
            if learns(getattr(run.strategy, name, None)):
                assert_same(server[name], part, advice=f"{name} was trained when unseen clients joined: see onboard")
            else:
                only_rows_of(new, server[name], part, name)


def check_joining_is_as_being_held_out(runs: StrategyRuns) -> None:
    """Who joins after the training gets the model of a client that was held out, unless nobody can join."""
    if runs.strategy.needs_cross_edges or runs.data.registry.own:
        return
    before, expected = runs.without_last(), runs.last_held_out()
    run, name = before.trainer.run, runs.data.registry.names[-1]
    run.round_idx = int(before.result["best_round"]) + 1
    run.strategy.load_state_dict(copy.deepcopy(before.seen.states[run.round_idx]["strategy"]))
    kept, relation_CC = copy.deepcopy(run.strategy.state_dict()), runs.data.relation_CC
    neighbors = None if relation_CC is None else dict(zip(run.registry.names, relation_CC[-1].tolist(), strict=False))
    try:
        _, scores = joined(run, runs.data.clients[-1], neighbors, None)
    except (ValueError, IndexError, KeyError, RuntimeError) as error:
        if not run.strategy.takes_unseen_clients:
            return
        raise AssertionError(
            f"{name} cannot join after the training ({type(error).__name__}: {error}): what the server keeps of each "
            "client has a row for each (the first dimension), or set takes_unseen_clients = False in the class"
        ) from error
    assert_same(
        scores,
        {key.removeprefix("unseen/"): value for key, value in expected.result.items() if key.startswith("unseen/")},
        tolerance=1e-6,
        advice=f"{name} joins after the training otherwise than if it had been held out",
    )
    assert_same(run.strategy.state_dict(), kept, advice="the server of the run changed when somebody joined")


def only_rows_of(new: tuple[int, ...], now: Any, then: Any, path: str) -> None:
    """Refuse a state that differs in more than the rows of unseen clients."""
    if isinstance(then, Mapping | list | tuple):
        for key in then if isinstance(then, Mapping) else range(len(then)):
            only_rows_of(new, now[key], then[key], f"{path}/{key}")
        return
    if isinstance(then, Tensor) and then.dim() and len(then) == NUM_CLIENTS:
        old = [client for client in range(len(then)) if client not in new]
        now, then = now[old], then[old]
    assert_same({path: now}, {path: then}, advice="what the server knows of others changed when unseen clients joined")


#: All checks, those that most others rest on first.
CHECKS: tuple[Check, ...] = (
    check_hooks_and_mixing,
    check_settings_stay_as_given,
    check_metrics_are_finite_and_models_trained,
    check_executors_agree,
    check_server_state_is_complete,
    check_state_replaces_a_later_one,
    check_resume_is_exact,
    check_same_seed_gives_the_same,
    check_failing_client_is_left_out,
    check_uploads_are_as_declared,
    check_payloads_are_not_written_to,
    check_communication_is_described,
    check_server_metrics_are_named,
    check_main_evaluation_is_of_the_models_for_the_clients,
    check_evaluation_changes_nothing,
    check_checkpoint_scores_as_reported,
    check_unseen_clients_do_not_train_the_server,
    check_joining_is_as_being_held_out,
)


def settings_of(strategy: Any) -> dict[str, Any]:
    """The settings of a strategy, by name."""
    return {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}


def is_same_setting(result: Any, given: Any) -> bool:
    """Whether two values of a setting are equal, or objects of one class with equal attributes."""
    if type(result) is not type(given):
        return False
    return bool(result == given) or (hasattr(given, "__dict__") and vars(result) == vars(given))


def load(runs: StrategyRuns, run: StrategyRun, state: Mapping[str, Any]) -> Any:
    """A new copy of the strategy that is set up as in a run and has loaded a state."""
    _, _, strategy = runs.parts()
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")  # the run has warned of what there is
        strategy.setup(run.strategy.federation)
    strategy.load_state_dict(state)
    return strategy


def memory_of(state: Any) -> set[int]:
    """Memory addresses of the tensors of a state."""
    if isinstance(state, Tensor):
        return {state.untyped_storage().data_ptr()} if state.numel() else set()
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return set().union(*map(memory_of, parts))
