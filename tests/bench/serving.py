"""The kubelet's servers: exec and logs through kubectl, against srun --overlap and cat.

`main` runs as the user on the login node and prints JSON; `section` is a part of the page.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MEGABYTES = 100
SESSIONS = 50
ROUNDS = 20
KUBECTL = ("kubectl", "-n", "bench")
LINE = "x" * 127  # and its end: 8192 lines are 1 MiB


def timed(*argv: str, expect: bytes | None = None) -> float:
    """Seconds of a command whose output must be `expect`."""
    began = time.monotonic()
    done = subprocess.run(argv, check=True, capture_output=True)
    seconds = time.monotonic() - began
    if expect is not None and done.stdout != expect:
        raise SystemExit(f"{' '.join(argv)} printed {done.stdout[:200]!r}")
    return seconds


def manifest(name: str, image: str, script: str, **extra: object) -> dict:
    container = {"name": "main", "image": image, "command": ["sh", "-c", script], **extra}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
                 "containers": [container]},
    }  # fmt: skip


def create(*pods: dict) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(pods)})
    subprocess.run(
        [*KUBECTL, "create", "-f", "-"],
        input=text,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def directory_and_job(name: str) -> tuple[Path, str]:
    """Where a pod's files are, and its job."""
    uid = subprocess.run(
        [*KUBECTL, "get", "pod", name, "-o", "jsonpath={.metadata.uid}"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    directory = Path.home() / ".hpk/pods" / uid
    states = (directory / "journal.jsonl").read_text().splitlines()
    job = next(line["state"]["jobId"] for line in map(json.loads, states) if "state" in line)
    return directory, str(job)


def remove(*names: str) -> None:
    subprocess.run(
        [*KUBECTL, "delete", "pod", *names, "--ignore-not-found"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def execs(job: str) -> dict:
    rounds = []
    itself = ("kubectl", "version", "--client")
    through = (*KUBECTL, "exec", "server", "--")
    bare = ("srun", "--overlap", f"--jobid={job}")
    for i in range(-2, ROUNDS):
        times = (timed(*through, "true"), timed(*bare, "true"), timed(*itself))
        if i >= 0:  # the first two warm caches
            rounds.append(times)

    def at_once(prefix: tuple[str, ...]) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(SESSIONS) as threads:
            runs = [
                threads.submit(timed, *prefix, "echo", str(i), expect=f"{i}\n".encode())
                for i in range(SESSIONS)
            ]
            for run in runs:
                run.result()
        return time.monotonic() - began

    return {"rounds": rounds, "at once": [at_once(through), at_once(bare)]}


def logs(image: str) -> dict:
    """Followed while they are written. The yardstick is the same text from a file through `cat`."""
    lines = MEGABYTES * 8192
    text = f"yes {LINE} | head -n {lines}"
    remove("writer")
    create(manifest("writer", image, f"until [ -e /go ]; do sleep 0.1; done; {text}"))
    subprocess.run(
        [*KUBECTL, "wait", "pod/writer", "--for=condition=Ready", "--timeout=60s"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    follow = subprocess.Popen([*KUBECTL, "logs", "-f", "writer"], stdout=subprocess.PIPE)
    assert follow.stdout is not None
    timed(*KUBECTL, "exec", "writer", "--", "touch", "/go")
    began = time.monotonic()
    shown = 0
    while block := follow.stdout.read1(1 << 20):  # type: ignore[attr-defined]
        shown += len(block)
    seconds = time.monotonic() - began
    follow.wait()
    remove("writer")
    file = Path.home() / "bench-text"
    subprocess.run(f"{text} > {file}", shell=True, check=True)
    cat = timed("cat", str(file))
    file.unlink()
    return {"pair": [seconds, cat], "bytes": shown, "of": lines * (len(LINE) + 1)}


def main() -> None:
    image = sys.argv[1]
    subprocess.run(["kubectl", "create", "namespace", "bench"], capture_output=True, check=False)
    remove("server")
    create(manifest("server", image, "sleep 100000"))
    subprocess.run(
        [*KUBECTL, "wait", "pod/server", "--for=condition=Ready", "--timeout=60s"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    result = {"exec": execs(directory_and_job("server")[1]), "logs": logs(image)}
    remove("server")
    print(json.dumps(result))


def section(result: dict) -> str:
    rounds = result["exec"]["rounds"]
    ratio = statistics.median(ours / bare for ours, bare, _ in rounds)
    ours, bare, itself = (statistics.median(column) * 1000 for column in zip(*rounds, strict=True))
    many, many_bare = result["exec"]["at once"]
    log = result["logs"]
    shown, cat = log["pair"]
    kept = "all of it" if log["bytes"] == log["of"] else f"{log['bytes']} of {log['of']} bytes"
    return "\n".join(
        [
            f"## `kubectl exec`: **{ratio:.2f}×** `srun --overlap`",
            "",
            "| | through kubectl | yardstick | ratio |\n|---|---|---|---|",
            f"| `true` in a running pod (median of {len(rounds)} interleaved rounds), over `srun "
            f"--overlap --jobid=… true` | {ours:.0f} ms | {bare:.0f} ms | {ratio:.2f}× |",
            f"| of which kubectl's own start (`kubectl version --client`) | {itself:.0f} ms | | |",
            f"| {SESSIONS} at once, each with its own answer | {many:.1f} s | {many_bare:.1f} s "
            f"| {many / many_bare:.2f}× |",
            f"| `kubectl logs -f` while {MEGABYTES} MiB are written ({kept} came), over `cat` "
            f"of as much | {shown:.2f} s | {cat:.2f} s | {shown / cat:.1f}× |",
            "",
        ]
    )


if __name__ == "__main__":
    main()
