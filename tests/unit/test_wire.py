import pytest

from hpk_kubelet.agent import wire


def test_frames_survive_any_cut():
    sent = wire.encode_message({"type": "stop", "gracePeriodSeconds": 3}) + wire.encode_data(
        7, wire.STDERR, b"\x00\xffx"
    )
    for cut in range(len(sent) + 1):
        decoder = wire.Decoder()
        frames = decoder.feed(sent[:cut]) + decoder.feed(sent[cut:])
        assert frames[0].message() == {"type": "stop", "gracePeriodSeconds": 3}
        assert frames[1] == wire.Frame(wire.DATA, 7, wire.STDERR, b"\x00\xffx")


@pytest.mark.parametrize("data", [b"\xff" * 10, b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_is_refused(data):
    with pytest.raises(wire.WireError):
        wire.Decoder().feed(data)


@pytest.mark.parametrize("payload", [b"[]", b"{}", b"{", b'{"type": 1}'])
def test_a_message_is_an_object_with_a_type(payload):
    with pytest.raises(wire.WireError):
        wire.Frame(wire.MESSAGE, 0, 0, payload).message()
