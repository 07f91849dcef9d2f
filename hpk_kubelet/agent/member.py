"""A place in the pod network that is no pod's: `member SPEC.json`.

SPEC.json is PodPlan.network. When the place is there, one line of JSON is written to stdout:
{"ip": its address, "pid": this process's id, "hostIP": the node's address}; other processes get in
by `nsenter --target PID --user --net --preserve-credentials`. Each line on stdin is a newer
{"facts": NetworkFacts}; the end of stdin is the end of the place. Why it is not ready yet is told
on stderr.
"""

import json
import os
import select
import sys

from . import syscalls
from .journal import note
from .namespaces import NamespaceError
from .podnet import NetworkNotReady, PodNetwork, make_netns


def hold(spec: str) -> int:
    """Until stdin ends; the exit code."""
    with open(spec, encoding="utf-8") as f:
        network = json.load(f)
    try:
        pod = PodNetwork(network)
        pod.enter_users()
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        pod.map_users()
        netns = make_netns()
        pod.join(netns)
        os.close(netns)
        said = ""
        while True:
            try:
                place = pod.place(None)
                break
            except NetworkNotReady as e:
                if str(e) != said:
                    said = str(e)
                    note(said)
    except NamespaceError as e:
        note(str(e))
        return 1
    print(json.dumps({"ip": place.ip, "pid": os.getpid(), "hostIP": place.host_ip}), flush=True)
    lines = b""
    while True:
        for ready in select.select([sys.stdin, pod], [], [])[0]:
            if ready is pod:
                if not pod.hear():
                    return 1  # started anew, with a keeper
                continue
            data = os.read(0, 1 << 16)
            if not data:
                pod.close()
                return 0
            *whole, lines = (lines + data).split(b"\n")
            for line in whole:
                pod.tell(json.loads(line)["facts"])
