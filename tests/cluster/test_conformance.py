"""A few quick tests of Kubernetes' own conformance suite; the whole is `make conformance`."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import User

sys.path.insert(0, str(Path(__file__).parents[2] / "bootstrap"))

from conformance_lib import build
from conformance_lib.results import read_junit
from conformance_lib.run import suite

NAMES = [
    f"[sig-{name} [Conformance]"
    for name in (
        "apps] Job should run a job to completion when tasks sometimes fail and are locally "
        "restarted",
        "node] Downward API should provide hostIPs as an env var [NodeConformance]",
        "node] ConfigMap should be consumable via environment variable [NodeConformance]",
        "node] Container Runtime blackbox test on terminated container should report termination "
        "message from log output if TerminationMessagePolicy FallbackToLogsOnError is set "
        "[NodeConformance]",
        "node] Containers should use the image defaults if command and args are blank "
        "[NodeConformance]",
        "node] Downward API should provide default limits.cpu/memory from node allocatable "
        "[NodeConformance]",
        "node] InitContainer [NodeConformance] should invoke init containers on a RestartNever pod",
        "node] Kubelet when scheduling an agnhost Pod with hostAliases should write entries to "
        "/etc/hosts [NodeConformance]",
        "node] Pods should support remote command execution over websockets [NodeConformance]",
        "node] Pods should support retrieving logs from the container over websockets "
        "[NodeConformance]",
        "node] Security Context When creating a container with runAsUser should run the container "
        "with uid 65534 [LinuxOnly] [NodeConformance]",
        "node] Variable Expansion should allow substituting values in a volume subpath",
        "storage] EmptyDir volumes should support (non-root,0644,tmpfs) [LinuxOnly] "
        "[NodeConformance]",
        "storage] Projected combined should project all components that make up the projection "
        "API [Projection] [NodeConformance]",
    )
]


def test_a_sample_of_the_conformance_suite(alice: User, registry: str) -> None:
    build.suite_binary()
    home = Path("/home/alice/conformance-sample")
    alice.sh(f"rm -rf {home}; mkdir {home}")
    repositories = f"promoterE2eRegistry: {registry}\n"
    alice.run("tee", f"{home}/repositories.yaml", stdin=repositories)
    said = alice.run(*suite(NAMES, home, home / "repositories.yaml"), check=False, timeout=240)
    results = read_junit(alice.sh(f"cat {home}/junit*.xml").out)
    assert {r.name: r.words for r in results if not r.passed} == {}, said.out[-2000:]
    assert sorted(r.name for r in results) == sorted(NAMES)
