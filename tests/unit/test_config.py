"""A wrong setting is one sentence with the file and the place, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpk_kubelet.config import Config, Paths, load_config
from hpk_kubelet.errors import HPKError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("maxPods: 0", "$.maxPods"),
        ("slurm: {pollInterval: 0}", "$.slurm.pollInterval"),
        ("slurm: {memoryOverheadMb: -5}", "$.slurm.memoryOverheadMb"),
        ("slurm: {defaultMemoryMb: 0}", "$.slurm.defaultMemoryMb"),
        ("address: foo", "address: 'foo' is not an IPv4 address"),
        ("address: '::1'", "address: '::1' is not an IPv4 address"),
        ("mirror: mirror.example", "is not an http:// or https:// URL"),
        ("localDir: scratch", "localDir: 'scratch' is not an absolute path"),
        ("network: site", "network: site and siteNetwork go together"),
        ("siteNetwork: /opt/x", "network: site and siteNetwork go together"),
        ("components: bin", "components: 'bin' is not an absolute path"),
        ("volumes: {path: data}", "path: 'data' is not an absolute path - at `$.volumes`"),
        ("images: {cache: x}", "cache: 'x' is not an absolute path - at `$.images`"),
        ("images: {insecureRegistries: ['http://r']}", "'http://r' is not HOST or HOST:PORT"),
        ("images: {insecureRegistries: ['r/path']}", "'r/path' is not HOST or HOST:PORT"),
        ("netwrk: host", "unknown field `netwrk`"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    paths = Paths(tmp_path)
    paths.config.write_text(text)
    with pytest.raises(HPKError) as raised:
        load_config(paths)
    assert str(raised.value).startswith(f"{paths.config}: ")
    assert words in str(raised.value)


def test_no_file_and_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    assert load_config(paths) == Config()
    paths.config.touch()
    assert load_config(paths) == Config()


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.config.mkdir()
    with pytest.raises(HPKError, match=r"config\.yaml can't be read: Is a directory"):
        load_config(paths)


def test_values_that_are_right(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.config.write_text(
        "address: 10.1.2.3\nlocalDir: /scratch\nmirror: https://m.example/x\n"
        "images: {insecureRegistries: ['r.example:5000', localhost, '[::1]:5000']}\n"
    )
    config = load_config(paths)
    assert config.images.insecure_registries == ("r.example:5000", "localhost", "[::1]:5000")


def settings(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, f"{prefix}{field.encode_name}.")
        else:
            yield prefix + field.encode_name


def test_the_documentation_lists_every_setting_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    table = text[text.index("| key | default |") :].partition("\n\n")[0].splitlines()[2:]
    assert sorted(row.split("`")[1] for row in table) == sorted(settings(Config))
