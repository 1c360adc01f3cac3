"""The program of a PolicyProcess: makes a policy and answers the rank's questions until the rank ends.

An answer is a problem or None, and a tuple. The first answer's tuple is the policy's split, later ones are fields of a
Placement.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import operator
import os
import pickle
import signal
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection

from megatron_balance.messages import cleaned, described
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy, split_of
from megatron_balance.planning.policies.interface import Policy

_FIELDS = [field.name for field in dataclasses.fields(Placement)]
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the rank, the process `parent`, over the socket that is open as `descriptor`."""
    _end_with(parent)
    # The rank handles the end of the job
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        name, options = pickle.loads(pipe.recv_bytes())
        try:
            policy = load_policy(name, **options)
            made = None, (split_of(policy),)
        except BaseException as error:  # report whatever the policy raises, SystemExit too
            pipe.send_bytes(pickle.dumps((_reported(error), ())))
            return
        pipe.send_bytes(pickle.dumps(made))
        while True:
            pipe.send_bytes(_answer(policy, pipe.recv_bytes()))


def _answer(policy: Policy, question: bytes) -> bytes:
    try:
        planned = policy.plan(*pickle.loads(question))
        if not isinstance(planned, Placement):
            return pickle.dumps((f"returned no Placement: a {cleaned(type(planned).__qualname__)}", ()))
        return pickle.dumps((None, tuple(_plain(getattr(planned, field)) for field in _FIELDS)))
    except BaseException as error:
        return pickle.dumps((f"raised {described(error)}", ()))


def _plain(value: object) -> object:
    """Return plain integers and tuples for objects that behave like them."""
    return tuple(map(_plain, value)) if isinstance(value, Iterable) else operator.index(value)  # pyright: ignore


def _reported(error: BaseException) -> str:
    # load_policy's own errors name the flag
    return cleaned(error, 400) if isinstance(error, ValueError) else f"raised {described(error)}"


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even while a policy loops."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    # Do not wait for threads that the policy has started
    sys.stdout.flush()
    os._exit(0)
