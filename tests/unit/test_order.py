"""The order of a communicator's operations, without a communicator."""

import signal
from contextlib import suppress

from moecomm.backends.order import InOrder


def test_an_interrupt_at_any_moment_leaves_no_lock() -> None:
    order, before = InOrder(lambda: None), signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for turn in range(3000):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 100 * 1e-6)
                while True:
                    order.run(bool)
            for lock in (order._gate, order._running):
                assert lock.acquire(timeout=1), f"turn {turn}"
                lock.release()
            assert order.run(lambda: 3) == 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
