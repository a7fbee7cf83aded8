"""Number of entries that a team sends in B-SAG: Algorithm 2 of SparDL (zhao2024spardl, section III-D2).

The exchange should leave about as many entries as a block keeps. If it leaves more, fewer are sent (the sentence above
Algorithm 2 says the opposite).
"""

from __future__ import annotations

from dataclasses import dataclass

_MIN_STEP = 0.1  # moves h by one within ten steps


@dataclass
class TopHController:
    """Algorithm 2 for one block position; the same on all workers at this position."""

    target: int  # entries that the block keeps, ``d k / P``
    num_teams: int  # d
    h: float = 0.0  # entries to send, a real number from ``k / P`` to ``d k / P``; rounded when it is used
    step: float = 0.0  # added to ``h`` next
    doubles: bool = False  # the next step in the same direction is twice as long

    def __post_init__(self) -> None:
        if self.h == 0.0:
            self.h, self.step = self.lowest, self.initial_step

    @property
    def lowest(self) -> float:
        """``h`` if teams' entries do not overlap."""
        return self.target / self.num_teams

    @property
    def initial_step(self) -> float:
        """One percent of the range of ``h``."""
        return max(0.01 * self.lowest * (self.num_teams - 1), _MIN_STEP)

    @property
    def count(self) -> int:
        """Entries to send now."""
        return max(1, round(self.h)) if self.target else 0

    def observe(self, num_entries: int) -> None:
        """Adjust ``h`` after an exchange that has left ``num_entries`` different entries (lines 3 to 12)."""
        too_many = num_entries > self.target
        if too_many != (self.step > 0):  # the direction is right
            if self.doubles:
                self.step *= 2
            self.doubles = not self.doubles
        else:
            self.step *= -0.5
            self.doubles = False
        if abs(self.step) < _MIN_STEP:
            self.step = _MIN_STEP if self.step > 0 else -_MIN_STEP
        self.h += self.step
        if not self.lowest <= self.h <= self.target:
            # At a bound, begin anew, pointing inwards: doubling would never end.
            self.h = min(max(self.h, self.lowest), float(self.target))
            self.step = self.initial_step * (1 if self.h == self.lowest else -1)
            self.doubles = False
