"""What a report says of the bytes, from rounds that are known."""

from collections.abc import Callable
from typing import Any

import pytest
from study_pool import HerePool, invented

from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.runner import Runner
from fl_lightning.study.schema import WrongStudy
from fl_lightning.study.store import Store
from fl_lightning.study.traffic import traffic

HISTORY = ["val/acc", "comm/bytes_total", "comm/bytes_busiest"]
#: Validation of two evaluated rounds, and megabytes of each; FedAvg comes near to Local's best only at last.
ROUNDS = {"Local": ([0.80, 0.70], 0.0), "FedAvg": ([0.60, 0.795], 2.0)}


def known(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
    actual = invented(arguments)
    (method,) = (argument.partition("=")[2] for argument in arguments if argument.startswith("--strategy="))
    values, megabytes = ROUNDS[method]
    best = values.index(max(values))
    actual["result"]["val/acc"] = max(values)
    actual["result"] |= {"test/acc": 0.5, "test/acc_weighted": 0.25, "best_round": float(best)}
    actual["clients"]["test"] = [0.5, 0.5]
    actual["rounds"] = {
        "round": [0.0, 1.0],
        "val/acc": values,
        "comm/bytes_total": [1e6 * megabytes, 2e6 * megabytes],
        "comm/bytes_busiest": [1e5 * megabytes, 2e5 * megabytes],
    }
    return actual


def progress(study: Study) -> Progress:
    with HerePool(train=known) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    return Progress(study, Store(study.results))


def test_bytes_to_the_chosen_round_and_to_the_target(make_study: Callable[..., Study]) -> None:
    study = make_study(tuning=None, cases={"plain": {}}, history=HISTORY, traffic={"target": "Local"})

    lines = traffic(progress(study)).splitlines()

    assert lines[0] == "**plain**"
    head = ["method", "test", "by examples", "MB, all", "MB, busiest", "MB to the target", "reached in"]
    assert [run.strip() for run in lines[2].strip("|").split("|")] == head
    assert [run.strip() for run in lines[4].strip("|").split("|")] == [
        "Local",
        "50.0 ± 0.0",
        "25.0",
        "0",
        "0",
        "0",
        "2 of 2",
    ]
    assert [run.strip() for run in lines[5].strip("|").split("|")][3:] == ["4", "0.4", "4", "2 of 2"]


def test_only_seeds_in_which_there_is_a_target_are_counted(make_study: Callable[..., Study]) -> None:
    def fails(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        has_failed = {"--strategy=Local", "--seed_everything=1"} <= set(arguments)
        return {"error": "too cold"} if has_failed else known(arguments)

    study = make_study(tuning=None, cases={"plain": {}}, history=HISTORY, traffic={"target": "Local"})
    with HerePool(train=fails) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    lines = traffic(Progress(study, Store(study.results))).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[4:6]] == ["1 of 1", "1 of 1"]


def test_where_the_monitored_metric_was_not_kept_that_is_said(make_study: Callable[..., Study]) -> None:
    def without(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        result = known(arguments)
        del result["rounds"]["val/acc"]
        return result

    study = make_study(tuning=None, cases={"plain": {}}, history=HISTORY, traffic={"target": "Local"})
    with HerePool(train=without) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    lines = traffic(Progress(study, Store(study.results))).splitlines()
    assert lines[4].endswith("|  | unknown: val/acc of every round was not kept |")


def test_clients_by_their_examples(make_study: Callable[..., Study]) -> None:
    """The sizes are those of the clients that a run's own command makes."""
    study = make_study(tuning=None, cases={"plain": {}}, seeds=[0], history=HISTORY, traffic={"by_examples": [1, 1000]})

    lines = traffic(progress(study)).splitlines()

    assert lines[2].endswith("| up to 1 example | up to 1000 examples | more |")
    assert [run.strip() for run in lines[4].strip("|").split("|")][-3:-1] == ["", "50.0"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"history": HISTORY, "traffic": {"target": "Locl"}}, r"traffic\.target is Locl: did you mean Local\?"),
        ({"history": ["val/acc"], "traffic": {}}, "traffic needs comm/bytes_total in it"),
    ],
)
def test_what_does_not_fit_is_refused(parts: dict[str, Any], message: str, make_study: Callable[..., Study]) -> None:
    with pytest.raises(WrongStudy, match=message):
        make_study(**parts)
