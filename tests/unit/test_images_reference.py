"""References: the cases are those of github.com/distribution/reference and the kubelet's."""

import pytest

from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.images.reference import is_digest, parse_reference

SHA = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("image", "canonical"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1.36", "docker.io/library/busybox:1.36"),
        ("org/app", "docker.io/org/app:latest"),
        ("docker.io/busybox", "docker.io/library/busybox:latest"),
        ("index.docker.io/org/app", "docker.io/org/app:latest"),
        ("localhost/app", "localhost/app:latest"),
        ("localhost:5000/app:v1", "localhost:5000/app:v1"),
        ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
        ("ghcr.io/a/b/c__d.e-f", "ghcr.io/a/b/c__d.e-f:latest"),
        ("[::1]:5000/app", "[::1]:5000/app:latest"),
        ("UPPER/app", "UPPER/app:latest"),
        (f"busybox@{SHA}", f"docker.io/library/busybox@{SHA}"),
        (f"h:1/app:v1@{SHA}", f"h:1/app:v1@{SHA}"),
    ],
)
def test_normalized(image: str, canonical: str) -> None:
    assert str(parse_reference(image)) == canonical


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("Busybox", "invalid reference format: repository name (library/Busybox) must be lower"),
        ("", "invalid reference format"),
        ("a b", "invalid reference format"),
        ("app:tag:tag", "invalid reference format"),
        ("app:" + "t" * 129, "invalid reference format"),
        ("../../etc", "invalid reference format"),
        ("host.io/../x", "invalid reference format"),
        ("-x/y.z", "invalid reference format"),
        ("app@sha256:abc", "invalid reference format"),
        ("app@sha256:" + "a" * 63, "invalid checksum digest length"),
        ("app@md5:" + "a" * 32, "unsupported digest algorithm"),
        ("a" * 64, "cannot specify 64-byte hexadecimal strings"),
        ("h.io/" + "a" * 256, "must not be more than 255 characters"),
        ("app\n", "invalid reference format"),
    ],
)
def test_refused_in_the_kubelets_words(image: str, why: str) -> None:
    with pytest.raises(ImagePullError) as e:
        parse_reference(image)
    assert e.value.reason == "InvalidImageName"
    assert str(e.value).startswith(f'Failed to apply default image tag "{image}": couldn\'t parse')
    assert why in str(e.value)


def test_a_digest_is_safe_in_a_path() -> None:
    assert is_digest(SHA)
    for text in ("sha256:../../x", SHA.upper(), SHA + "\n", "sha1:" + "a" * 40, SHA[:-1]):
        assert not is_digest(text)
