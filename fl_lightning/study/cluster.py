"""Studies over the machines of a cluster: jobs that work on one study, submitted by submitit (the extra ``cluster``).

Each job is an ordinary :class:`~fl_lightning.study.runner.Runner`; the leases in the study's folder of results, which
all machines share, say who trains what. A job that is preempted, or whose time is up, gives its runs back and is queued
again; one that is killed loses its leases after a while, and others continue its runs from their last states.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.counts import count
from fl_lightning.extras import require
from fl_lightning.study.definition import Study
from fl_lightning.study.pool import Pool
from fl_lightning.study.runner import Runner, Tally
from fl_lightning.study.schema import WrongStudy
from fl_lightning.study.store import Store

#: The kinds of jobs: of SLURM, processes of this machine, one after another within this process (to look for mistakes).
KINDS = ("slurm", "local", "debug")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one job does: train what nobody else trains, until nothing is left.

    Attributes:
        file: The study's file.
        results: Its folder of results.
        folder: The working folder, to which both are relative.
        processes: Worker processes of the job.
        num_read: Bytes of ``runs.jsonl`` when the jobs were submitted; runs recorded after them are not tried again.
        partitions: The hash of every partition that is known, by ``StudyRun.data``.
        options: Further arguments of :class:`~fl_lightning.study.runner.Runner`.
    """

    file: Path
    results: Path
    folder: Path
    processes: int
    num_read: int
    partitions: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Tally:
        """Work."""
        os.chdir(self.folder)
        study = Study(self.file)
        study.results = self.results
        runner = Runner(study, Store(self.results), **self.options)
        runner.progress.partitions.update(self.partitions)
        runner.count_as_tried(runner.store.records_after(self.num_read))
        with Pool(self.processes) as pool:
            return runner.work(pool)

    def checkpoint(self) -> Any:
        """What is queued when the job is preempted or its time is up: the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where jobs run.

    Attributes:
        kind: One of :data:`KINDS`.
        nodes: How many jobs.
        hours: Time limit of a job, after which it is queued again.
        slurm: Further options of ``sbatch``, by their long names.
    """

    kind: str
    nodes: int = 1
    hours: float = 24.0
    slurm: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("cluster", "fl-train study run --workers")

    def run(self, runner: Runner, processes: int, options: Mapping[str, Any]) -> Tally:
        """Submit the jobs, report what they record, and wait for their end.

        Args:
            runner: Of the study, after its :meth:`~fl_lightning.study.runner.Runner.prepare`.
            processes: Worker processes of a job.
            options: Further arguments of the jobs' runners.

        Raises:
            WrongStudy: There is no such cluster here.
        """
        study, store = runner.study, runner.store
        runner.read_others()
        job = Job(
            file=study.path,
            results=study.results,
            folder=Path.cwd(),
            processes=processes,
            num_read=store.num_read,
            partitions=runner.progress.partitions,
            options=options,
        )
        jobs = self._submit(job, study)
        runner.say(f"{count(len(jobs), 'job')} submitted; what they write is in {study.results / 'jobs'}")
        try:
            while not all([each.done() for each in jobs]):
                runner.report_others()
                time.sleep(runner.look_seconds)
        except BaseException:
            for each in jobs:
                each.cancel(check=False)
            raise
        runner.report_others()
        for each in jobs:
            if (error := each.exception()) is not None:
                runner.say(f"job {each.job_id} ended early: {str(error).strip().splitlines()[-1]}")
        return runner.summary()

    def _submit(self, job: Job, study: Study) -> list[Any]:
        import submitit

        try:
            executor = submitit.AutoExecutor(folder=study.results / "jobs", cluster=self.kind)
        except RuntimeError as error:
            raise WrongStudy(f"--workers {self.kind}: {error}") from error
        executor.update_parameters(
            name=study.name,
            timeout_min=max(1, round(60 * self.hours)),
            cpus_per_task=job.processes,
            slurm_additional_parameters=dict(self.slurm),
        )
        with executor.batch():
            return [executor.submit(job) for _ in range(self.nodes)]
