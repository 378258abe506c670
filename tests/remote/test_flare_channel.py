"""The way over NVFlare without its processes: what the server hears of clients that respond, fail, are late or gone."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare")

from nvflare.apis.controller_spec import TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal

from fl_lightning.remote import Message
from fl_lightning.remote.flare import Aborted, FlareChannel

NAMES = ["answers", "fails", "is late", "is gone"]


class Clients:
    """In place of a controller and its clients."""

    _engine = SimpleNamespace(new_context=contextlib.nullcontext)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_client_disconnect_time(self, name):
        return 1.0 if name == "is gone" else None

    def send(self, task, context, targets):
        (name,) = targets
        self.asked.append(name)
        if name == "is late":
            task.completion_status = TaskCompletionStatus.TIMEOUT
        else:
            result = make_reply(ReturnCode.OK if name == "answers" else ReturnCode.EXECUTION_EXCEPTION)
            result["wire"] = Message(kind="response", about={"to": Message.read(task.data["wire"]).name}).wire
            task.result_received_cb(client_task=SimpleNamespace(result=result), fl_ctx=context)
            task.completion_status = TaskCompletionStatus.OK
        task.task_done_cb(task=task, fl_ctx=context)


@pytest.fixture
def channel() -> FlareChannel:
    return FlareChannel(Clients(), NAMES, timeout_seconds=7, abort_signal=Signal())


def test_each_client_is_asked_by_itself_and_one_that_is_gone_is_not(channel) -> None:
    messages = {client: Message(kind="enroll", about={"client": client}) for client in range(4)}

    heard = dict(channel.ask(messages))

    assert heard.pop(0).about == {"to": messages[0].name}
    assert heard == {
        1: "its site failed (EXECUTION_EXCEPTION)",
        2: "its site did not respond (timeout)",
        3: "its site is disconnected",
    }
    assert channel.controller.asked == NAMES[:3]
    assert channel.num_bytes["down"] == sum(len(messages[client].wire) for client in range(3))


def test_a_job_that_is_ended_asks_no_more(channel) -> None:
    channel.abort_signal.trigger(True)
    with pytest.raises(Aborted):
        list(channel.ask({0: Message(kind="enroll")}))
