"""The paper's sentences as checks of what was measured.

A claim holds if its margin, averaged over seeds, is positive. The same few quantities stand for the paper's words:

- how fast a curve converges: its mean accuracy over nodes, averaged over all evaluations after the start ("speed");
- how much nodes differ: best less worst accuracy, averaged over the evaluations of the later half ("band").

All are in points, percent of test accuracy. Thresholds were chosen before the experiments were run.
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
        """Best less worst node, averaged over the later half of the evaluations after the start, `[seeds]`."""
        return np.ptp(self.accuracy, axis=2)[:, max(1, len(self.epoch) // 2) :].mean(axis=1)

    def final(self) -> np.ndarray:
        """Mean accuracy over nodes at the end, `[seeds]`."""
        return self.accuracy[:, -1].mean(axis=1)


class Verdict(NamedTuple):
    """Whether a claim holds, and the numbers it was judged by."""

    holds: bool | None  # None: it cannot be told from what was run
    numbers: str

    def __str__(self) -> str:
        return f"{ {True: 'holds', False: 'DOES NOT HOLD', None: 'cannot be told'}[self.holds] }: {self.numbers}"


class _TooShortError(Exception):
    """There is no evaluation after the start that all curves have."""


class Claim(NamedTuple):
    """A sentence, and how to judge it by what was measured."""

    text: str
    judge: Callable[[Mapping[str, Any]], Verdict]


def within(first: str, second: str, *, points: float, since: float) -> Claim:
    """The means of two curves are close at every evaluation from some epoch on.

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
    """A curve converges faster than another, by that many points on average."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = _together(curves, first, second)
        numbers = f"{a.speed().mean():.1f} against {b.speed().mean():.1f} on average, "
        numbers += f"{a.final().mean():.1f} against {b.final().mean():.1f} at epoch {a.epoch[-1]:g}"
        return _verdict(a.speed() - b.speed() - by, numbers)

    return Claim(f'"{first}" converges faster than "{second}"' + (f", by {_points(by)}" if by else ""), judge)


def narrower(first: str, second: str, *, factor: float = 1.0) -> Claim:
    """Nodes differ less in one curve than in another, by a factor."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = (curve.band() for curve in _together(curves, first, second))
        return _verdict(b - factor * a, f"band of {a.mean():.2f} against {b.mean():.2f} points")

    much = f"at least {factor:g} times narrower" if factor != 1 else "narrower"
    return Claim(f'the band of "{first}" is {much} than that of "{second}"', judge)


def no_wider(first: str, second: str, *, points: float) -> Claim:
    """Nodes of one curve differ at most that much more than those of another."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = (curve.band() for curve in _together(curves, first, second))
        return _verdict(b + points - a, f"band of {a.mean():.2f} against {b.mean():.2f} points")

    return Claim(f'the band of "{first}" is at most {_points(points)} wider than that of "{second}"', judge)


def gains_more(gain: tuple[str, str], than: tuple[str, str]) -> Claim:
    """What a curve is faster than another by exceeds what a third is faster than a fourth by."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b, c, d = (curve.speed() for curve in _together(curves, *gain, *than))
        return _verdict((a - b) - (c - d), f"{(a - b).mean():.2f} against {(c - d).mean():.2f} points")

    return Claim(f'"{gain[0]}" gains more on "{gain[1]}" than "{than[0]}" on "{than[1]}"', judge)


def reaches(label: str, percent: float, *, points: float, at: float) -> Claim:
    """The mean of a curve is near a number at some epoch."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        curve = curves[label]
        if curve.epoch[-1] < at:
            return Verdict(None, f"run for {curve.epoch[-1]:g} epochs only")
        found = curve.accuracy[:, curve.epoch >= at][:, 0].mean(axis=1)
        return _verdict(points - np.abs(found - percent), f"{found.mean():.2f} %")

    return Claim(f'"{label}" is within {_points(points)} of {percent:g} % at epoch {at:g}', judge)


def counted(what: str, stated: float, count: Callable[[], float], *, by: float) -> Claim:
    """A number of the paper's, counted again."""

    def judge(_: Mapping[str, Any]) -> Verdict:
        return Verdict(abs(count() - stated) <= by, f"{count():.2f}")

    return Claim(f"{stated:g} {what}", judge)


def smaller_skew(label: str, *, most: float) -> Claim:
    """Greedy Swap ends below where it started in every experiment, and close to zero in most of them."""

    def judge(skews: Mapping[str, np.ndarray]) -> Verdict:
        start, end = skews[label][:, 0], skews[label][:, -1]
        median = float(np.median(end))
        numbers = f"{start.min():.3f} to {start.max():.3f} at random, {end.min():.3f} to {end.max():.3f} (median "
        return Verdict(bool((end < start).all()) and median <= most, f"{numbers}{median:.3f}) by Greedy Swap")

    return Claim(f"{label}: Greedy Swap lowers the skew in every experiment, in most to {most:g} or less", judge)


def settles(label: str, *, steps: int) -> Claim:
    """After some steps the mean skew is hardly above that at the end."""

    def judge(skews: Mapping[str, np.ndarray]) -> Verdict:
        then, end = skews[label][:, steps].mean(), skews[label][:, -1].mean()
        return Verdict(bool(then <= end + 0.01), f"{then:.3f} then, {end:.3f} at the end")

    return Claim(f"{label}: after {steps} steps the mean skew is within 0.01 of the last", judge)


def harder(first: str, second: str, *, since: int) -> Claim:
    """The mean skew of the cliques of one data set stays above that of another."""

    def judge(skews: Mapping[str, np.ndarray]) -> Verdict:
        above = (skews[first] - skews[second])[:, since:].mean(axis=0)
        return Verdict(bool((above > 0).all()), f"{above.min():.3f} to {above.max():.3f} higher")

    return Claim(f"{first} is harder than {second}: its mean skew is higher from step {since} on", judge)


def judged(claim: Claim, measured: Mapping[str, Any]) -> Verdict:
    """The verdict on a claim, or that something it needs was not run."""
    try:
        return claim.judge(measured)
    except KeyError as missing:
        return Verdict(None, f"{missing.args[0]} was not run")
    except _TooShortError:
        return Verdict(None, "not run long enough")


def _points(number: float) -> str:
    return f"{number:g} point" + ("s" if number != 1 else "")


def _together(curves: Mapping[str, Curve], *labels: str) -> list[Curve]:
    """Curves at the epochs at which all of them were evaluated."""
    found = [curves[label] for label in labels]
    common = functools.reduce(np.intersect1d, [curve.epoch for curve in found])
    if not (common > 0).any():
        raise _TooShortError
    return [Curve(common, curve.accuracy[:, np.isin(curve.epoch, common)]) for curve in found]


def _verdict(margins: np.ndarray, numbers: str) -> Verdict:
    """The verdict on margins `[seeds]`."""
    if len(margins) > 1:
        numbers += f" ({np.count_nonzero(margins > 0)} of {len(margins)} seeds)"
    return Verdict(bool(margins.mean() > 0), numbers)
