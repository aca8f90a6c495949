"""The claims of the paper as checks of measurements, with error bars.

A claim is a margin that should be positive. A few quantities stand for the paper's words:

- how fast a curve converges: its mean accuracy over nodes, averaged over all evaluations after the start ("speed");
- how much nodes differ: best minus worst accuracy, averaged over the later half of the evaluations ("band").

Both are in points, percent of test accuracy. Thresholds were chosen before the experiments were run.

The margin M is averaged over seeds s and test images i, and has the standard error

    se^2 = Var_s(M_s) / seeds + Var_i(M_i) / images,

where M_s is the margin of a seed and M_i that of an image, averaged over seeds. Curves are compared on the same images
with the same seeds, so what is hard for both cancels. If seeds are evaluated on different samples, Var_s holds part of
the error of images already: Var_i is then that of one seed, and counts as much as two samples have in common. With one
seed only the error of images is known, and how much another seed would change is not.

A claim is open if M^2 <= sum t^2 part over both parts of se^2, where t is the quantile of Student's distribution that
chance exceeds in 5 of 100 cases: 2.0 for many images, 4.3 for three seeds (Banerjee, 1960). Otherwise it holds if
M > 0. A seed with several kinds of initial models counts once, with its mean. A band is not a mean over images: its
error is that over seeds, and with one seed it is open.

A claim about each of k evaluations holds if it holds at each. Chance has many ways to refute it, so t is the quantile
of 2.5 / k of 100 cases (Bonferroni). Such a claim implies the same of the mean over evaluations, which refutes it in
2.5 of 100 cases, too: with three seeds hardly anything else can.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

CHANCE = 0.05  # of a verdict if the true margin is 0


class Curve(NamedTuple):
    """Test accuracy over time, in percent."""

    epoch: np.ndarray  # [t]
    accuracy: np.ndarray  # [seeds, t, nodes]
    right: np.ndarray | None = None  # [seeds, t, images] nodes that are right on each image; None: not known
    images: np.ndarray | None = None  # [seeds, images] which ones
    mean_model: np.ndarray | None = None  # [seeds, t] accuracy of the mean of all models
    runs: Sequence[tuple[Hashable, ...]] | None = None  # [seeds] seed and kind of initial models; None: seeds 0, 1, ...

    def speed(self) -> np.ndarray:
        """Mean accuracy over nodes and all evaluations after the start, `[seeds]`."""
        return self.accuracy[:, 1:].mean(axis=(1, 2))

    def band(self) -> np.ndarray:
        """Best minus worst node, averaged over the later half of the evaluations after the start, `[seeds]`."""
        return np.ptp(self.accuracy, axis=2)[:, max(1, len(self.epoch) // 2) :].mean(axis=1)

    def mean(self) -> np.ndarray:
        """Mean accuracy over nodes, `[seeds, t]`."""
        return self.accuracy.mean(axis=2)


class Verdict(NamedTuple):
    """Whether a claim holds, and the numbers behind it."""

    holds: bool | None  # None: open, or too little was run to tell
    numbers: str
    margin: float | None = None  # None: too little was run, or the claim is not about a margin
    error: float | None = None  # standard error of the margin; None: not known

    @property
    def words(self) -> str:
        """The verdict in words."""
        if self.holds is None:
            return "cannot be told" if self.margin is None else "open"
        return "holds" if self.holds else "DOES NOT HOLD"

    @property
    def told_margin(self) -> str:
        """The margin and its standard error."""
        if self.margin is None:
            return ""
        return f"{self.margin:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    def __str__(self) -> str:
        return f"{self.words}: {self.numbers}" + (f"; margin {self.told_margin}" if self.told_margin else "")


class _TooShortError(Exception):
    """The curves share no evaluation after the start."""


class _NoPairError(Exception):
    """The curves share no seed."""


class _OtherImagesError(Exception):
    """The curves were not evaluated on the same images."""


class Claim(NamedTuple):
    """A sentence of the paper and a function that judges it by measurements."""

    text: str
    judge: Callable[[Mapping[str, Any]], Verdict]


def within(first: str, second: str, *, points: float, since: float) -> Claim:
    """Claims that the means of two curves differ by at most `points` at every evaluation from epoch `since` on.

    The margin is that of the evaluation at which the means over seeds differ most.

    >>> epoch = np.arange(3)
    >>> fast, slow = (Curve(epoch, np.array([a, a])[:, :, None]) for a in ([10, 80, 90], [10, 60, 89.5]))
    >>> claim = within("D-Cliques", "ring", points=1, since=2)
    >>> print(claim.judge({"D-Cliques": fast, "ring": slow}))
    holds: at most 0.50 points apart, 0.50 on average (2 of 2 seeds); margin 0.50 ± 0.00
    """

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = _together(curves, first, second)
        late = np.flatnonzero(a.epoch >= since)
        if not len(late):
            return Verdict(None, f"run for {a.epoch[-1]:g} epochs only")
        lead = a.mean() - b.mean()  # [seeds, t]

        def apart(times: np.ndarray, chance: float) -> Verdict:
            """Judges the mean gap over some evaluations."""
            sign = -1 if lead[:, times].mean() < 0 else 1
            each = _of_images(lambda a, b: points - sign * (a - b)[:, times].mean(axis=1), a, b)
            return _verdict(points - sign * lead[:, times].mean(axis=1), numbers, a, each, refuted_by=chance)

        largest, mean = np.abs(lead.mean(axis=0))[late].max(), abs(lead[:, late].mean())
        numbers = f"at most {largest:.2f} points apart, {mean:.2f} on average"
        if a.mean_model is not None and b.mean_model is not None:
            numbers += f"; mean models {np.abs((a.mean_model - b.mean_model).mean(axis=0))[late].max():.2f}"
        each = [apart(late[k : k + 1], CHANCE / 2 / len(late)) for k in range(len(late))]
        worst = min(each, key=lambda verdict: verdict.margin or 0.0)
        told = [verdict.holds for verdict in (*each, apart(late, CHANCE / 2))]
        holds = False if False in told else True if all(told[:-1]) else None
        return worst._replace(holds=holds)

    return Claim(f'"{first}" is within {_points(points)} of "{second}" from epoch {since:g} on', judge)


def faster(first: str, second: str, *, by: float = 0.0) -> Claim:
    """Claims that one curve converges faster than another, `by` that many points on average."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        a, b = _together(curves, first, second)
        numbers = f"{a.speed().mean():.1f} against {b.speed().mean():.1f} on average, "
        numbers += f"{_last(a)} against {_last(b)} at epoch {a.epoch[-1]:g}"
        each = _of_images(lambda a, b: (a - b)[:, 1:].mean(axis=1) - by, a, b)
        return _verdict(a.speed() - b.speed() - by, numbers, a, each)

    return Claim(f'"{first}" converges faster than "{second}"' + (f", by {_points(by)}" if by else ""), judge)


