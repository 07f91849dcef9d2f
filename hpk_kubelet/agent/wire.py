"""The protocol between agent and kubelet: frames over one TLS connection that the agent dials.

A frame is a header and a payload; header: payload length (uint32), kind (uint8), stream (uint32),
channel (uint8), big endian.

MESSAGE frames carry a JSON object with a "type" on stream 0; DATA frames carry bytes of a stream,
with the channel numbers of Kubernetes' v5.channel.k8s.io protocol, so that the kubelet passes
exec and attach through without looking inside.

Agent → kubelet:
    hello    {uid, token, version, state: PodState, events: [AgentEvent…]}   first; a wrong token
             closes the connection
    state    {state: PodState}
    event    {event: AgentEvent}
    refresh  {}                       asks for a new plan before anything has run
    closed   {stream, error?}         the stream is over on this side
Kubelet → agent:
    welcome  {}
    plan     {plan: PodPlan}          answer to refresh;  or {error: sentence}
    stop     {gracePeriodSeconds}     delete the pod: preStop, stop signal, grace, KILL. Again with
                                      a smaller value shortens the grace
    limit    {activeDeadlineSeconds}  the pod's new one, null for none
    container {container: ContainerPlan}   an ephemeral container, a main one that could not be
                                      configured before, or one with another image, which is
                                      restarted; without effect the second time
    network  {facts: NetworkFacts}    the newest facts of the pod network
    open     {stream, kind, …}        kind "exec": container, command, tty, stdin
                                           "attach": container, tty, stdin
                                           "logs": container, previous, follow, tailLines,
                                                sinceTime, limitBytes, timestamps (lines as text
                                                on STDOUT, as `kubectl logs` prints them)
                                           "portForward": port
                                           "stats": one JSON document on STDOUT
    closed   {stream}
Either way:
    window   {stream, bytes}          the receiver has consumed so many bytes of DATA: a sender has
                                      at most WINDOW bytes of a stream on the way
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, List, NamedTuple, Union

PROTOCOL_VERSION = 1
WINDOW = 1 << 20
MAX_PAYLOAD = 16 << 20

MESSAGE = 0
DATA = 1

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255

_HEADER = struct.Struct(">IBIB")


class Frame(NamedTuple):
    kind: int
    stream: int
    channel: int
    payload: bytes

    def message(self) -> Dict[str, Any]:
        """The JSON object of a MESSAGE frame; WireError when it is none."""
        try:
            message = json.loads(self.payload)
        except ValueError as e:
            raise WireError(f"a message is not JSON: {e}") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise WireError("a message is not an object with a type")
        return message


class WireError(Exception):
    """The peer does not speak this protocol; the connection must be closed."""


def encode_message(message: Dict[str, Any], end: bytes = b"") -> bytes:
    """`end`: white space after the JSON, for what carries the frames."""
    payload = json.dumps(message, separators=(",", ":")).encode() + end
    return _HEADER.pack(len(payload), MESSAGE, 0, 0) + payload


def encode_data(stream: int, channel: int, payload: Union[bytes, memoryview]) -> bytes:
    return _HEADER.pack(len(payload), DATA, stream, channel) + bytes(payload)


class Decoder:
    """Cuts a byte stream into frames, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> List[Frame]:
        """The frames that `data` completes; WireError on a frame no peer of ours would send."""
        self._buffer += data
        frames = []
        offset = 0
        while len(self._buffer) - offset >= _HEADER.size:
            length, kind, stream, channel = _HEADER.unpack_from(self._buffer, offset)
            if length > MAX_PAYLOAD or kind not in (MESSAGE, DATA):
                raise WireError(f"a frame of kind {kind} and {length} bytes")
            end = offset + _HEADER.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[offset + _HEADER.size : end])
            frames.append(Frame(kind, stream, channel, payload))
            offset = end
        del self._buffer[:offset]
        return frames
