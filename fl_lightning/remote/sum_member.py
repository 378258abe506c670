"""A site's part in a secure sum: Bonawitz et al., CCS 2017, figure 4, with a self-mask, shares of secrets, drop-outs.

| message | what the site does | what leaves it |
|---|---|---|
| ``sum_keys`` | draws two key pairs for this sum alone | the public ones, signed |
| ``sum_shares`` | checks all keys; shares its seed and its masking key | a sealed pair of shares for each |
| ``run``, ``evaluate`` | does the work; adds the self-mask and the pairwise masks | masked numbers |
| ``sum_confirm`` | if sites have certificates: records who survived | a signature of it |
| ``sum_reveal`` | checks who survived | shares: of survivors' seeds, of drop-outs' masking keys |

All masks are drawn with a label, a digest of the run, the address in it and the public keys of all members, which
differs for every sum; pairwise masks also with a digest of the received model, so that they cancel only among members
that have received the same. For every client a site sends one kind of share, once, and what it has sent is on its disk
before it leaves (:class:`~fl_lightning.remote.ledger.SumLedger`).
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from fl_lightning.remote import masking
from fl_lightning.remote.identity import Identity, Unproven
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.message import Message
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.requests import received_by_all
from fl_lightning.remote.sealed import SealedFiles
from fl_lightning.remote.secure import CANNOT_OPEN, FEWEST_CLIENTS, WRONG_KEYS, WRONG_SURVIVORS, threshold_of

#: File with the state of the sum.
_FILE = "sum.json"
#: What two sums from the same state would reveal.
_DIFFERENCE = "the difference of two sums would reveal something about one client"


class SumMember:
    """What a site knows about the sum in which it takes part. A site that is restarted continues with it.

    Args:
        files: The site's files for the run.
        ledger: The site's ledger for all runs.
        identity: The site's certificate; None without certificates.
        fewest: Minimum number of clients in a sum.
    """

    def __init__(
        self, files: SealedFiles, ledger: SumLedger, identity: Identity | None = None, fewest: int = FEWEST_CLIENTS
    ) -> None:
        self.files = files
        self.ledger = ledger
        self.identity = identity
        self.fewest = max(fewest, FEWEST_CLIENTS)
        self.state: dict[str, Any] = json.loads(files.read(_FILE) or b"{}")  # if it is damaged, a new sum can start

    def join(self, run: str, client: int, names: Sequence[str], share: float) -> None:
        """Set the run.

        Args:
            run: Its digest, the same at all sites.
            client: Index of the site's client.
            names: Names of all clients, by index.
            share: Share of the members that a sum needs.
        """
        self.run, self.client, self.names, self.share = run, client, list(names), share

    # ---------------------------------------------------------------- the steps

    def open(self, question: str, purpose: str, address: Sequence[Any], state: str) -> dict[str, Any]:
        """Start a sum, which ends the previous one.

        Args:
            question: Name of the message, which may arrive twice.
            purpose: ``run`` or ``evaluate``.
            address: Identifies the sum within the run.
            state: The client's state, by its name in the ledger.
        """
        if self.state.get("question") != question:
            pairs = {name: X25519PrivateKey.generate() for name in ("sealing", "masking")}
            public = {name: masking.public_of(private) for name, private in pairs.items()}
            self.state = {
                "question": question,
                "purpose": purpose,
                "place": list(address),
                "state": state,
                **{name: private.private_bytes_raw().hex() for name, private in pairs.items()},
            }
            public |= {"certificate": "", "signature": ""}
            if self.identity is not None:
                public["certificate"] = self.identity.pem
                public["signature"] = self.identity.sign(self._key_facts(self.client, public))
            self.state |= {"public": public, "bound": self.ledger.bound(purpose, state)}
            self._keep()
        name = self.names[self.client] if self.identity is None else self.identity.name
        return {**self.state["public"], "bound": self.state["bound"], "name": name}

    def end(self) -> None:
        """End the sum in which the site takes part, if there is one: nothing more of it leaves."""
        self.state = {}
        self.files.drop(_FILE)

    def step(self, kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """The response to a message of the sum that does not ask for work."""
        if kind == "sum_shares":
            return self.share_secrets({int(client): keys_of_client for client, keys_of_client in about["keys"].items()})
        if kind == "sum_confirm":
            return self.confirm(about["survivors"])
        return self.reveal(about["survivors"], {int(client): text for client, text in about["confirmed"].items()})

    def share_secrets(self, keys: Mapping[int, Mapping[str, str]]) -> dict[str, Any]:
        """Check all members' keys, and share this site's secrets among them.

        Args:
            keys: Public keys by client.

        Raises:
            Refused: There are too few, they are not distinct, this site's own are wrong, or another's are weak or not
                signed; the client is then named.
        """
        plain = {str(client): dict(keys_of_client) for client, keys_of_client in sorted(keys.items())}
        if "keys" in self.state:
            if self.state["keys"] != plain:
                raise Refused("this sum already has members, and these are different ones")
            return {"shares": self.state["sent"], "seed_digest": self._seed_digest()}
        if not self.state:
            raise Refused("no sum was started here")
        count, keys_of_client = len(keys), keys.get(self.client, {})
        if count < self.fewest:
            raise Refused(f"this site needs at least {self.fewest} clients in a sum, this one has {count}")
        if dict(keys_of_client) != self.state["public"]:
            raise Refused("the server has public keys for this site that are not its own")
        if len({key[name] for key in keys.values() for name in ("sealing", "masking")}) < 2 * count:
            raise Refused("a public key occurs twice: the members of a sum must be distinct")
        self._check_strength(keys)
        names = self._names(keys)
        threshold = threshold_of(count, self.share)
        label = hashlib.sha256(json.dumps([self.run, self.state["place"], plain, names]).encode()).hexdigest()
        seed = os.urandom(masking.SEED_BYTES)
        shares = zip(
            masking.split_secret(seed, threshold, count),
            masking.split_secret(bytes.fromhex(self.state["masking"]), threshold, count),
            strict=True,
        )
        mine = {
            client: seed_share + key_share for client, (seed_share, key_share) in zip(sorted(keys), shares, strict=True)
        }
        sent = {
            str(client): masking.seal(
                self._private("sealing"), keys[client]["sealing"], [label, self.client, client], share
            ).hex()
            for client, share in mine.items()
            if client != self.client
        }
        self.state |= {
            "keys": plain,
            "names": {str(client): name for client, name in names.items()},
            "label": label,
            "seed": seed.hex(),
            "own_share": mine[self.client].hex(),
            "sent": sent,
        }
        self._keep()
        return {"shares": sent, "seed_digest": self._seed_digest()}

    def enter(self, request: Message, address: Sequence[Any], work: str | None) -> int:
        """Check and record who is summed, before the work is done.

        The masks of a sum hide one response: two under the same masks would reveal their difference.

        Args:
            request: The request for the work. What the other members have sealed for this site is in it, by client:
                these and this site are summed.
            address: Identifies the sum within the run.
            work: A digest of the request; None if there may be several requests for one state.

        Returns:
            The minimum number of clients in the sum: as many must survive, and not all members need to.

        Raises:
            Refused: There are too few clients, a share cannot be opened, the sum is for another request, or the state
                was already summed with others or for other work.
        """
        if "label" not in self.state or [self.state["purpose"], self.state["place"]] != [request.kind, list(address)]:
            raise Refused("no sum was started for this")
        sealed = {int(client): text for client, text in request.about["shares"].items()}
        keys = self.state["keys"]
        members = sorted({*sealed, self.client})
        if self.client in sealed or any(str(client) not in keys for client in members):
            raise Refused("this sum has other members than before")
        if "members" in self.state and self.state["members"] != members:
            raise Refused(f"this sum was joined with other clients: {_DIFFERENCE}")
        if self.state.get("request", request.name) != request.name:
            raise Refused("this sum is for another request: its masks hide one response")
        least = max(threshold_of(len(keys), self.share), self.fewest)
        if len(members) < least:
            raise Refused(f"a sum over {len(members)} clients is requested, at least {least} are needed")
        opened = {}
        for client, text in sealed.items():
            about = [self.state["label"], client, self.client]
            try:
                share = masking.unseal(
                    self._private("sealing"), keys[str(client)]["sealing"], about, bytes.fromhex(text)
                )
            except ValueError as error:
                raise Refused(CANNOT_OPEN.format(client)) from error
            opened[str(client)] = share.hex()
        names = [self._name(client) for client in members]
        entered = self.ledger.enter(self.state["purpose"], self.state["state"], names, run=self.run, work=work)
        if entered == "refused":
            raise Refused(
                "this state was already summed with other clients or for another address or model: "
                f"{_DIFFERENCE}; continue from a later state, or start with another seed"
            )
        self.state |= {"members": members, "opened": opened, "received": received_by_all(request)}
        self.state |= {"request": request.name}
        self.state |= {"all": self.state.get("all") or entered == "again"}
        self._keep()
        return least

    def hide(self, total_D: NDArray[np.int64]) -> Tensor:
        """The numbers of :func:`masking.to_whole` under all masks, int64 (D + 1,).

        The same numbers may leave again, and others never: the ledger says which they are before they leave.

        Raises:
            Refused: The masks have hidden other numbers.
        """
        members, label = self.state["members"], self.state["label"]
        label_of_pairs = label + self.state["received"]
        if not self.ledger.mask(label, self.ledger.name(total_D.tobytes())):
            raise Refused("the masks of this sum have hidden another response: the next sum has masks of its own")
        total_D = total_D + masking.mask(bytes.fromhex(self.state["seed"]), label, len(total_D))
        for peer in members:
            if peer != self.client:
                public = self.state["keys"][str(peer)]["masking"]
                adds = self.client < peer
                total_D = total_D + masking.pairwise_mask(
                    self._private("masking"), public, label_of_pairs, len(total_D), adds=adds
                )
        return from_numpy(total_D)

    def confirm(self, survivors: Sequence[int]) -> dict[str, Any]:
        """Record who survived, and sign it.

        Raises:
            Refused: There are too few survivors, or others than before.
        """
        self._survive(survivors)
        if self.identity is None:
            return {"signature": ""}
        if "confirmed" not in self.state:
            self.state["confirmed"] = self.identity.sign(self._survivor_facts())
            self._keep()
        return {"signature": self.state["confirmed"]}

    def reveal(self, survivors: Sequence[int], confirmed: Mapping[int, str]) -> dict[str, Any]:
        """The shares with which the sum over the survivors can be opened.

        Args:
            survivors: The clients whose numbers the server has.
            confirmed: Survivors' signatures, if they have certificates.

        Raises:
            Refused: There are too few survivors, others than before, or too few signatures.
        """
        self._survive(survivors)
        if self.identity is not None:
            needed = threshold_of(len(self.state["keys"]), self.share)
            signers = {client for client in confirmed if client in survivors}
            for client in signers:
                pem = self.state["keys"][str(client)]["certificate"]
                try:
                    self.identity.verify(self._survivor_facts(), confirmed[client], pem)
                except Unproven as error:
                    raise Refused(f"{WRONG_SURVIVORS.format(client)} ({self._name(client)}): {error}") from error
            if len(signers) < needed:
                raise Refused(f"{len(signers)} survivors have signed, {needed} are needed")
        size = 2 * masking.SEED_BYTES  # in hexadecimal digits
        shares = {**self.state["opened"], str(self.client): self.state["own_share"]}
        dropped = [client for client in self.state["members"] if client not in survivors]
        return {
            "seeds": {str(client): shares[str(client)][:size] for client in survivors},
            "keys": {str(client): shares[str(client)][size:] for client in dropped},
            "label": self.state["label"],
        }

    # ---------------------------------------------------------------- checks

    def _survive(self, survivors: Sequence[int]) -> None:
        """Record who survived; only once."""
        members = sorted(set(survivors))
        if "members" not in self.state or list(survivors) != members or not {*members} <= {*self.state["members"]}:
            raise Refused("these survivors do not belong to a sum of this site")
        if self.client not in members:
            raise Refused("this site's numbers are not in the sum")
        least = max(threshold_of(len(self.state["keys"]), self.share), self.fewest)
        if len(members) < least:
            raise Refused(f"a sum over {len(members)} clients is requested, at least {least} are needed")
        if self.state.setdefault("survivors", members) != members:
            raise Refused(f"this sum was opened over other clients: {_DIFFERENCE}")
        names = [self._name(client) for client in members]
        is_other = self.state["all"] and members != self.state["members"]
        if is_other or not self.ledger.close(self.state["purpose"], self.state["state"], names):
            raise Refused(f"this state was already summed over other clients: {_DIFFERENCE}")
        self._keep()

    def _check_strength(self, keys: Mapping[int, Mapping[str, str]]) -> None:
        """Refuse keys whose secrets everybody would know."""
        for client, keys_of_client in keys.items():
            try:
                for name in ("sealing", "masking"):
                    masking.check_public(keys_of_client[name])
            except masking.WeakKey as error:
                raise Refused(f"{WRONG_KEYS.format(client)} ({self.names[client]}): {error}") from error

    def _names(self, keys: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
        """Each member's name: that in its certificate, or that in the run if there are no certificates.

        Raises:
            Refused: A signature is not valid, or two members are the same site.
        """
        if self.identity is None:
            names = {client: self.names[client] for client in keys}
        else:
            names = {}
            for client, keys_of_client in keys.items():
                try:
                    names[client] = self.identity.verify(
                        self._key_facts(client, keys_of_client),
                        keys_of_client.get("signature", ""),
                        keys_of_client.get("certificate", ""),
                    )
                except Unproven as error:
                    raise Refused(f"{WRONG_KEYS.format(client)} ({self.names[client]}): {error}") from error
        called = list(names.values())
        if twice := [client for place, client in enumerate(names) if names[client] in called[:place]]:
            who = f"{WRONG_KEYS.format(twice[0])} ({self.names[twice[0]]})"
            raise Refused(f"{who}: one site occurs twice, but the members of a sum must be distinct")
        return dict(sorted(names.items()))

    def _key_facts(self, client: int, keys_of_client: Mapping[str, str]) -> list[Any]:
        return ["keys", self.run, self.state["place"], client, keys_of_client["sealing"], keys_of_client["masking"]]

    def _survivor_facts(self) -> list[Any]:
        return ["survivors", self.state["label"], self.state["survivors"]]

    def _private(self, name: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(self.state[name]))

    def _seed_digest(self) -> str:
        return hashlib.sha256(bytes.fromhex(self.state["seed"])).hexdigest()

    def _name(self, client: int) -> str:
        return str(self.state["names"][str(client)])

    def _keep(self) -> None:
        self.files.write(_FILE, json.dumps(self.state).encode())
