"""A server with the chart's own limits is not throttled: its threads are no more than its cores."""

import time

from machine import cpu_cgroups
from release import Release
from rows import add_row
from traffic import RAPT_LOAD, Client, load_command

SECONDS = 10
MOST_THROTTLED = 0.05  # of the periods


def throttling(pod):
    """(periods, throttled periods) of the pod so far."""
    (file,) = cpu_cgroups().glob(f"**/pod{pod['metadata']['uid']}/cpu.stat")
    stat = dict(line.split() for line in file.read_text().splitlines())
    return int(stat["nr_periods"]), int(stat["nr_throttled"])


def test_a_busy_server_is_not_throttled(node):
    release = Release("attention-threads", defaults={"server.threads": 1, "server.memoryBudgetMiB": 256, "replicas": 1})
    release.install()
    (pod,) = release.ready_pods()
    load = Client(node, release, RAPT_LOAD, load_command(release.address, callers=16))
    time.sleep(2)
    before = throttling(pod)
    time.sleep(SECONDS)
    periods, throttled = (after - earlier for after, earlier in zip(throttling(pod), before))
    load.interrupt()
    ok, lost, slowest, causes = load.report()
    release.remove()
    note = f"{throttled} of {periods} periods throttled"
    add_row("one pod with the chart's limits, 16 callers", RAPT_LOAD, ok, lost, slowest, note)
    assert lost == 0, causes
    assert periods > 0 and throttled <= MOST_THROTTLED * periods
