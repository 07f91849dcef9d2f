"""An attachment that comes when the container has ended already."""

import pytest

from hpk_kubelet.agent.wire import ERROR, STDOUT
from hpk_kubelet.server.agents import AgentGone
from hpk_kubelet.server.attach import Attachment, ReadLogs


class Stream:
    def __init__(self, *received, error=""):
        self.received = list(received)
        self.error = error
        self.closed = False

    async def send(self, channel, data):
        pass

    async def receive(self):
        return self.received.pop(0) if self.received else None

    def close(self):
        self.closed = True


async def log(*parts):
    for part in parts:
        yield part


async def everything(attachment):
    found = []
    while (received := await attachment.receive()) is not None:
        found.append(received)
    return found


@pytest.mark.parametrize("stream", [None, Stream(error="container c not running")])
async def test_what_was_read_before_is_not_told_again(stream):
    attachment = Attachment(stream, log(b"one\n", b"two\n", b"three\n"), 6)
    *text, (channel, status) = await everything(attachment)
    assert text == [(STDOUT, b"o\n"), (STDOUT, b"three\n")]
    assert channel == ERROR and b'"Success"' in status
    assert stream is None or stream.closed
    with pytest.raises(AgentGone):
        await attachment.send(0, b"input")


async def test_a_container_that_runs_is_attached_to():
    attachment = Attachment(Stream((STDOUT, b"x"), (ERROR, b"{}")), log(b"all"), 0)
    assert await everything(attachment) == [(STDOUT, b"x"), (ERROR, b"{}")]


async def test_another_failure_is_told_as_it_is():
    attachment = Attachment(Stream(error="the connection was lost"), log(b"all"), 0)
    assert await everything(attachment) == []
    assert attachment.error == "the connection was lost"


def test_a_log_read_long_ago_is_forgotten():
    now = [100.0]
    read = ReadLogs(lambda: now[0])
    read.note(("u", "c"), 7)
    assert read.take(("u", "other")) is None
    assert (read.take(("u", "c")), read.take(("u", "c"))) == (7, None)
    read.note(("u", "c"), 7)
    now[0] += 11
    assert read.take(("u", "c")) is None
