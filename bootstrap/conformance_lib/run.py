"""Runs the tests: several processes of the suite at once, then those that want to be alone."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sandbox_lib.base import SandboxError, say

from . import build
from .results import ATTEMPTS, Result, Results, batches, focus, read_junit

BATCH = 5  # tests of one process at most: each costs a second to start
SUITE_TIMEOUT = "60m"
_NO_RESULT = "the suite ended without a result for this test"


def suite(names: Sequence[str], reports: Path, repositories: Path) -> list[str]:
    """The command that runs these tests on a node, as alice; both paths are as she sees them."""
    return [
        "env", "KUBECONFIG=/home/alice/.hpk/kubeconfig", f"KUBE_TEST_REPO_LIST={repositories}",
        f"/opt/hpk/components/e2e.test/{build.VERSION}/e2e.test",
        "--provider=skeleton", "--num-nodes=2", "--disable-log-dump",
        "--kubectl-path=/usr/local/bin/kubectl", f"--report-dir={reports}",
        f"--ginkgo.focus={focus(names)}", "--ginkgo.succinct", "--ginkgo.no-color",
        f"--ginkgo.timeout={SUITE_TIMEOUT}", "--ginkgo.silence-skips",
    ]  # fmt: skip


class Runner:
    """`home` is alice's, as the host and (`inside`) as the nodes see it."""

    def __init__(self, results: Results, home: Path, parallel: int) -> None:
        self.results = results
        self.parallel = parallel
        self.home = home
        self.inside = Path("/home/alice")
        self._lock = threading.Lock()
        self._done = 0
        self._all = 0
        self._empty = 0  # batches in a row of which nothing came
        self._logs = results.path.parent / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def run(self, names: Sequence[str], attempts: int = ATTEMPTS) -> None:
        """Until each test passed or used up its attempts; serial ones come last, alone."""
        for attempt in range(1, attempts + 1):
            due = self.results.due(names, attempt)
            together = [name for name in due if "[Serial]" not in name]
            # tests of one kind would otherwise all wait for the same thing at the same time
            random.Random(len(names)).shuffle(together)
            together.sort(key=lambda name: "[Slow]" not in name)
            alone = [name for name in due if "[Serial]" in name]
            self._done, self._all = 0, len(due)
            if due and attempt > 1:
                say(f"attempt {attempt} of {len(due)} tests")
            size = max(1, min(BATCH, len(together) // (4 * self.parallel)))
            self._pool(batches(together, size), self.parallel)
            self._pool(batches(alone, 1), 1)

    def _pool(self, work: list[list[str]], workers: int) -> None:
        errors: list[Exception] = []

        def serve() -> None:
            while True:
                with self._lock:
                    if not work or errors:
                        return
                    names = work.pop(0)
                try:
                    self._batch(names)
                except Exception as e:
                    errors.append(e)

        threads = [threading.Thread(target=serve) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _batch(self, names: list[str]) -> None:
        stamp = f"{time.time():.3f}"
        reports = self.home / "conformance" / stamp
        inside = self.inside / "conformance" / stamp
        log = self._logs / f"{stamp}.log"
        with log.open("w") as out:
            argv = suite(names, inside, self.inside / "conformance" / "repositories.yaml")
            build.alice(*argv, check=False, stdout=out, stderr=subprocess.STDOUT)
        found: dict[str, Result] = {}
        for report in reports.glob("junit*.xml"):
            for result in read_junit(report.read_text()):
                if result.name in names:
                    found[result.name] = result
        missing = [Result(name, False, 0.0, _NO_RESULT) for name in names if name not in found]
        with self._lock:
            self._empty = 0 if found else self._empty + 1
            if self._empty >= 3 * self.parallel:
                raise SandboxError(f"the suite gives no results any more: see {log}")
            self.results.add([*found.values(), *missing])
            self._done += len(names)
            for result in [*found.values(), *missing]:
                word = "passed" if result.passed else "FAILED"
                say(f"[{self._done}/{self._all}] {word} {result.seconds:.0f} s {result.name}")
                if not result.passed:
                    say(f"    {result.words[:300]} ({log})")
