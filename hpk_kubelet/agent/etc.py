"""The text of the containers' /etc/hosts and /etc/resolv.conf (pure)."""

from typing import Any, Dict, List

MOST_SERVERS, MOST_SEARCHES, LONGEST_SEARCH = 3, 32, 2048  # kubelet's validation.go


def hosts_file(hosts: Dict[str, Any], node_file: str, pod_ip: str) -> str:
    """`hosts` is HostsPlan; `node_file` the text of the node's own."""
    text: str = hosts["header"]
    if hosts["node"]:
        text += node_file + "\n"
    if hosts["names"]:
        text += "%s\t%s\n" % (pod_ip, "\t".join(hosts["names"]))
    aliases: str = hosts["aliases"]
    return text + aliases


def parse_resolver(text: str) -> Dict[str, List[str]]:
    """resolv.conf(5): of several search lines the last counts."""
    found: Dict[str, List[str]] = {"nameservers": [], "searches": [], "options": []}
    for line in text.splitlines():
        words = line.split("#", 1)[0].split(";", 1)[0].split()
        if len(words) < 2:
            continue
        if words[0] == "nameserver":
            found["nameservers"].append(words[1])
        elif words[0] in ("search", "domain"):
            found["searches"] = words[1:]
        elif words[0] == "options":
            found["options"] += words[1:]
    return found


def resolver_file(plan: Dict[str, Any], node_file: str, loopback: str) -> str:
    """`plan` is ResolverPlan; `loopback` takes the place of the node's own nameservers on its
    loopback device, which a pod with a network of its own does not reach ("": it does)."""
    node = parse_resolver(node_file)
    servers, searches, options = (list(plan[k]) for k in ("nameservers", "searches", "options"))
    if plan["node"] == "everything":
        servers += [
            loopback if loopback and server.startswith("127.") else server
            for server in node["nameservers"]
        ]
        if not servers and loopback:
            servers.append(loopback)
        options += node["options"]
    if plan["node"] != "nothing":
        searches += node["searches"]
    config = plan["config"]
    servers = list(dict.fromkeys(servers + config["nameservers"]))[:MOST_SERVERS]
    searches = list(dict.fromkeys(searches + config["searches"]))[:MOST_SEARCHES]
    while len(" ".join(searches)) > LONGEST_SEARCH:
        searches.pop()
    merged = {option.partition(":")[0]: option for option in options + config["options"]}
    text = "search %s\n" % " ".join(searches) if searches else ""
    text += "".join("nameserver %s\n" % server for server in servers)
    if merged:
        text += "options %s\n" % " ".join(merged.values())
    return text


def node_text(path: str) -> str:
    """One of the node's own files; "" if it has none."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as f:
            return f.read()
    except OSError:
        return ""
