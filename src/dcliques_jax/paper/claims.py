"""The claims of the paper as checks of measurements.

A claim holds if its margin, averaged over seeds, is positive. A few quantities stand for the paper's words:

- how fast a curve converges: its mean accuracy over nodes, averaged over all evaluations after the start ("speed");
- how much nodes differ: best minus worst accuracy, averaged over the later half of the evaluations ("band").

Both are in points, percent of test accuracy. Thresholds were chosen before the experiments were run.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Curve(NamedTuple):
    """Test accuracy over time."""

    epoch: np.ndarray  # [t]
    accuracy: np.ndarray  # [seeds, t, nodes] in percent

    def speed(self) -> np.ndarray:
        """Mean accuracy over nodes and all evaluations after the start, `[seeds]`."""
        return self.accuracy[:, 1:].mean(axis=(1, 2))

    def band(self) -> np.ndarray:
        """Best minus worst node, averaged over the later half of the evaluations after the start, `[seeds]`."""
        return np.ptp(self.accuracy, axis=2)[:, max(1, len(self.epoch) // 2) :].mean(axis=1)

    def final(self) -> np.ndarray:
        """Mean accuracy over nodes at the end, `[seeds]`."""
        return self.accuracy[:, -1].mean(axis=1)


class Verdict(NamedTuple):
    """Whether a claim holds, and the numbers behind it."""

    holds: bool | None  # None: too little was run to tell
    numbers: str

    def __str__(self) -> str:
        return f"{ {True: 'holds', False: 'DOES NOT HOLD', None: 'cannot be told'}[self.holds] }: {self.numbers}"


class _TooShortError(Exception):
    """The curves share no evaluation after the start."""


class Claim(NamedTuple):
    """A sentence of the paper and a function that judges it by measurements."""

    text: str
    judge: Callable[[Mapping[str, Any]], Verdict]


def within(first: str, second: str, *, points: float, since: float) -> Claim:
    """Claims that the means of two curves differ by at most `points` at every evaluation from epoch `since` on.

    >>> epoch = np.arange(3)
    >>> fast, slow = (Curve(epoch, np.array(a)[None, :, None]) for a in ([10, 80, 90], [10, 60, 89.5]))
    >>> claim = within("D-Cliques", "ring", points=1, since=2)
    >>> print(claim.judge({"D-Cliques": fast, "ring": slow}))
    holds: at most 0.50 points apart
    """

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = _together(curves, first, second)
        late = a.epoch >= since
        if not late.any():
            return Verdict(None, f"run for {a.epoch[-1]:g} epochs only")
        apart = np.abs(a.accuracy[:, late].mean(axis=2) - b.accuracy[:, late].mean(axis=2)).max(axis=1)
        return _verdict(points - apart, f"at most {apart.max():.2f} points apart")

    return Claim(f'"{first}" is within {_points(points)} of "{second}" from epoch {since:g} on', judge)


def faster(first: str, second: str, *, by: float = 0.0) -> Claim:
    """Claims that one curve converges faster than another, `by` that many points on average."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = _together(curves, first, second)
        numbers = f"{a.speed().mean():.1f} against {b.speed().mean():.1f} on average, "
        numbers += f"{a.final().mean():.1f} against {b.final().mean():.1f} at epoch {a.epoch[-1]:g}"
        return _verdict(a.speed() - b.speed() - by, numbers)

    return Claim(f'"{first}" converges faster than "{second}"' + (f", by {_points(by)}" if by else ""), judge)


def narrower(first: str, second: str, *, factor: float = 1.0) -> Claim:
    """Claims that nodes differ less in one curve than in another, by a factor."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = (curve.band() for curve in _together(curves, first, second))
        return _verdict(b - factor * a, f"band of {a.mean():.2f} against {b.mean():.2f} points")

    much = f"at least {factor:g} times narrower" if factor != 1 else "narrower"
    return Claim(f'the band of "{first}" is {much} than that of "{second}"', judge)


def no_wider(first: str, second: str, *, points: float) -> Claim:
    """Claims that the band of one curve is at most `points` wider than that of another."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = (curve.band() for curve in _together(curves, first, second))
        return _verdict(b + points - a, f"band of {a.mean():.2f} against {b.mean():.2f} points")

    return Claim(f'the band of "{first}" is at most {_points(points)} wider than that of "{second}"', judge)


