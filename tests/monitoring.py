"""What JAX traces and compiles."""

import contextlib

import jax


@contextlib.contextmanager
def _events(event):
    names = []

    def listen(name, _seconds, **about):
        if name == event:
            names.append(about.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compilations():
    """Collects the names of what is compiled inside."""
    return _events("/jax/core/compile/backend_compile_duration")


def traces():
    """Collects the names of what is traced inside."""
    return _events("/jax/core/compile/jaxpr_trace_duration")
