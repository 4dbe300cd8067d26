"""More pods under load."""

import time

from daemons import wait_until
from traffic import Traffic

MOST_SECONDS = 15  # from the scale-out to the first call on a new pod


def test_new_pods_get_calls(node, release):
    release.install()
    with Traffic(node, release) as traffic:
        old = set(traffic.calls_by_pod())

        def new_pods_with_calls():
            return [name for name, calls in traffic.calls_by_pod().items() if name not in old and calls > 0]

        begin = time.monotonic()
        release.scale(4)
        wait_until(new_pods_with_calls, "no new pod gets calls")
        first = time.monotonic() - begin
        wait_until(lambda: len(new_pods_with_calls()) == 2, "a new pod gets no calls")
        every = time.monotonic() - begin
        note = f"first call on a new pod after {first:.1f} s, on both after {every:.1f} s"
        traffic.finish("2 to 4 pods", note)
    assert first <= MOST_SECONDS
