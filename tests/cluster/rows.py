"""The table of calls made and lost, a row for each client and event."""

import os

CALLS = int(os.environ.get("RAPT_CLUSTER_CALLS", 30000))  # the least number of each row

ROWS = []


def add_row(event, client, ok, lost, slowest, note=""):
    ROWS.append(f"| {event} | {client} | {lost:,} of {ok + lost:,} | {slowest:.2f} s | {note} |")
    print(ROWS[-1])


def table():
    return ["| event | client | lost calls | slowest call | |", "| --- | --- | --- | --- | --- |", *ROWS]
