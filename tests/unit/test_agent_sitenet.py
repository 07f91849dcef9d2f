"""A pod's place in a site's network: what the site's program is told, and what it may answer."""

import os
from pathlib import Path
from typing import Any

import pytest

from hpk_kubelet.agent.podnet import NetworkNotReady, Place
from hpk_kubelet.agent.sitenet import SiteNetwork, address, call

ECHO = """#!/bin/sh
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $(readlink $CNI_NETNS) $(cat)" >> {log}
[ -f {log}.fail ] && {{ echo '{{"msg": "no address is left"}}'; exit 1; }}
echo '{{"ips": [{{"address": "fd00::7/64"}}, {{"address": "172.30.1.7/24"}}]}}'
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "site-network"
    path.write_text(ECHO.format(log=tmp_path / "log"))
    path.chmod(0o755)
    return path


def test_it_is_asked_until_there_is_an_address_and_told_the_end(program: Path) -> None:
    log, failing = program.with_name("log"), program.with_name("log.fail")
    failing.touch()
    network = SiteNetwork(str(program), "u-1", "10.0.0.1")
    netns = os.open("/proc/self/ns/net", os.O_RDONLY)
    network.join(netns)
    with pytest.raises(NetworkNotReady, match=r"site-network on node .*: no address is left"):
        network.place(30)
    failing.unlink()
    place = None
    while place is None:
        try:
            place = network.place(30)
        except NetworkNotReady as e:
            assert "no address" in str(e)
    assert place == Place("172.30.1.7", "10.0.0.1")
    network.close()
    os.close(netns)
    called = log.read_text().splitlines()
    namespace = Path("/proc/self/ns/net").readlink()
    told = f'u-1 eth0 {namespace} {{"cniVersion": "1.0.0", "name": "hpk"}}'
    assert called[-2:] == [f"ADD {told}", f"DEL {told}"]
    assert set(called[:-1]) == {f"ADD {told}"}


def test_a_program_that_says_nothing_is_told_by_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="exit code 1"):
        call("/bin/false", "ADD", "u", "/n")
    with pytest.raises(FileNotFoundError):
        call(str(tmp_path / "none"), "ADD", "u", "/n")


@pytest.mark.parametrize("result", [{}, {"ips": []}, {"ips": [{"address": "fd00::7/64"}]}])
def test_an_answer_without_an_address_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no IPv4 address"):
        address(result)


def test_the_helper_ends_with_an_agent_that_never_had_a_namespace(program: Path) -> None:
    SiteNetwork(str(program), "u-1", "10.0.0.1").close()
    assert not program.with_name("log").exists()
