"""Which method for these data: a search over methods and settings within a budget, and the answer with its evidence.

What trains (torch, Lightning) is imported when it is first used.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.choice.answer import Answer
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.round.client import ClientModule
    from fl_lightning.strategies import Strategy
    from fl_lightning.trainer import FederatedTrainer


def choose(
    data: "FederatedDataModule | None" = None,
    client: "ClientModule | None" = None,
    strategy: "Strategy | None" = None,
    *,
    trainer: "FederatedTrainer | None" = None,
    config: Sequence[str | Path] | str | Path = (),
    overrides: Sequence[str] = (),
    budget: str | float = "30m",
    methods: Sequence[str] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
    metric: str | None = None,
    max_bytes: str | float | None = None,
    processes: int | None = None,
    seeds: int | None = None,
    folder: str | Path = "choices/mine",
    say: Callable[[str], None] = print,
) -> "Answer":
    """Choose a method and its settings for a federation, as ``fl-train choose`` does.

    The runs are trained in processes of their own, so a script calls this beneath ``if __name__ == "__main__":``.

    Args:
        data: The clients' data, of a source that a configuration can name.
        client: The client module; None for each strategy's own.
        strategy: A method that is tried with the settings that it has, beside the others.
        trainer: Whose rounds, participation and other settings the runs have.
        config: Configuration files, in place of the objects.
        overrides: Further arguments of ``fl-train fit``, such as ``--trainer.num_rounds=50``.
        budget: Time of the clock, such as ``"30m"``, or seconds; or work, such as ``"20runs"``: so many times the
            rounds of the configuration, whichever method trains them.
        methods: Strategies by name; empty for the default ones.
        grid: Values by setting, or a range such as ``"0.001..0.1"``, from which Optuna draws (extra ``choose``); in
            place of those that are tried by default.
        metric: Validation metric that decides, such as ``val/acc``; None for the configuration's.
        max_bytes: What a run may send, such as ``"200MB"``, or bytes.
        processes: Worker processes; None for one for each core, four at most, and one with a GPU.
        seeds: New seeds of the finalists, at most; None for ten. With one or two nothing can be told apart, and the
            highest validation score decides.
        folder: Where everything goes. The same call goes on there where an earlier one stopped.
        say: Takes a line for the user.

    Raises:
        WrongChoice: Settings are refused, the budget is too small, the folder is in use, or there are objects beside
            configuration files, or without data.
        WrongStudy: A method, or a setting of the grid, is refused.
    """
    from fl_lightning.choice.asking import answer_of
    from fl_lightning.choice.candidates import WrongChoice
    from fl_lightning.choice.preparation import Asked, described

    target = Path(folder)
    files = [config] if isinstance(config, str | Path) else list(config)
    objects = {"data": data, "client": client, "strategy": strategy, "trainer": trainer}
    given = [name for name, each in objects.items() if each is not None]
    if given and (files or data is None):
        advice = "beside config: give either objects or configuration files" if files else "without data: give the data"
        raise WrongChoice(f"{', '.join(given)} {advice}")
    if data is not None:
        files = [described(target, data, client, strategy, trainer)]
    asked = Asked(
        config=[str(each) for each in files],
        overrides=overrides,
        budget=budget,
        methods=methods,
        grid={name: [values] if isinstance(values, str) else values for name, values in (grid or {}).items()},
        metric=metric,
        max_bytes=max_bytes,
        processes=processes,
        seeds=seeds,
        folder=target,
    )
    return answer_of(asked, say)
