"""Texts that contain what only the compute node knows (see plan.Late)."""

from __future__ import annotations

from hpk_kubelet.spec.plan import Late, LateField

Value = str | Late
"""A text, or one that is completed on the compute node (then it has at least three parts)."""


def field(name: LateField) -> Late:
    return ["", name, ""]


def join(values: list[Value]) -> Value:
    """The texts one after another; a plain str when nothing late is among them."""
    parts = [""]
    for value in values:
        if isinstance(value, str):
            parts[-1] += value
        else:
            parts[-1] += value[0]
            parts += value[1:]
    return parts[0] if len(parts) == 1 else parts


def parts(value: Value) -> list[str]:
    """The text's parts, or the text as its only one."""
    return [value] if isinstance(value, str) else value
