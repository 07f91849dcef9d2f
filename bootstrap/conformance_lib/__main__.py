"""Runs Kubernetes' own conformance tests against HPK on a sandbox of two partitions, and writes
docs/conformance.md. Settings come as environment variables, from `make conformance`:
FOCUS, SKIP: regular expressions on tests' names; PARALLEL: how many run at once (4); ATTEMPTS: how
often a test may be tried (3); FRESH=1: forget what an interrupted run has done.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys

import msgspec
from sandbox_lib.base import CHECKOUT, SandboxError, cache_dir, run_dir, say
from sandbox_lib.slurmconf import REGISTRY

from . import build, report
from .results import ATTEMPTS, Results, sig
from .run import Runner


def conformance_tests() -> list[str]:
    """Their names, from the suite itself."""
    words = (f"/opt/hpk/components/e2e.test/{build.VERSION}/e2e.test", "--list-conformance-tests")
    listed = build.alice(*words, capture_output=True).stdout
    return [" ".join(entry["codename"].split()) for entry in msgspec.yaml.decode(listed)]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("conformance", None, __doc__, formatter_class=form).parse_args()
    chosen, skipped = os.environ.get("FOCUS", ""), os.environ.get("SKIP", "")
    parallel = int(os.environ.get("PARALLEL") or 4)
    attempts = int(os.environ.get("ATTEMPTS") or ATTEMPTS)
    home = run_dir() / "home" / "alice"
    build.binaries()
    build.cluster(home)
    names = conformance_tests()
    state = cache_dir() / "conformance" / os.environ["HPK_SANDBOX"]
    if os.environ.get("FRESH"):
        shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True, exist_ok=True)
    results = Results(state / "results.jsonl")
    wanted = [
        name
        for name in names
        if re.search(chosen, name) and not (skipped and re.search(skipped, name))
    ]
    if chosen:
        results.forget(wanted)  # who names tests wants to see them run
    build.alice("mkdir", "-p", "/home/alice/conformance")
    text = build.repositories(REGISTRY)
    build.alice("tee", "/home/alice/conformance/repositories.yaml", input=text, capture_output=True)
    Runner(results, home, parallel).run(wanted, attempts)
    passed = sum(results.passed(name) for name in wanted)
    for name in wanted:
        if not results.passed(name):
            say(f"does not pass: {name}")
    say(f"{passed} of {len(wanted)} tests pass")
    if all(name in results.of for name in names):
        (CHECKOUT / "docs" / "conformance.md").write_text(report.document(names, results))
        say(f"docs/conformance.md: {len({sig(n) for n in names})} groups, {len(names)} tests")


try:
    main()
except (SandboxError, OSError) as error:
    say(str(error))
    sys.exit(1)
except KeyboardInterrupt:
    sys.exit(130)
