"""How the prompts of several requests share one step."""

from __future__ import annotations


def shares(debts: list[int], room: int) -> list[int]:
    """The tokens that each prompt gets of `room`, for what they still owe, first in order first.

    The first has at least half of the room; with the other half shorter prompts may overtake it, the shortest first.
    So nobody waits for all of a very long prompt, and the long one takes twice its time at most.
    """
    given = [0] * len(debts)
    if not debts:
        return given
    given[0] = min(debts[0], -(-room // 2))
    left = room - given[0]
    shorter = sorted((debt, i) for i, debt in enumerate(debts) if debt < debts[0])
    for i in (*(i for _, i in shorter), *range(len(debts))):
        n = min(debts[i] - given[i], left)
        given[i] += n
        left -= n
    return given
