"""From what was asked for to the answer: a search, then ``chosen.yaml`` and the page."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from fl_lightning.choice.answer import Answer
from fl_lightning.choice.budget import Clock, Meter, Work, earlier
from fl_lightning.choice.candidates import CASE, WrongChoice
from fl_lightning.choice.page import document
from fl_lightning.choice.preparation import Asked, Prepared, prepare
from fl_lightning.choice.runs import Known, Runs
from fl_lightning.choice.search import Search
from fl_lightning.files import whole_file
from fl_lightning.run.version import digest_of_sources, sources
from fl_lightning.study.pool import Pool
from fl_lightning.study.runs import argument, digest_of, make_run
from fl_lightning.study.store import Store
from fl_lightning.study.worker import resolve

_MOST_PROCESSES = 4


def answer_of(
    asked: Asked,
    say: Callable[[str], None],
    make_pool: Callable[[Prepared, Store], AbstractContextManager[Runs]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    sites: str = "",
) -> Answer:
    """Search, and write ``chosen.yaml`` and the page.

    Args:
        asked: What was asked for.
        say: Takes a line for the user.
        make_pool: Makes what trains the runs; None for a pool of as many processes as were asked for.
        clock: The time in seconds.
        sites: Digest of the sites that train, and how: runs of others do not count.

    Raises:
        WrongChoice: It is refused, or the folder is in use.
    """
    start = clock()
    prepared, store = prepare(asked), Store(asked.folder)
    with store.running() as alone:
        if not alone:
            raise WrongChoice(f"another process chooses in {asked.folder}: wait for it, or give another --output")
        store.keep_sources(digest_of_sources(), sources())
        with make_pool(prepared, store) if make_pool else Pool(asked.processes or _processes()) as trained:
            known = Known.of(prepared, store, trained, say, sites=sites)
            digest = digest_of([prepared.digest, known.digest])
            search = Search(
                prepared.study,
                known,
                prepared.candidates,
                asked=digest,
                seed=prepared.seed,
                num_rounds=prepared.num_rounds,
                evaluate_every=prepared.evaluate_every,
                meter=_meter(prepared, earlier(store.records().values(), digest) + clock() - start, clock),
                max_bytes=prepared.max_bytes,
                most_seeds=asked.seeds,
                say=say,
            )
            found = search.run(trained)
        try:
            answer = Answer(found, asked.folder, asked.command, data_seed=prepared.base["data"].get("seed"))
        except ValueError as error:
            raise WrongChoice(str(error)) from error
        _write_chosen(answer, prepared)
        document(answer).write(answer.page)
    return answer


def _meter(prepared: Prepared, before: float, clock: Callable[[], float]) -> Meter:
    return Work(prepared.budget, prepared.num_rounds) if prepared.in_runs else Clock(prepared.budget, before, clock)


def _processes() -> int:
    """As many as there are cores, four at most; one where a GPU computes."""
    import torch

    return 1 if torch.cuda.is_available() else min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _write_chosen(answer: Answer, prepared: Prepared) -> None:
    """The whole configuration of the method that is taken, with the seed of the configuration."""
    point = answer.found.finalists[answer.method]
    run = make_run(prepared.study, answer.method, CASE, prepared.seed, point, "report", prepared.num_rounds)
    arguments = [each for each in run.arguments if not each.startswith("--data.seed=")]
    later = [f"--trainer.{name}={argument(value)}" for name, value in prepared.later.items()]
    whole = resolve([*arguments, *later])
    if whole["error"]:
        raise WrongChoice(whole["error"])
    said = "".join(f"# {' '.join(line.split())}\n" for line in (answer.sentence, *answer.notes))
    with whole_file(answer.config) as temporary:
        temporary.write_text(f"{said}{whole['config']}")
