"""Real processes, linked by JAX over the loopback address: they compute what one does, and none waits for ever."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from dcliques_jax import Result

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def start(*arguments, devices):
    return subprocess.Popen(
        [sys.executable, "examples/multi_host.py", "--nodes=100", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ
        | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_cpu_use_fusion_emitters=false",
            "JAX_PLATFORMS": "cpu",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(*arguments):
    """Two processes of two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = [f"--coordinator=127.0.0.1:{port}", "--processes=2", *arguments]
    return [start(*together, f"--process={number}", devices=2) for number in (0, 1)]


def finished(processes, seconds=240):
    """What they print; they must end well."""
    try:
        told = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return told


def assert_same_run(path, expected):
    found, expected = Result.load(path), Result.load(expected)
    for name in ("accuracy", "loss", "consensus_distance"):
        np.testing.assert_allclose(getattr(found.history, name), getattr(expected.history, name), atol=1e-5)
    np.testing.assert_allclose(found.params["Dense_0"]["kernel"], expected.params["Dense_0"]["kernel"], atol=1e-5)


def test_two_processes_compute_what_one_does_and_outlive_neither(tmp_path):
    epochs = "--epochs=150"
    alone = tmp_path / "alone.npz"
    finished([start("--processes=1", epochs, f"--save={alone}", devices=1)])
    together = tmp_path / "together.npz"
    told = finished(start_two(epochs, f"--save={together}"))
    assert "edges between 4 devices" in told[0]
    assert "epoch" not in told[1]  # one process speaks
    assert_same_run(together, alone)

    # One of two processes is killed in the middle of a run.
    folder = tmp_path / "checkpoints"
    first, second = start_two(epochs, f"--checkpoints={folder}")
    deadline = time.monotonic() + 120
    while not list(folder.glob("from_run_0/round_[1-9]*.npz")):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    second.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    told = first.communicate(timeout=120)[0]
    second.communicate()
    assert first.returncode != 0, told
    assert time.monotonic() - killed < 90

    # What is left of it goes on in one process, with another number of devices.
    resumed = tmp_path / "resumed.npz"
    (told,) = finished([start("--processes=1", epochs, f"--checkpoints={folder}", f"--save={resumed}", devices=3)])
    assert "edges between 3 devices" in told
    assert_same_run(resumed, alone)
