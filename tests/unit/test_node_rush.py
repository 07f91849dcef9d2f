import asyncio

from hpk_kubelet.node import rush
from hpk_kubelet.node.rush import MANY, Rush


def test_few_are_no_rush():
    few = Rush()
    for number in range(MANY):
        few.begin(str(number))
        few.begin(str(number))
    assert few.left() == 0


async def test_what_waits_goes_on_when_most_have_their_jobs():
    many = Rush()
    for number in range(MANY + 1):
        many.begin(str(number))
    assert 0 < many.left() <= rush.LONGEST
    waiting = asyncio.create_task(many.over())
    for number in range(MANY // 2):
        many.end(str(number))
    await asyncio.sleep(0)
    assert not waiting.done()
    many.end(str(MANY))
    await waiting
    assert many.left() == 0


async def test_nothing_is_put_off_for_ever(monkeypatch):
    monkeypatch.setattr(rush, "LONGEST", 0.05)
    stuck = Rush()
    for number in range(2 * MANY):
        stuck.begin(str(number))
    await stuck.over()
    assert stuck.left() == 0
