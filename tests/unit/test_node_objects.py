import base64
import json
import math

from hpk_kubelet.node.objects import written_tokens
from hpk_kubelet.spec.plan import kept


def a_pod(**token):
    source = {"serviceAccountToken": {"path": "token", **token}}
    volume = {"name": "api", "projected": {"sources": [source]}}
    return {"metadata": {}, "spec": {"volumes": [volume]}}


def jwt(**claims):
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{payload}.c2ln"


def written(directory, text):
    path = directory / "volumes" / "api" / "..data" / "token"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_tokens_of_an_earlier_kubelet_are_known_again(tmp_path):
    text = jwt(iat=1000, exp=2000)
    written(tmp_path, text)
    ((request, token),) = written_tokens(a_pod(), tmp_path).items()
    assert (request.volume, request.path) == ("api", "token")
    assert token.value == text and math.isclose(token.refresh, 1800)


def test_what_is_no_token_is_requested_anew(tmp_path):
    assert written_tokens(a_pod(), tmp_path) == {}
    for number, text in enumerate(("", "a.b", "a.####.c", jwt(exp=1), jwt(iat="x", exp=1))):
        written(tmp_path / str(number), text)
        assert written_tokens(a_pod(), tmp_path / str(number)) == {}


def test_what_is_kept_of_a_plan():
    container = {"name": "c", "image": {"id": "i"}, "env": ["A=1"], "mounts": []}
    rank = {**container, "mpi": ["--mpi=pmix"]}
    plan = {
        "uid": "u", "agent": {"token": "t"}, "volumes": {"v": {}}, "awaits": ["/v"],
        "initContainers": [container], "containers": [rank],
    }  # fmt: skip
    short = kept(plan)
    assert short == {
        "uid": "u", "agent": {"token": "t"}, "volumes": {}, "awaits": ["/v"],
        "initContainers": [{"name": "c", "image": {"id": "i"}}],
        "containers": [{"name": "c", "image": {"id": "i"}, "mpi": ["--mpi=pmix"]}],
    }  # fmt: skip
    assert plan["containers"] == [rank]
