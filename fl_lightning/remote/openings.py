"""How secure sums open: what sites say when a sum starts, which of it cannot be, and who is summed with whom.

Sites check each other's keys and signatures themselves, and every site knows from its own ledger with whom it may be
summed. What is checked here keeps one wrong site from ending the sum of the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography import x509

from fl_lightning.remote import masking
from fl_lightning.remote.identity import common_name


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a site responds when a sum starts.

    Attributes:
        keys: Its public keys, its certificate and its signature, the last two empty without certificates.
        name: What the others call it.
        bound: Names of the only sites with which its state may be summed; None for any.
    """

    keys: dict[str, str]
    name: str
    bound: frozenset[str] | None

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> "Opening":
        """The opening in the fields of a response.

        Raises:
            LookupError: A field is missing.
            TypeError: A field is of another type.
        """
        bound = about["bound"]
        keys = {name: str(about[name]) for name in ("sealing", "masking", "certificate", "signature")}
        return cls(keys=keys, name=str(about["name"]), bound=None if bound is None else frozenset(map(str, bound)))


def wrong_openings(openings: Mapping[int, Opening], names: Sequence[str]) -> dict[int, str]:
    """Why clients cannot be in any sum, by client: their keys, or the names that they give themselves.

    Args:
        openings: What clients said, in the order in which it arrived. Of two with the same key, the later one has
            copied it: the members of a sum learn each other's keys only after all have said theirs.
        names: Names of all clients in the run, by index.
    """
    wrong: dict[int, str] = {}
    seen: set[str] = set()
    for client, opening in openings.items():
        pair = [opening.keys[name] for name in ("sealing", "masking")]
        if seen.intersection(pair) or pair[0] == pair[1]:
            wrong[client] = "it sent a public key that occurs twice: the keys of a sum must be distinct"
            continue
        seen.update(pair)
        try:
            for key in pair:
                masking.check_public(key)
        except masking.WeakKey as error:
            wrong[client] = f"its keys are wrong: {error}"
            continue
        if opening.name != (own := _own_name(opening.keys["certificate"], names[client])):
            wrong[client] = f"it calls itself {opening.name!r}, but it is {own!r}"
    return wrong


def agreed_members(said: Mapping[int, tuple[str, frozenset[str] | None]]) -> tuple[list[int], dict[int, str]]:
    """The clients that are summed, and why others are not.

    A client whose state was summed before is summed with the same clients. That excludes others only if at least two
    of these clients say the same, as all do where it is true, and if more clients are then summed than without them.

    Args:
        said: Name of each client that is present, and the only names with which it says it may be summed.
    """
    names = {client: name for client, (name, _) in said.items()}
    bounds = {client: bound for client, (_, bound) in said.items() if bound is not None}
    members = [client for client in said if client not in bounds]
    for bound, _ in Counter(bounds.values()).most_common():
        named = [client for client in said if names[client] in bound]
        agree = sum(bounds.get(client) == bound for client in named)
        fits = {names[client] for client in named} == bound and all(bounds.get(c, bound) == bound for c in named)
        if fits and (agree >= 2 or len(named) == len(said)) and len(named) > len(members):
            members = named
    reasons = {
        client: "it says that its state was already summed over other clients than those of this sum (secure "
        "aggregation): it takes part again once it has trained, or in a run with another seed"
        if client in bounds
        else f"{sum(c in bounds for c in members)} of the others say that their current states were already summed "
        "without it (secure aggregation)"
        for client in said
        if client not in members
    }
    return sorted(members), reasons


def _own_name(certificate: str, name: str) -> str:
    """The name in a certificate; that in the run where there is none, or where it cannot be read."""
    try:
        return common_name(x509.load_pem_x509_certificate(certificate.encode())) if certificate else name
    except Exception:  # which of them depends on what is wrong with it; the others refuse it
        return name
