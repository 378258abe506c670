"""A server's checks of what sites send: it is used only if it is what was asked for.

Everything that arrives is compared with the request, for each client separately; if something is wrong, that client
fails and its response is not used. Sites do not say beforehand how many examples they have, so the first number that a
site sends in a run binds it.
"""

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.remote.message import Message
from fl_lightning.remote.metrics import ROUNDING, is_share
from fl_lightning.remote.schema import FAILURE, MOST, OPTIONAL, RESPONSES, WrongMessage, check_facts, shown
from fl_lightning.remote.secure import MASKED
from fl_lightning.round.payload import FLAT, Payload
from fl_lightning.round.stage import Stage

_log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
#: Types of client outputs; of others torch lacks comparisons or sums, so that one client's would end the round.
_OUTPUT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
#: Beyond this number of example rows, a response must not have many times as many as the others.
_MANY_ROWS, _TIMES = 10_000, 100


def check_start(responses: Mapping[int, Message], parameters: str, names: Sequence[str]) -> None:
    """Refuse a federation whose sites cannot train or choose a model together.

    Args:
        responses: The clients' responses to the server's start.
        parameters: The digest of the server's initial parameters.
        names: The names of the clients.

    Raises:
        ValueError: A site has other initial parameters than the server, or none sends its metrics.
    """
    if other := [names[c] for c, each in responses.items() if each.about["parameters"] != parameters]:
        raise ValueError(
            f"{', '.join(other)} have other initial parameters than the server: use the same version of torch"
        )
    if not any(response.about["metrics"] for response in responses.values()):
        raise ValueError(
            "no site sends its metrics, so no round can be selected: set policy.metrics to plain at some sites "
            "(to sums for a run with secure aggregation), or policy.metric_noise"
        )


def check_response(question: Message, response: Message) -> None:
    """Compare a response's fields with what its request asks for.

    Raises:
        WrongMessage: They differ.
    """
    facts = {name: fact for name, fact in response.about.items() if name != "to"}
    if response.kind == "failure":
        check_facts(facts, FAILURE, optional=("state", "from", "place"))
    elif response.kind == "response":
        check_facts(facts, RESPONSES[question.kind], optional=OPTIONAL.get(question.kind, ()))
    else:
        raise WrongMessage(f"it is of the kind {shown(response.kind)!r}, which is not a response")
    if question.kind not in ("run", "evaluate") or response.kind == "failure":
        _check_names(response.tensors, ())
    where = {"run": "from", "evaluate": "state", "predict": "state", "load": "state"}.get(question.kind, "")
    if where in facts and response.kind == "response" and facts[where] != question.about["state"]:
        raise WrongMessage("it is from another state than it was asked for")


def why_wrong(error: Exception) -> str:
    """Why a client fails whose response was refused, or could not be read."""
    if isinstance(error, WrongMessage):
        return f"its response is wrong: {shown(error, 1000)}"
    _log.warning("a response cannot be read", exc_info=error)
    return f"its response is wrong: it cannot be read ({type(error).__name__})"


