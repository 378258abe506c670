"""How much a client has told of itself by noisy answers, over all rounds and runs of a site's folder.

What is protected is one client's round: each answer is the Gaussian mechanism on everything that the client holds. The
composition of Gaussian mechanisms with noise multipliers z_k is exactly one with (Σ z_k^-2)^-1/2 (Dong, Roth, Su:
"Gaussian Differential Privacy", JRSS B 2022, corollary 2), whose (ε, δ) ``dp-accounting`` computes (Balle, Wang:
"Improving the Gaussian Mechanism for Differential Privacy", ICML 2018). The server, which is who might be curious,
knows who takes part in a round, so nothing is gained from the sampling of clients.
"""

import json
import math
from pathlib import Path

from fl_lightning.run.folder import whole_file


class PrivacyAccountant:
    """Counts noisy answers in ``privacy.json``.

    Args:
        folder: The site's.
        delta: δ, in (0, 1).
    """

    def __init__(self, folder: Path, *, delta: float) -> None:
        self.path = folder / "privacy.json"
        self.delta = delta
        self.precision = 0.0  # Σ z_k^-2
        self.num_answers = 0
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            self.precision, self.num_answers = float(kept["precision"]), int(kept["num_answers"])

    def epsilon(self, multiplier: float | None = None) -> float:
        """ε of all answers so far, and of one more with the given noise multiplier."""
        from dp_accounting import gaussian_mechanism

        precision = self.precision + (0.0 if multiplier is None else multiplier**-2)
        if not precision:
            return 0.0
        return float(gaussian_mechanism.get_epsilon_gaussian(1 / math.sqrt(precision), self.delta))

    def spend(self, multiplier: float) -> None:
        """Count one more answer; on disk before it leaves."""
        self.precision += multiplier**-2
        self.num_answers += 1
        told = {"precision": self.precision, "num_answers": self.num_answers, "delta": self.delta}
        with whole_file(self.path) as temporary:
            temporary.write_text(json.dumps({**told, "epsilon": self.epsilon()}) + "\n")
