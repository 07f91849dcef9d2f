"""docs/conformance.md. Pure but for reading the reasons."""

from __future__ import annotations

import datetime as dt
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from .build import VERSION
from .results import Results, sig

REASONS = Path(__file__).parent / "reasons.toml"
UNEXPLAINED = "not looked into yet"


def reasons() -> dict[str, str]:
    text: dict[str, str] = tomllib.loads(REASONS.read_text())
    return text


def reason(name: str, known: Mapping[str, str]) -> str:
    """The reason of the longest key that is a part of the name."""
    keys = [key for key in known if key in name]
    return known[max(keys, key=len)] if keys else UNEXPLAINED


def document(names: Sequence[str], results: Results) -> str:
    """The whole page: totals, then every test that does not pass, then those that once failed."""
    known = reasons()
    every = Counter(sig(name) for name in names)
    good = Counter(sig(name) for name in names if results.passed(name))
    bad = sorted(name for name in names if not results.passed(name))
    flaky = sorted(name for name in names if results.flaky(name))
    lines = [
        "# Conformance",
        "",
        f"Kubernetes' own end-to-end suite, v{VERSION}: {len(names)} tests carry `[Conformance]`.",
        "`make conformance` runs them on the sandbox, with two partitions as two nodes, as an",
        "ordinary user, and writes this page. A test that fails is run again, at most twice.",
        "",
        f"**{len(names) - len(bad)} of {len(names)} pass** "
        f"({dt.datetime.now(dt.UTC):%Y-%m-%d}); {len(flaky)} of them not at the first try.",
        "",
        "| SIG | pass | tests |",
        "|---|---|---|",
        *(f"| {group} | {good[group]} | {every[group]} |" for group in sorted(every)),
        f"| all | {len(names) - len(bad)} | {len(names)} |",
        "",
    ]
    if bad:
        lines += ["## What does not pass", "", "| test | why |", "|---|---|"]
        lines += [f"| {cell(name)} | {cell(reason(name, known))} |" for name in bad]
        lines.append("")
    if flaky:
        lines += ["## What did not pass at the first try", ""]
        lines += [f"- {cell(name)}" for name in flaky]
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    return (
        text.replace("[Conformance]", "")
        .replace("[NodeConformance]", "")
        .replace("|", "\\|")
        .strip()
    )