class Responses:
    """Reads what clients send in a run, and remembers the numbers of examples that they stated.

    Args:
        monitor: The metric by which strategies choose settings.
    """

    def __init__(self, monitor: str = "") -> None:
        self.monitor = monitor
        self.counts: dict[tuple[int, str], float] = {}
        self.noisy: set[int] = set()  # clients whose sites have said that their metrics have noise

    def upload(self, response: Message, client: int, stage: Stage, net: Mapping[str, Tensor], length: int) -> Payload:
        """The payload in the response to a stage.

        Args:
            response: A response whose fields were checked.
            client: The client that sent it.
            stage: The requested stage.
            net: Parameters of one client by name.
            length: Number of parameters of the largest net, for responses that are communicated as one row.

        Raises:
            WrongMessage: It has other tensors than the stage asks for, or impossible numbers of examples or steps.
        """
        expected: dict[str, tuple[int, ...]] = {f"p/{FLAT}": (1, length)}
        dtypes = {f"p/{FLAT}": next(iter(net.values())).dtype}
        if not stage.flat:
            expected = {f"p/{name}": (1, *net[name].shape) for name in stage.upload}
            dtypes = {f"p/{name}": net[name].dtype for name in stage.upload}
        for name, shape in expected.items():
            _check_tensor(response.tensors, name, shape, dtypes[name])
        extras = [name for name in response.tensors if name.startswith("s/")]
        owners = {
            name: name[2:] if name[2:] in stage.client_outputs else name[2:].rpartition("/")[0] for name in extras
        }
        if missing := sorted(stage.client_outputs.keys() - owners.values()):
            raise WrongMessage(f"it has no {', '.join(missing)}")
        lengths = [f"l/{name[2:]}" for name in extras if owners[name] in stage.per_example]
        counts = ("num_examples", "num_steps")
        allowed = [*expected, *(name for name in extras if owners[name] in stage.client_outputs), *lengths, *counts]
        _check_names(response.tensors, allowed)
        for name in extras:
            if response.tensors[name].dim() < 1 or len(response.tensors[name]) != 1:
                raise WrongMessage(f"{name[2:]} is not from one client")
            if (dtype := response.tensors[name].dtype) not in _OUTPUT_TYPES:
                kind, known = (str(each).replace("torch.", "") for each in (dtype, _OUTPUT_TYPES))
                raise WrongMessage(f"{shown(name[2:])} is {kind}, but client outputs are one of {known}")
        for name in lengths:
            rows = response.tensors[f"s/{name[2:]}"]
            _check_tensor(response.tensors, name, (1,), torch.int64)
            if rows.dim() < 2 or rows.shape[1] != int(response.tensors[name]):
                raise WrongMessage(f"{name[2:]} has another number of rows than it says")
        for name in counts:
            _check_tensor(response.tensors, name, (1,), torch.int64)
            if not 0 <= int(response.tensors[name]) <= MOST:
                raise WrongMessage(f"{name} must be in [0, {MOST}], it is {int(response.tensors[name])}")
        self._bind(client, "num_examples", float(response.tensors["num_examples"]))
        for base in stage.scores:
            self._check_scores(client, base, {n[2:]: response.tensors[n] for n in extras if owners[n] == base})
        try:
            return Payload.from_named((client,), response.tensors)
        except ValueError as error:
            raise WrongMessage(str(error)) from error

    def _check_scores(self, client: int, base: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse scores of models within a stage that no examples can have."""
        numbers = {name: tensor.double() for name, tensor in tensors.items()}
        count = numbers.pop(f"{base}/count", None)
        if count is None and numbers.keys() == {base} and numbers[base].shape[-1] == 2:
            totals, count = numbers[base].unbind(-1)
        elif count is not None and numbers and all(tensor.shape == count.shape for tensor in numbers.values()):
            totals = torch.stack(list(numbers.values()))
        else:
            raise WrongMessage(f"{base} is not a numerator and denominator")
        is_wrong = (
            ~totals.isfinite() | ~count.isfinite() | (count < 0) | (count > MOST) | ((count == 0) & (totals != 0))
        )
        if is_share(self.monitor.rpartition("/")[2]):
            is_wrong |= (totals < 0) | (totals > ROUNDING * count)
        if bool(is_wrong.any()):
            raise WrongMessage(f"{base} is {totals.tolist()} of {count.tolist()} examples, which is impossible")
        for stated in set(count.flatten().tolist()):
            if stated:  # too few examples are said to be none
                self._bind(client, base, stated)

    @staticmethod
    def masked(response: Message, count: int) -> None:
        """Check the numbers of a client in a secure sum.

        Args:
            response: A response whose fields were checked.
            count: How many there must be, including the weight.

        Raises:
            WrongMessage: They have another number or type.
        """
        _check_tensor(response.tensors, f"s/{MASKED}", (1, count), torch.int64)
        _check_names(response.tensors, [f"s/{MASKED}"])

    def scores(
        self, response: Message, client: int, kinds: Iterable[str], names: Sequence[str] | str
    ) -> dict[str, Payload]:
        """The scores of each evaluated model.

        Args:
            response: A response whose fields were checked.
            client: The client that sent it.
            kinds: The models.
            names: The metrics as the client named them when the run started, or why it could not.

        Raises:
            WrongMessage: There are other scores, or they are not sums over examples.
        """
        failed = response.about["failures"]
        wanted = {str(index): kind for index, kind in enumerate(kinds)}
        if other := sorted(set(failed) - set(wanted.values())):
            raise WrongMessage(f"it failed in {shown(other[0])!r}, which nobody asked for")
        result: dict[str, dict[str, Tensor]] = {kind: {} for kind in wanted.values() if kind not in failed}
        for name, pair in response.tensors.items():
            index, _, metric = name.partition("/")
            kind = wanted.get(index)
            if kind is None or kind not in result:
                raise WrongMessage(f"it has {shown(name)!r}, which nobody asked for")
            _check_score(metric, pair, noisy=client in self.noisy)
            if pair[0, 1]:
                self._bind(client, metric, float(pair[0, 1]))
            result[kind][metric] = pair
        for extras in result.values():
            if not isinstance(names, str) and (differ := sorted(extras.keys() ^ set(names))):
                how = "sends" if differ[0] in extras else "does not send"
                raise WrongMessage(f"it {how} {shown(differ[0])}, other than it said when the run started")
        return {kind: Payload(clients=(client,), extras=extras) for kind, extras in result.items()}

    def _bind(self, client: int, name: str, count: float) -> None:
        """Hold a client to the first number that it stated."""
        if self.counts.setdefault((client, name), count) != count:
            before = self.counts[client, name]
            raise WrongMessage(f"{name} was of {before:g} examples, and is of {count:g}")


def _check_names(tensors: Mapping[str, Tensor], allowed: Iterable[str]) -> None:
    if other := sorted(set(tensors).difference(allowed)):
        raise WrongMessage(f"it has {shown(other[0])!r}, which nobody asked for")


def _check_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if name not in tensors:
        raise WrongMessage(f"it has no {name.removeprefix('p/')}")
    result = tensors[name]
    if tuple(result.shape) != shape or result.dtype != dtype:
        summary, asked = (str(each).removeprefix("torch.") for each in (result.dtype, dtype))
        raise WrongMessage(f"{name.removeprefix('p/')} is {summary} {tuple(result.shape)} instead of {asked} {shape}")


def _check_score(name: str, pair: Tensor, *, noisy: bool) -> None:
    """Refuse a metric that no examples can have; with noise, one that is not a finite number of a count of 1."""
    split, _, metric = name.partition("/")
    if split not in SPLITS or not metric or len(metric) > 100 or not metric.isprintable():
        raise WrongMessage(f"{shown(name)!r} is not a metric")
    if tuple(pair.shape) != (1, 2) or not pair.is_floating_point():
        raise WrongMessage(f"{name} is not a numerator and denominator")
    total, count = pair[0].tolist()
    if not 0 <= count <= MOST or not abs(total) <= torch.finfo(torch.float32).max:
        raise WrongMessage(f"{name} is {total:g} of {count:g} examples, which is impossible")
    if noisy:
        if count not in (0, 1) or (not count and total):
            raise WrongMessage(f"{name} is {total:g} of {count:g} examples, but its site adds noise to a count of 1")
        return
    if (is_share(metric) and not 0 <= total <= ROUNDING * count) or (not count and total):
        raise WrongMessage(f"{name} is {total:g} of {count:g} examples, which is impossible")
    if metric == "mse" and total < 0:
        raise WrongMessage(f"{name} is {total:g}, an error below zero")


def outsized(uploads: Mapping[int, Payload]) -> dict[int, str]:
    """Clients that send far more example rows than others, to whose length all others would be padded."""
    result: dict[int, str] = {}
    for name in {name for upload in uploads.values() for name in upload.lengths}:
        rows = {c: int(upload.lengths[name]) for c, upload in uploads.items() if name in upload.lengths}
        most = max(_MANY_ROWS, _TIMES * statistics.median(rows.values()))
        result |= {c: f"{name} has {count:,} rows, others far fewer" for c, count in rows.items() if count > most}
    return result
