"""`$(VAR)` as Kubernetes expands it (third_party/forked/golang/expansion)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpk_kubelet.spec.late import Value, join

Lookup = Callable[[str], Value]


def lookup_in(*contexts: Mapping[str, Value]) -> Lookup:
    """Finds a name in the first context that has it; an unknown one stays as it was written."""

    def look(name: str) -> Value:
        for context in contexts:
            if name in context:
                return context[name]
        return f"$({name})"

    return look


def expand(text: str, lookup: Lookup) -> Value:
    """Replaces `$(NAME)`; `$$` is a dollar sign; an unfinished reference is left alone."""
    out: list[Value] = []
    position = 0
    while True:
        dollar = text.find("$", position)
        if dollar < 0 or dollar + 1 == len(text):
            out.append(text[position:])
            return join(out)
        out.append(text[position:dollar])
        following = text[dollar + 1]
        position = dollar + 2
        if following == "$":
            out.append("$")
        elif following == "(":
            end = text.find(")", position)
            if end < 0:
                out.append("$(")
            else:
                out.append(lookup(text[position:end]))
                position = end + 1
        else:
            out.append("$" + following)
