"""How much a site has revealed about its client by noisy responses, and about its examples by private training.

All jobs are counted. Noisy responses protect the client: each response, and each evaluation with noise, is the Gaussian
mechanism on everything that the client holds. The composition of Gaussian mechanisms with noise multipliers z_k is
exactly one with (Σ z_k^-2)^-1/2 (Dong, Roth, Su: "Gaussian Differential Privacy", JRSS B 2022, corollary 2), whose (ε,
δ) ``dp-accounting`` computes (Balle, Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018). The
server, against which this protects, knows who takes part in a round, so sampling of clients gains nothing.

Private training (``model.privacy``) protects each training example. Its steps are recorded by sampling probability and
noise multiplier; their ε includes all noisy responses, which hide an example as well.

Processes of several jobs share the account: it is locked, read, and written to the disk before anything leaves.
"""

import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from fl_lightning.remote.sealed import SECONDS_TO_WAIT, account_key, begin, has_begun, write_durably
from fl_lightning.round.privacy import Step, epsilon_of


class BudgetSpent(ValueError):
    """One more response would reveal more than the site allows."""


class PrivacyAccountant:
    """Counts noisy responses in ``privacy.json``, which the first of them creates.

    Args:
        folder: The site's account folder, one for all runs.
        delta: δ, in (0, 1).

    Raises:
        ValueError: The account or the folder's secret is damaged, or the account was lost.
    """

    def __init__(self, folder: Path, *, delta: float) -> None:
        self.path = folder / "privacy.json"
        self.delta = delta
        #: The ε of each example that everything together must not exceed, and its δ; None for no bound.
        self.record_bound: tuple[float, float] | None = None
        self._key = account_key(folder)
        self._lock = FileLock(folder / "privacy.lock", timeout=SECONDS_TO_WAIT, mode=0o600)
        self._read()

    @property
    def num_responses(self) -> int:
        """Number of noisy responses so far."""
        return int(self._read()["num_answers"])

    def epsilon(self, multiplier: float | None = None) -> float:
        """ε of all responses so far, and of one more with the given noise multiplier."""
        return self._epsilon(float(self._read()["precision"]) + (0.0 if multiplier is None else multiplier**-2))

    def spend(self, multiplier: float, max_epsilon: float | None = None) -> None:
        """Count one more response, on the disk before it leaves.

        Args:
            multiplier: Its noise multiplier.
            max_epsilon: The ε that the site's account must not exceed; None for no bound.

        Raises:
            BudgetSpent: It would, or that of each example would exceed ``record_bound``.
            ValueError: The account cannot be read.
        """
        with self._lock:
            saved = self._read()
            precision = float(saved["precision"]) + multiplier**-2
            after = self._epsilon(precision)
            if max_epsilon is not None and after > max_epsilon:
                raise BudgetSpent(
                    f"the privacy budget is spent: ε would be {after:.3g}, max_epsilon is {max_epsilon:g}"
                )
            if self.record_bound is not None:
                bound, delta = self.record_bound
                if (of_record := epsilon_of(_steps(saved), delta, precision=precision)) > bound:
                    raise BudgetSpent(
                        f"the privacy budget of this site's examples is spent: ε would be {of_record:.3g}, "
                        f"policy.max_record_epsilon is {bound:g}"
                    )
            account = {**saved, "precision": precision, "num_answers": int(saved["num_answers"]) + 1}
            self._write({**account, "delta": self.delta, "epsilon": after})

    def check(
        self,
        multiplier: float | None,
        num_responses: int,
        steps: Mapping[Step, int],
        *,
        max_epsilon: float | None = None,
        max_record_epsilon: float | None = None,
    ) -> None:
        """Refuse what the account could not pay for; nothing is counted.

        Args:
            multiplier: Noise multiplier of the responses; None for responses without noise.
            num_responses: How many there will be.
            steps: Steps of private training that there will be, by sampling probability and noise multiplier.
            max_epsilon: The ε that the site's account must not exceed; None for no bound.
            max_record_epsilon: That of each example; None for no bound.

        Raises:
            BudgetSpent: The account would exceed a bound.
            ValueError: The account cannot be read.
        """
        account = self._read()
        precision = float(account["precision"]) + (0.0 if multiplier is None else num_responses * multiplier**-2)
        if max_epsilon is not None and (after := self._epsilon(precision)) > max_epsilon:
            raise BudgetSpent(f"ε would be {after:.3g}, max_epsilon is {max_epsilon:g}")
        if max_record_epsilon is None:
            return
        total = _steps(account)
        for step, count in steps.items():
            total[step] = total.get(step, 0) + count
        if (after := epsilon_of(total, self.delta, precision=precision)) > max_record_epsilon:
            raise BudgetSpent(
                f"ε of this site's examples would be {after:.3g}, policy.max_record_epsilon is {max_record_epsilon:g}"
            )

    def record_epsilon(self) -> float:
        """ε of each training example for everything that was revealed so far."""
        account = self._read()
        return epsilon_of(_steps(account), self.delta, precision=float(account["precision"]))

    def spend_steps(self, rate: float, multiplier: float, num_steps: int, max_epsilon: float | None = None) -> None:
        """Count steps of private training, on the disk before they are taken.

        Args:
            rate: Their sampling probability.
            multiplier: Their noise multiplier.
            num_steps: How many.
            max_epsilon: The ε of each example that the site's account must not exceed; None for no bound.

        Raises:
            BudgetSpent: It would.
            ValueError: The account cannot be read.
        """
        with self._lock:
            account = self._read()
            steps = _steps(account)
            steps[rate, multiplier] = steps.get((rate, multiplier), 0) + num_steps
            after = epsilon_of(steps, self.delta, precision=float(account["precision"]))
            if max_epsilon is not None and after > max_epsilon:
                raise BudgetSpent(
                    f"the privacy budget of this site's examples is spent: ε would be {after:.3g}, "
                    f"policy.max_record_epsilon "
                    f"is {max_epsilon:g}"
                )
            rows = [[*step, count] for step, count in sorted(steps.items())]
            self._write({**account, "steps": rows, "record_delta": self.delta})

    def _write(self, account: dict[str, Any]) -> None:
        if "steps" in account:
            delta, precision = float(account["record_delta"]), float(account["precision"])
            account["record_epsilon"] = epsilon_of(_steps(account), delta, precision=precision)
        write_durably(self.path, (json.dumps({**account, "seal": self._seal(account)}) + "\n").encode())
        begin(self.path.parent, self.path.name)

    def _epsilon(self, precision: float) -> float:
        from dp_accounting import gaussian_mechanism

        if not precision:
            return 0.0
        return float(gaussian_mechanism.get_epsilon_gaussian(1 / math.sqrt(precision), self.delta))

    def _read(self) -> dict[str, Any]:
        """The account in the file; a new one if there never was one."""
        has_account = has_begun(self.path.parent, self.path.name)  # before the file, which is written first
        if not has_account and not self.path.exists():
            return {"precision": 0.0, "num_answers": 0}
        try:
            account: dict[str, Any] = json.loads(self.path.read_text())
            sound = hmac.compare_digest(account.pop("seal"), self._seal(account))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            state = "damaged" if self.path.exists() else "missing"
            raise ValueError(
                f"{self.path.name} is {state}: restore it from a copy; without it the site does not know what it has "
                "revealed"
            )
        return account

    def _seal(self, account: Mapping[str, Any]) -> str:
        return hashlib.blake2b(json.dumps(account, sort_keys=True).encode(), key=self._key, digest_size=32).hexdigest()


def _steps(account: Mapping[str, Any]) -> dict[Step, int]:
    """Steps of private training by sampling probability and noise multiplier; possibly none."""
    return {(float(rate), float(multiplier)): int(count) for rate, multiplier, count in account.get("steps", ())}
