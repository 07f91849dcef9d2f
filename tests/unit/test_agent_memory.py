"""What keeps an agent small."""

import sys

from hpk_kubelet.agent import memory
from hpk_kubelet.agent.later import postpone

_SMAPS = """\
55d0c0a00000-55d0c0c00000 r-xp 00010000 00:01 12 /usr/bin/python3.13
Size:               2048 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000001000 r--p 00000000 00:01 13 /usr/lib/with a space.so
Anonymous:             4 kB
7f0000001000-7f0000003000 r--p 00000000 00:01 13 /usr/lib/with a space.so
Anonymous:             0 kB
7f0000003000-7f0000004000 rw-p 00000000 00:01 13 /usr/lib/written.so
Anonymous:             0 kB
7f0000004000-7f0000005000 r--s 00000000 00:01 14 /usr/lib/shared
Anonymous:             0 kB
7f0000005000-7f0000006000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
7f0000006000-7f0000007000 r--p 00000000 00:00 0
Anonymous:             0 kB
"""


def test_only_clean_pages_of_files_are_given_back() -> None:
    assert list(memory.clean_mappings(_SMAPS.splitlines())) == [
        (0x55D0C0A00000, 0x55D0C0C00000),
        (0x7F0000001000, 0x7F0000003000),
    ]


def test_a_postponed_module_is_imported_when_it_is_used() -> None:
    before = sys.modules.pop("colorsys", None)
    try:
        postpone("colorsys")
        import colorsys

        assert not hasattr(sys.modules["colorsys"], "__file__")
        assert colorsys.rgb_to_hls(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
        assert hasattr(sys.modules["colorsys"], "__file__")
        there = sys.modules["colorsys"]
        postpone("colorsys")
        assert sys.modules["colorsys"] is there
    finally:
        sys.modules.pop("colorsys", None)
        if before is not None:
            sys.modules["colorsys"] = before