def narrower(first: str, second: str, *, factor: float = 1.0) -> Claim:
    """Claims that nodes differ less in one curve than in another, by a factor."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        found = _together(curves, first, second)
        a, b = (curve.band() for curve in found)
        return _verdict(b - factor * a, f"band of {a.mean():.2f} against {b.mean():.2f} points", found[0])

    much = f"at least {factor:g} times narrower" if factor != 1 else "narrower"
    return Claim(f'the band of "{first}" is {much} than that of "{second}"', judge)


def no_wider(first: str, second: str, *, points: float) -> Claim:
    """Claims that the band of one curve is at most `points` wider than that of another."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        found = _together(curves, first, second)
        a, b = (curve.band() for curve in found)
        return _verdict(b + points - a, f"band of {a.mean():.2f} against {b.mean():.2f} points", found[0])

    return Claim(f'the band of "{first}" is at most {_points(points)} wider than that of "{second}"', judge)


def gains_more(gain: tuple[str, str], than: tuple[str, str]) -> Claim:
    """Claims that the lead in speed of one pair of curves exceeds that of another pair."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        found = _together(curves, *gain, *than)
        a, b, c, d = (curve.speed() for curve in found)
        each = _of_images(lambda a, b, c, d: (a - b - c + d)[:, 1:].mean(axis=1), *found)
        numbers = f"{(a - b).mean():.2f} against {(c - d).mean():.2f} points"
        if all(curve.mean_model is not None for curve in found):
            a_, b_, c_, d_ = (curve.mean_model[:, 1:].mean() for curve in found)  # type: ignore[index]
            numbers += f", mean models {a_ - b_:.2f} against {c_ - d_:.2f}"
        return _verdict((a - b) - (c - d), numbers, found[0], each)

    return Claim(f'"{gain[0]}" gains more on "{gain[1]}" than "{than[0]}" on "{than[1]}"', judge)


def reaches(label: str, percent: float, *, points: float, at: float) -> Claim:
    """Claims that the mean of a curve is within `points` of a number at an epoch."""

    def judge(curves: Mapping[str, Curve]) -> Verdict:
        curve = curves[label]
        if curve.epoch[-1] < at:
            return Verdict(None, f"run for {curve.epoch[-1]:g} epochs only")
        then = int(np.flatnonzero(curve.epoch >= at)[0])
        beyond = curve.mean()[:, then] - percent
        sign = -1 if beyond.mean() < 0 else 1
        each = _of_images(lambda right: points - sign * (right[:, then] - percent), curve)
        numbers = f"{beyond.mean() + percent:.2f} %"
        if curve.mean_model is not None:
            numbers += f", mean model {curve.mean_model[:, then].mean():.2f} %"
        return _verdict(points - sign * beyond, numbers, curve, each)

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
        both = min(len(skews[first]), len(skews[second]))  # experiments
        above = (skews[first][:both] - skews[second][:both])[:, since:].mean(axis=0)
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
    except _NoPairError:
        return Verdict(None, "not run with the same seeds and initial models")
    except _OtherImagesError:
        return Verdict(None, "not evaluated on the same test examples")


def _points(number: float) -> str:
    return f"{number:g} point" + ("s" if number != 1 else "")


def _together(curves: Mapping[str, Curve], *labels: str) -> list[Curve]:
    """Restricts curves to the epochs at which all of them were evaluated, and to the runs that all of them have."""
    found = [curves[label] for label in labels]
    common = functools.reduce(np.intersect1d, [curve.epoch for curve in found])
    if not (common > 0).any():
        raise _TooShortError
    names = [_runs(curve) for curve in found]
    shared = [run for run in names[0] if all(run in others for others in names)]
    if not shared:
        raise _NoPairError
    found = [_at(curve, common, [runs.index(run) for run in shared]) for curve, runs in zip(found, names, strict=True)]
    images = [curve.images for curve in found if curve.images is not None]
    if not all(np.array_equal(images[0], others) for others in images):
        raise _OtherImagesError
    return found


def _runs(curve: Curve) -> list[tuple[Hashable, ...]]:
    return [(number,) for number in range(len(curve.accuracy))] if curve.runs is None else list(curve.runs)


def _at(curve: Curve, epochs: np.ndarray, runs: list[int]) -> Curve:
    kept = np.isin(curve.epoch, epochs)
    of_time = {name: getattr(curve, name) for name in ("accuracy", "right", "mean_model")}
    images = None if curve.images is None else curve.images[runs]
    parts = {name: a[runs][:, kept] for name, a in of_time.items() if a is not None}
    return curve._replace(epoch=epochs, images=images, runs=[_runs(curve)[run] for run in runs], **parts)


def _last(curve: Curve) -> str:
    told = f"{curve.mean()[:, -1].mean():.1f}"
    return told if curve.mean_model is None else f"{told} (mean model {curve.mean_model[:, -1].mean():.1f})"


def _of_images(margin: Callable[..., np.ndarray], *curves: Curve) -> np.ndarray | None:
    """Computes the margins of images `[seeds, images]`; None unless it is known for all curves which are right."""
    right = [curve.right for curve in curves]
    return None if any(counts is None for counts in right) else margin(*right)


def _verdict(
    margins: np.ndarray,
    numbers: str,
    curve: Curve,
    of_images: np.ndarray | None = None,
    *,
    refuted_by: float = CHANCE,
) -> Verdict:
    """Makes the verdict from the margins of runs, `[runs]`, and of images, `[runs, images]`, if they are known.

    One of the curves tells the seeds and the images of the runs. `refuted_by` is the probability that chance may refute
    a claim whose margin is 0.
    """
    seeds = [run[0] for run in _runs(curve)]
    first = [seeds.index(seed) for seed in dict.fromkeys(seeds)]
    margins = _of_seeds(margins, seeds)
    numbers += f" ({np.count_nonzero(margins > 0)} of {len(first)} seed" + ("s)" if len(first) > 1 else ")")
    margin, parts = float(margins.mean()), []
    if len(first) > 1:
        parts.append((float(margins.var(ddof=1)) / len(first), len(first) - 1))
    if of_images is not None and curve.images is not None:
        parts.append(_of_chosen_images(_of_seeds(of_images, seeds), curve.images[first]))
    if not parts:
        return Verdict(None, numbers, margin)
    chance = CHANCE if margin > 0 else refuted_by
    needed = np.sqrt(sum(part * scipy.stats.t.ppf(1 - chance / 2, freedom) ** 2 for part, freedom in parts))
    error = float(np.sqrt(sum(part for part, _ in parts)))
    return Verdict(margin > 0 if abs(margin) > needed else None, numbers, margin, error)


def _of_seeds(values: np.ndarray, seeds: Sequence[Hashable]) -> np.ndarray:
    """Averages over the runs of each seed, `[seeds, ...]`."""
    return np.stack([values[[other == seed for other in seeds]].mean(axis=0) for seed in dict.fromkeys(seeds)])


def _of_chosen_images(of_images: np.ndarray, images: np.ndarray) -> tuple[float, int]:
    """Returns the part of the squared standard error that images make, and its degrees of freedom."""
    count, shared = images.shape[1], 1.0
    if (images == images[0]).all():
        of_images = of_images.mean(axis=0, keepdims=True)
    else:
        pairs = itertools.combinations(images, 2)
        shared = float(np.mean([len(np.intersect1d(one, other)) for one, other in pairs])) / count
    return shared * float(of_images.var(axis=1, ddof=1).mean()) / count, count - 1
