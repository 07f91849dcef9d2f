"""MPI between pods, as an MPI operator starts it: one pod's mpirun reaches the others by a program
that stands for ssh, and the ranks speak over the pods' network, or over their nodes'."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Namespace, pod
from netpods import address, on

PORT = 22022
TOOLS = f"""
cp /bin/busybox /tools/
printf '#!/bin/sh\\nhost=$1; shift\\necho "$*" | /tools/busybox nc $host {PORT}\\n' > /tools/remote
chmod +x /tools/remote
"""
RUN = """
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl=self,tcp OMPI_MCA_btl_tcp_if_include=eth0
printf '%s slots=1\\n' "$@" > /tools/hosts
sent() { cat /sys/class/net/eth0/statistics/tx_bytes; }
before=$(sent)
mpirun --hostfile /tools/hosts -n 2 --prtemca plm_ssh_agent /tools/remote sh -c '
    echo "rank on $HOSTNAME"; exec lmp -in /usr/share/lammps/bench/in.lj'
echo megabytes $((($(sent) - before) / 1000000))
"""


def host(name: str, registry: str, node: str, host_network: bool) -> dict[str, Any]:
    mounts = [{"name": "tools", "mountPath": "/tools"}]
    whole = pod(
        name, "/tools/busybox", "nc", "-ll", "-p", str(PORT), "-e", "sh",
        image=f"{registry}/mpi:1", annotations=on(node), hostNetwork=host_network,
        terminationGracePeriodSeconds=0, container={"volumeMounts": mounts},
    )  # fmt: skip
    whole["spec"] |= {
        "volumes": [{"name": "tools", "emptyDir": {}}],
        "initContainers": [
            {"name": "tools", "image": f"{registry}/busybox:1", "command": ["sh", "-c", TOOLS],
             "volumeMounts": mounts}
        ],
    }  # fmt: skip
    return whole


@pytest.mark.parametrize("host_network", [False, True], ids=["pod-network", "host-network"])
def test_mpi_ranks_in_different_pods(ns: Namespace, registry: str, host_network: bool) -> None:
    nodes = {"first": "node1", "second": "node2"}
    ns.create(*(host(name, registry, node, host_network) for name, node in nodes.items()))
    for name in nodes:
        ns.wait_ready(name)
    hosts = [address(ns, name) for name in nodes]
    said = ns.kubectl("exec", "first", "-c", "main", "--", "sh", "-c", RUN, "sh", *hosts).out
    ranks = {line.removeprefix("rank on ") for line in said.splitlines() if "rank on" in line}
    assert ranks == set(nodes.values() if host_network else nodes)
    assert "on 2 procs for 100 steps with 32000 atoms" in said
    assert int(said.rpartition("megabytes ")[2]) >= 20, "what the ranks exchange went over eth0"