def gains_more(gain: tuple[str, str], than: tuple[str, str]) -> Claim:
    """Claims that the lead in speed of one pair of curves exceeds that of another pair."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b, c, d = (curve.speed() for curve in _together(curves, *gain, *than))
        return _verdict((a - b) - (c - d), f"{(a - b).mean():.2f} against {(c - d).mean():.2f} points")

    return Claim(f'"{gain[0]}" gains more on "{gain[1]}" than "{than[0]}" on "{than[1]}"', judge)


def reaches(label: str, percent: float, *, points: float, at: float) -> Claim:
    """Claims that the mean of a curve is within `points` of a number at an epoch."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        curve = curves[label]
        if curve.epoch[-1] < at:
            return Verdict(None, f"run for {curve.epoch[-1]:g} epochs only")
        found = curve.accuracy[:, curve.epoch >= at][:, 0].mean(axis=1)
        return _verdict(points - np.abs(found - percent), f"{found.mean():.2f} %")

    return Claim(f'"{label}" is within {_points(points)} of {percent:g} % at epoch {at:g}', judge)


def counted(what: str, stated: float, count: Callable[[], float], *, by: float) -> Claim:
    """Claims a number that the paper states. `count` counts it again, and `by` is the tolerance."""

    def judge(_: Mapping[str, Any]) -> Verdict:
        return Verdict(abs(count() - stated) <= by, f"{count():.2f}")

    return Claim(f"{stated:g} {what}", judge)


def smaller_skew(label: str, *, most: float) -> Claim:
    """Claims that Greedy Swap lowers the skew in every experiment, and to at most `most` in the median."""

    def judge(skews: Mapping[str, np.ndarray]) -> Verdict:
        start, end = skews[label][:, 0], skews[label][:, -1]
        median = float(np.median(end))
        numbers = f"{start.min():.3f} to {start.max():.3f} at random, {end.min():.3f} to {end.max():.3f} (median "
        return Verdict(bool((end < start).all()) and median <= most, f"{numbers}{median:.3f}) by Greedy Swap")

    return Claim(f"{label}: Greedy Swap lowers the skew in every experiment, in most to {most:g} or less", judge)


def settles(label: str, *, steps: int) -> Claim:
    """Claims that the mean skew after some steps is close to that at the end."""

    def judge(skews: Mapping[str, np.ndarray]) -> Verdict:
        then, end = skews[label][:, steps].mean(), skews[label][:, -1].mean()
        return Verdict(bool(then <= end + 0.01), f"{then:.3f} then, {end:.3f} at the end")

    return Claim(f"{label}: after {steps} steps the mean skew is within 0.01 of the last", judge)


def harder(first: str, second: str, *, since: int) -> Claim:
    """Claims that the mean skew of one data set stays above that of another from step `since` on."""

    def judge(skews: Mapping[str, np.ndarray]) -> Verdict:
        above = (skews[first] - skews[second])[:, since:].mean(axis=0)
        return Verdict(bool((above > 0).all()), f"{above.min():.3f} to {above.max():.3f} higher")

    return Claim(f"{first} is harder than {second}: its mean skew is higher from step {since} on", judge)


def judged(claim: Claim, measured: Mapping[str, Any]) -> Verdict:
    """Judges a claim. The verdict is None if something it needs was not run."""
    try:
        return claim.judge(measured)
    except KeyError as missing:
        return Verdict(None, f"{missing.args[0]} was not run")
    except _TooShortError:
        return Verdict(None, "not run long enough")


def _points(number: float) -> str:
    return f"{number:g} point" + ("s" if number != 1 else "")


def _together(curves: Mapping[str, Curve], *labels: str) -> list[Curve]:
    """Restricts curves to the epochs at which all of them were evaluated."""
    found = [curves[label] for label in labels]
    common = functools.reduce(np.intersect1d, [curve.epoch for curve in found])
    if not (common > 0).any():
        raise _TooShortError
    return [Curve(common, curve.accuracy[:, np.isin(curve.epoch, common)]) for curve in found]


def _verdict(margins: np.ndarray, numbers: str) -> Verdict:
    """Makes the verdict from margins `[seeds]`."""
    if len(margins) > 1:
        numbers += f" ({np.count_nonzero(margins > 0)} of {len(margins)} seeds)"
    return Verdict(bool(margins.mean() > 0), numbers)
