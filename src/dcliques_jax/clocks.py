"""How long rounds take in a real network.

A clock turns what nodes send into seconds, after a run and without repeating it:

    result.seconds(clocks.WAN)
    plotting.plot_accuracy(results, x="seconds", clock=clocks.WAN)
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks


class Clock(NamedTuple):
    """A network in which all nodes wait for each other in every round; see `synchronous`."""

    latency: Any  # seconds until a message begins to arrive, a number or `[nodes]`
    upload: Any  # bits per second that a node sends
    download: Any  # bits per second that a node receives
    compute: Any  # seconds that a node computes in a round

    def seconds(self, sent: npt.ArrayLike, received: npt.ArrayLike, phases: npt.ArrayLike) -> np.ndarray:
        """Returns the length of rounds, `[turns]`.

        Args:
          sent: bytes that each node sends, `[turns, nodes]`.
          received: bytes that each node receives, `[turns, nodes]`.
          phases: number of times that nodes wait for messages, `[turns]`.
        """
        sent, received = np.asarray(sent, np.float64), np.asarray(received, np.float64)
        for name, value in self._asdict().items():
            if np.shape(value) not in ((), sent.shape[1:]):
                raise ValueError(f"{name} has shape {np.shape(value)}: pass one number, or one for each node")
        transfer = 8 * np.maximum(sent / self.upload, received / self.download)
        waiting = self.latency * np.asarray(phases)[:, None]
        return np.asarray((self.compute + waiting + transfer).max(axis=1))


def synchronous(
    latency: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    compute: npt.ArrayLike = 0.0,
    *,
    download: npt.ArrayLike | None = None,
) -> Clock:
    """Makes the clock of a network in which a round ends when the slowest node has finished.

        t = max_i [ c_i + l_i phases + max(8 out_i / up_i, 8 in_i / down_i) ]

    out_i and in_i are the bytes that node i sends and receives in the round. A round has one phase per gossip and one
    more for averaging gradients. Lost messages and offline nodes are not waited for longer.

    Args:
      latency: seconds l until a message begins to arrive, one number or one per node.
      bandwidth: bits per second that a node sends and receives.
      compute: seconds c that a node computes in a round.
      download: bits per second that a node receives, if it is not `bandwidth`.

    >>> clock = synchronous(latency=0.05, bandwidth=20e6)
    >>> clock.seconds(sent=[[62_800, 62_800]], received=[[62_800, 62_800]], phases=[1])
    array([0.07512])
    """
    download = bandwidth if download is None else download
    given = {"latency": latency, "bandwidth": bandwidth, "download": download, "compute": compute}
    values = [_positive(name, value, name in ("bandwidth", "download")) for name, value in given.items()]
    return Clock(*values)


def _positive(name: str, value: Any, above_zero: bool) -> Any:
    array = np.asarray(value)
    if array.ndim > 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name}={value!r} must be a number of at least 0, or one for each node")
    if above_zero and (array == 0).any():
        raise ValueError(f"{name}={value!r}: nothing would ever arrive; pass positive numbers of bits per second")
    return _checks.real(name, value, 0) if array.ndim == 0 else array


LAN = synchronous(latency=1e-3, bandwidth=1e9)
"""A local network: 1 ms and 1 Gb/s."""

WAN = synchronous(latency=50e-3, bandwidth=20e6)
"""The internet: 50 ms and 20 Mb/s."""
