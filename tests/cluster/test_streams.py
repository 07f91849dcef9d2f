"""kubectl exec, attach, run -i and cp."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

from conftest import Namespace, eventually, pod

SLEEPER = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done")


def test_exec_is_true_to_streams_codes_and_sizes(ns: Namespace, busybox: str) -> None:
    ns.create(pod("app", *SLEEPER, image=busybox))
    ns.wait_ready("app")

    def run(*argv: str, **more: object):
        return ns.kubectl("exec", *argv, check=False, **more)

    done = run("app", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.code, done.out, "err\n" in done.err) == (7, "out\n", True)
    assert run("-i", "app", "--", "cat", stdin="täxt\n").out == "täxt\n"
    assert "no such file" in run("app", "--", "/no/such").err
    lines = 400_000
    big = run("app", "--", "seq", str(lines)).out
    assert big == "".join(f"{i}\n" for i in range(1, lines + 1))
    digest = hashlib.sha256(big.encode()).hexdigest()
    assert run("-i", "app", "--", "sha256sum", stdin=big).out.split()[0] == digest
    # a terminal of a given size; `script` gives kubectl one here
    command = f"stty rows 31 cols 77; kubectl -n {ns.name} exec -it app -- sh -c 'stty size; tty'"
    seen = ns.user.run("script", "-qec", command, "/dev/null").out
    assert "31 77" in seen and "/dev/pts/" in seen
    with ThreadPoolExecutor(10) as many:
        answers = list(many.map(lambda i: run("app", "--", "echo", str(i)).out, range(20)))
    assert answers == [f"{i}\n" for i in range(20)]


def test_cp_both_ways(ns: Namespace, busybox: str) -> None:
    ns.create(pod("app", *SLEEPER, image=busybox))
    ns.wait_ready("app")
    name = f"/tmp/cp-{os.getpid()}"
    ns.user.sh(
        f"mkdir -p {name}/in/sub && head -c 3000000 /dev/urandom > {name}/in/a"
        f" && echo x > '{name}/in/sub/b c' && cd {name}/in && find . -type f | sort | "
        "tr '\\n' '\\0' | xargs -0 sha256sum > ../sums"
    )
    try:
        ns.kubectl("cp", f"{name}/in", "app:/data")
        inside = ns.kubectl("exec", "app", "--", "sh", "-c", "cd /data && find . -type f | sort")
        assert inside.out == "./a\n./sub/b c\n"
        ns.kubectl("cp", "app:/data", f"{name}/out")
        checked = ns.user.sh(f"cd {name}/out && sha256sum -c {name}/sums")
        assert checked.out.count(": OK") == 2
    finally:
        ns.user.run("rm", "-rf", name)


def test_attach_and_run_with_input(ns: Namespace, busybox: str) -> None:
    script = 'while read -r line; do echo "got $line"; done; echo end'
    whole = pod("reads", "sh", "-c", script, image=busybox)
    whole["spec"]["containers"][0] |= {"stdin": True, "stdinOnce": True}
    ns.create(whole)
    ns.wait_ready("reads")
    attached = ns.kubectl("attach", "-i", "reads", stdin="one\ntwo\n")
    assert "got one\ngot two\n" in attached.out
    assert ns.wait_phase("reads", "Succeeded")
    assert ns.logs("reads") == "got one\ngot two\nend\n"
    ran = ns.kubectl(
        "run", "once", "-i", "--rm", "--restart=Never", f"--image={busybox}", "-q", "--",
        "sh", "-c", "cat; exit 4", stdin="hello\n", check=False,
    )  # fmt: skip
    assert ran.out.count("hello") == 1
    assert ran.code == 4
    eventually("--rm removed it", lambda: "once" not in ns.kubectl("get", "pods").out)
