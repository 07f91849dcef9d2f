"""Addresses, ports, the doctor's judgements, and the command line's last resort."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from hpk_kubelet import cli
from hpk_kubelet.config import Config, Paths, load_config
from hpk_kubelet.controlplane import addresses, doctor, serve, stack
from hpk_kubelet.controlplane.addresses import choose_ports, node_address, port_range
from hpk_kubelet.controlplane.kubeconfig import Control
from hpk_kubelet.controlplane.pki import Pki
from hpk_kubelet.errors import HPKError


def test_port_range() -> None:
    assert port_range(" 5000-5002 ") == range(5000, 5003)
    assert port_range("").start >= 1024
    for wrong in ("5000", "a-b", "6000-5000", "80-90", "1024-70000"):
        with pytest.raises(HPKError, match=r"config\.yaml: ports"):
            port_range(wrong)


def test_ports_are_kept_unless_taken(tmp_path: Path) -> None:
    memory = tmp_path / "ports.json"
    first = choose_ports(("a", "b"), port_range(""), memory)
    assert len(set(first.values())) == 2
    assert choose_ports(("a", "b"), port_range(""), memory) == first
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", first["a"]))
        taken.listen()
        second = choose_ports(("a", "b"), port_range(""), memory)
    assert second["a"] != first["a"] and second["b"] == first["b"]
    assert json.loads(memory.read_text()) == second


def test_no_port_left(tmp_path: Path) -> None:
    with pytest.raises(HPKError, match="no free port for b in 23456-23456"):
        choose_ports(("a", "b"), range(23456, 23457), tmp_path / "p")


def test_a_host_name_that_is_loopback_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_address("10.1.2.3") == "10.1.2.3"
    monkeypatch.setattr(addresses, "_by_name", lambda: "127.0.1.1")
    monkeypatch.setattr(addresses, "_by_route", lambda: "")
    monkeypatch.setattr(addresses, "_by_interface", lambda: "10.9.9.9")
    assert node_address() == "10.9.9.9"
    monkeypatch.setattr(addresses, "_by_interface", lambda: "")
    with pytest.raises(HPKError, match="no IPv4 address but loopback"):
        node_address()


def test_nothing_secret_and_nothing_anonymous_on_command_lines(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    ports = dict(zip(stack.PORTS, range(20000, 20010), strict=False))
    binaries = {name: Path("/b") / name for name in stack.BINARIES}
    site = stack.Site(Paths(tmp_path), "10.0.0.1", ports, binaries)
    certs = stack.certificates(pki, "10.0.0.1")
    etcd = stack.etcd(site, pki, certs)
    api = stack.apiserver(site, pki, certs)
    manager = stack.controller_manager(site, pki)
    assert (
        "--client-cert-auth=true" in etcd.argv
        and f"--trusted-ca-file={pki.etcd_ca.cert}" in etcd.argv
    )
    assert not any(a.partition("=")[2].startswith("http:") for a in etcd.argv)
    assert "--anonymous-auth=false" in api.argv and "--authorization-mode=Node,RBAC" in api.argv
    for component in (etcd, api, manager):
        assert not any("PRIVATE" in a or "BEGIN" in a for a in component.argv)
        assert not any(key in component.env for key in ("TOKEN", "PASSWORD"))


PROBE = """host=n7
home=secret-token
python=3.6.8
python=3.11.2
apptainer=apptainer version 1.4.5
userns=yes
network=pasta: not found
sbatch=no sbatch: error: Access denied
"""


def test_the_trial_jobs_answers_are_judged() -> None:
    found = {f.what: f for f in doctor.judge_probe(PROBE, "secret-token")}
    assert found["Python on compute nodes"].level == "ok"
    assert "3.6.8, 3.11.2" in found["Python on compute nodes"].text
    assert found["shared home"].level == "ok"
    assert found["/dev/net/tun on compute nodes"].level == "warn"
    assert found["pod network on compute nodes"].level == "warn"
    assert "pasta: not found" in found["pod network on compute nodes"].text
    assert found["sbatch from compute nodes"].level == "fail"
    assert "Access denied" in found["sbatch from compute nodes"].text
    old = {f.what: f for f in doctor.judge_probe("host=n\npython=3.6.8\n", "t")}
    assert old["Python on compute nodes"].level == "fail"
    assert old["shared home"].level == "fail"


def test_subordinate_ids_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run", lambda *_, **__: (127, ""))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/newuidmap")
    table = tmp_path / "subuid"
    table.write_text("alice:100000:65536\n1001:1:10\nbroken\n")
    assert doctor.subordinate_ids("alice", 5, table).level == "ok"
    assert doctor.subordinate_ids("bob", 1001, table).level == "warn"
    assert doctor.subordinate_ids("carol", 7, tmp_path / "none").level == "warn"


def test_the_state_file_system_is_tried(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "h")
    found = {f.what: f.level for f in doctor.state_file_system(paths)}
    assert found["file locks"] == "ok" and "fsync" in found
    assert list(paths.etcd.iterdir()) == []


def test_a_process_that_is_not_serve_is_not_the_control_plane() -> None:
    host = socket.gethostname()
    assert not serve.runs_here(Control("https://127.0.0.1:1", host, None, 1, ""))
    assert not serve.runs_here(Control("https://127.0.0.1:1", host, None, 2**22 + 1, ""))
    assert not serve.runs_here(Control("https://127.0.0.1:1", "elsewhere", None, 1, ""))


@pytest.mark.parametrize("text", ["a: [", "ports: [1]", "nope: 1", "\tx", "slurm: 3"])
def test_a_wrong_configuration_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(HPKError) as raised:
        load_config(Paths(tmp_path))
    assert "config.yaml" in str(raised.value) and "\n" not in str(raised.value)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hpk", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPK_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text("ports: [1]")
    assert run_cli(monkeypatch, "serve") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "config.yaml" in said


def test_a_bug_is_one_line_and_the_rest_in_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPK_HOME", str(tmp_path))

    def broken(*_: object) -> Config:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(cli, "load_config", broken)
    assert run_cli(monkeypatch, "serve") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "this is a bug" in said and "hpk.log" in said
    assert "Traceback" in (tmp_path / "log" / "hpk.log").read_text()
