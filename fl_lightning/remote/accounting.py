"""How much a site has told of its client by noisy answers, and of its examples by private training, over all jobs.

What noisy answers protect is the client: each answer, and each evaluation with noise, is the Gaussian mechanism on
everything that it holds. The composition of Gaussian mechanisms with noise multipliers z_k is exactly one with
(Σ z_k^-2)^-1/2 (Dong, Roth, Su: "Gaussian Differential Privacy", JRSS B 2022, corollary 2), whose (ε, δ)
``dp-accounting`` computes (Balle, Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018). The
server, which is who might be curious, knows who takes part in a round, so nothing is gained from the sampling of
clients.

What private training (``model.privacy``) protects is each training example alone. Its steps are kept by sampling
probability and noise multiplier, and their ε is that of them and of all noisy answers, which hide an example as well.

Processes of several jobs share the account: it is locked, read, and on the disk before anything leaves.
"""

import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from fl_lightning.remote.sealed import SECONDS_TO_WAIT, account_key, write_durably
from fl_lightning.round.privacy import Step, epsilon_of


class BudgetSpent(ValueError):
    """One more answer would tell more than the site allows."""


class PrivacyAccountant:
    """Counts noisy answers in ``privacy.json``.

    Args:
        folder: The site's, one for all runs.
        delta: δ, in (0, 1).

    Raises:
        ValueError: The folder's secret is damaged.
    """

    def __init__(self, folder: Path, *, delta: float) -> None:
        self.path = folder / "privacy.json"
        self.delta = delta
        self._key = account_key(folder)
        self._lock = FileLock(folder / "privacy.lock", timeout=SECONDS_TO_WAIT, mode=0o600)

    @property
    def num_answers(self) -> int:
        """Noisy answers so far."""
        return int(self._read()["num_answers"])

    def epsilon(self, multiplier: float | None = None) -> float:
        """ε of all answers so far, and of one more with the given noise multiplier."""
        return self._epsilon(float(self._read()["precision"]) + (0.0 if multiplier is None else multiplier**-2))

    def spend(self, multiplier: float, max_epsilon: float | None = None) -> None:
        """Count one more answer, on the disk before it leaves.

        Args:
            multiplier: Its noise multiplier.
            max_epsilon: The ε that the site's account must not exceed; None for no bound.

        Raises:
            BudgetSpent: It would.
            ValueError: The account cannot be read.
        """
        with self._lock:
            kept = self._read()
            precision = float(kept["precision"]) + multiplier**-2
            after = self._epsilon(precision)
            if max_epsilon is not None and after > max_epsilon:
                raise BudgetSpent(
                    f"the privacy budget is spent: ε would be {after:.3g}, max_epsilon is {max_epsilon:g}"
                )
            told = {**kept, "precision": precision, "num_answers": int(kept["num_answers"]) + 1}
            self._write({**told, "delta": self.delta, "epsilon": after})

    def record_epsilon(self) -> float:
        """ε of each training example for all that was told so far."""
        kept = self._read()
        return epsilon_of(_steps(kept), self.delta, precision=float(kept["precision"]))

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
            kept = self._read()
            steps = _steps(kept)
            steps[rate, multiplier] = steps.get((rate, multiplier), 0) + num_steps
            after = epsilon_of(steps, self.delta, precision=float(kept["precision"]))
            if max_epsilon is not None and after > max_epsilon:
                raise BudgetSpent(
                    f"the privacy of this site's examples is spent: ε would be {after:.3g}, policy.max_record_epsilon "
                    f"is {max_epsilon:g}"
                )
            rows = [[*step, count] for step, count in sorted(steps.items())]
            self._write({**kept, "steps": rows, "record_delta": self.delta})

    def _write(self, told: dict[str, Any]) -> None:
        if "steps" in told:
            delta, precision = float(told["record_delta"]), float(told["precision"])
            told["record_epsilon"] = epsilon_of(_steps(told), delta, precision=precision)
        write_durably(self.path, (json.dumps({**told, "seal": self._seal(told)}) + "\n").encode())

    def _epsilon(self, precision: float) -> float:
        from dp_accounting import gaussian_mechanism

        if not precision:
            return 0.0
        return float(gaussian_mechanism.get_epsilon_gaussian(1 / math.sqrt(precision), self.delta))

    def _read(self) -> dict[str, Any]:
        """What is in the file; a fresh account where there is none."""
        if not self.path.exists():
            return {"precision": 0.0, "num_answers": 0}
        try:
            kept: dict[str, Any] = json.loads(self.path.read_text())
            sound = hmac.compare_digest(kept.pop("seal"), self._seal(kept))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise ValueError(
                f"{self.path} is damaged: restore it from a copy; without it the site does not know what it has told"
            )
        return kept

    def _seal(self, told: Mapping[str, Any]) -> str:
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), key=self._key, digest_size=32).hexdigest()


def _steps(kept: Mapping[str, Any]) -> dict[Step, int]:
    """Steps of private training by sampling probability and noise multiplier; an account may have none."""
    return {(float(rate), float(multiplier)): int(count) for rate, multiplier, count in kept.get("steps", ())}
